"""The environment of real processes: as it was at the exec, and as libc has it now."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_segments import Sent

from stallscope.capture.contexts import A_LOOK, Contexts
from stallscope.capture.environ import live_words
from stallscope.capture.parser_client import ParserClient, ParserFailed
from stallscope.capture.procfs import Block, environment_of, facts_of
from stallscope.capture.target import Target
from stallscope.wire.frames import Kind

SECOND = 1_000_000_000
GIVEN = {"RANK": "3", "OTEL_SERVICE_NAME": "train", "NCCL_DEBUG": "WARN", "AWS_SECRET_ACCESS_KEY": "hunter2"}
WANTED = {"RANK": "3", "OTEL_SERVICE_NAME": "train", "NCCL_DEBUG": "WARN"}
FAMILY = Path(__file__).resolve().parents[1] / "targets" / "family.py"


class World:
    """A clock, programs, and what was told of them."""

    def __init__(self) -> None:
        self.now, self.sent, self.parser = SECOND, Sent(), ParserClient()
        self.parser.start()
        self.contexts = Contexts(self.parser, self.sent.send, lambda: self.now)
        self.targets: list[Target] = []
        self.programs: list[subprocess.Popen[str]] = []

    def start(self, *words: str, env: dict[str, str] = GIVEN) -> Target:
        """A program that says a line, then reads its stdin."""
        program = subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.programs.append(program)
        assert program.stdout
        self.line = program.stdout.readline()
        return self.meet(program.pid)

    def python(self, text: str, env: dict[str, str] = GIVEN) -> Target:
        return self.start(sys.executable, "-c", f"import os; {text}; print('ready', flush=True); input()", env=env)

    def meet(self, pid: int, parent: int | None = None) -> Target:
        target = Target(len(self.targets) + 1, 0, facts_of(pid), parent, os.pidfd_open(pid), self.now)
        self.targets.append(target)
        self.contexts.began(target)
        return target

    def look(self) -> None:
        """Long enough after the last one."""
        self.now += 60 * SECOND
        self.contexts.look(self.targets, self.now)

    def told(self, target: Target) -> dict[str, Any]:
        return [body for body in self.sent.of(Kind.CONTEXT) if body["proc"] == target.proc][-1]

    def close(self) -> None:
        for program in self.programs:
            program.kill()
            program.communicate()
        for target in self.targets:
            target.close()
        self.parser.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_a_process_that_keeps_its_environment(world: World) -> None:
    target = world.python("pass")
    assert world.told(target)["env"] == WANTED and not world.told(target)["seen"]
    world.look()
    body = world.told(target)
    assert body == {"at_ns": world.now, "proc": 1, "env": WANTED, "like": None, "overwritten": False, "seen": True,
                    "gone": [], "own": {}}  # fmt: skip
    world.look()
    assert len(world.sent.of(Kind.CONTEXT)) == 2  # nothing new


def test_a_process_that_lost_it(world: World) -> None:
    """/proc/PID/environ shows it for ever."""
    target = world.python("os.environ.clear()")
    world.look()
    assert world.told(target)["env"] == WANTED and world.told(target)["gone"] == sorted(WANTED)


@pytest.mark.parametrize("text", ["os.unsetenv('RANK')", "del os.environ['RANK']", "os.environ.pop('RANK')"])
def test_one_name_is_lost(world: World, text: str) -> None:
    target = world.python(text)
    world.look()
    assert world.told(target)["gone"] == ["RANK"]


def test_names_that_it_gave_itself(world: World) -> None:
    text = "os.environ.update(LOCAL_RANK='1', RANK='4', OTEL_TOKEN='hunter2', TRACEPARENT='https://u:hunter2@h')"
    target = world.python(text)
    world.look()
    body = world.told(target)
    assert body["own"] == {"LOCAL_RANK": "1", "RANK": "4", "TRACEPARENT": "https://[cut]@h"} and body["gone"] == []
    assert body["env"]["RANK"] == "3"  # what it was started with
    assert "hunter2" not in json.dumps(world.sent.of(Kind.CONTEXT))


def test_clearenv(world: World) -> None:
    """The pointer itself is null."""
    target = world.python("import ctypes; ctypes.CDLL(None).clearenv()")
    world.look()
    assert world.told(target)["gone"] == sorted(WANTED)


def test_a_shell(world: World) -> None:
    target = world.start("/bin/sh", "-c", "echo ready; read x")
    world.look()
    assert world.told(target)["seen"] and world.told(target)["gone"] == []


def test_an_empty_environment(world: World) -> None:
    target = world.python("pass", env={})
    world.look()
    assert world.told(target)["env"] == {} and world.told(target)["seen"]


def test_an_overwritten_block(world: World) -> None:
    """What was known before stays; whether it is lost does not follow any more, says the reader of this."""
    target = world.start(sys.executable, str(FAMILY), "title")
    world.look()
    body = world.told(target)
    assert body["overwritten"] and body["env"] == {} and body["own"] == WANTED


@pytest.mark.parametrize(("block", "overwritten"), [
    ("A=1\0B=2\0", False), ("A=1\0", False), ("title\0\0\0\0", True), ("\0\0\0", True), ("tle\0B=2\0", True),
    ("A=1\0\0\0", True), ("A=1\0B=2", False), ("=x\0", True), ("A=1\0noequals\0", False),
])  # fmt: skip
def test_what_an_overwritten_block_looks_like(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, block: str, overwritten: bool
) -> None:
    """Zeros and the rest of a title are nothing that an exec puts there."""
    from stallscope.capture import procfs

    (tmp_path / "environ").write_bytes(block.encode())
    monkeypatch.setattr(procfs, "live_path", lambda pid: str(tmp_path))
    monkeypatch.setattr(procfs, "_stat_fields", lambda pid: ["0"] * 47 + ["4096", "8192"])
    found = environment_of(1)
    assert found is not None and found.is_overwritten is overwritten


def test_a_forked_child_is_like_its_parent(world: World) -> None:
    parent = world.python("p = os.fork() or input()")
    (child,) = map(int, Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split())
    target = world.meet(child, parent.proc)
    assert world.told(target)["like"] == parent.proc and world.told(target)["env"] is None
    world.look()
    assert world.told(target)["seen"]


def test_another_program_in_the_same_process(world: World) -> None:
    """An exec that nobody told of: the block lies elsewhere."""
    target = world.python(
        "print('ready', flush=True); input(); os.execve('/bin/sh', ['sh', '-c', 'echo on; read x'], {'RANK': '9'})"
    )
    world.look()
    program = world.programs[0]
    assert program.stdin and program.stdout
    program.stdin.write("go\n")
    program.stdin.flush()
    while program.stdout.readline() != "on\n":
        pass
    world.look()
    assert world.told(target)["env"] == {"RANK": "9"} and world.told(target)["gone"] == []


def test_a_static_program_without_libc(world: World, tmp_path: Path) -> None:
    source = tmp_path / "bare.c"
    source.write_text("""
        static long sys3(long n, long a, const void *b, long c) {
          long r; __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory"); return r; }
        void _start(void) { static char c; sys3(1, 1, "ready\\n", 6); sys3(0, 0, &c, 1); for (;;) sys3(60, 0, 0, 0); }""")
    subprocess.run(["gcc", "-O1", "-static", "-nostdlib", "-o", tmp_path / "bare", source], check=True)
    target = world.start(str(tmp_path / "bare"))
    world.look()
    assert world.told(target)["env"] == WANTED and not world.told(target)["seen"]


def test_a_static_program(world: World, tmp_path: Path) -> None:
    source = tmp_path / "static.c"
    source.write_text(
        '#include <stdio.h>\n#include <stdlib.h>\nint main(void) { unsetenv("RANK"); puts("ready"); fflush(stdout); return getchar(); }'
    )
    subprocess.run(["gcc", "-static", "-o", tmp_path / "static", source], check=True)
    target = world.start(str(tmp_path / "static"))
    world.look()
    assert world.told(target)["gone"] == ["RANK"]


def test_who_has_ended_is_forgotten(world: World) -> None:
    target = world.python("pass")
    world.programs[0].kill()
    world.programs[0].wait()
    sent = len(world.sent.of(Kind.CONTEXT))
    world.look()
    target.ended = True
    world.look()
    assert len(world.sent.of(Kind.CONTEXT)) == sent and not world.contexts._entries


def test_a_few_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand forked processes must not take a tick for themselves."""
    looked: list[int] = []
    monkeypatch.setattr(world.contexts, "_look_at", lambda target, now: looked.append(target.proc))
    for _ in range(100):
        world.meet(os.getpid())
    world.look()
    assert len(looked) == A_LOOK


def test_a_file_that_holds_the_parser_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked twice, whoever runs it."""
    asked: list[int] = []

    def objects(fd: int, names: Any, *, deadline_s: float) -> Any:
        asked.append(fd)
        raise ParserFailed("cannot parse", "objects", "no answer", died=True)

    monkeypatch.setattr(world.parser, "objects", objects)
    for _ in range(4):
        world.start("/bin/sh", "-c", "echo ready; read x")
    world.look()
    assert len(asked) == 4  # the program and libc, twice
    assert not any(world.told(target)["seen"] for target in world.targets)


def _memory(monkeypatch: pytest.MonkeyPatch, memory: dict[int, bytes]) -> None:
    from stallscope.capture import environ

    def read(pid: int, address: int, length: int) -> bytes:
        for start, data in memory.items():
            if start <= address < start + len(data):
                return data[address - start : address - start + length]
        return b""

    monkeypatch.setattr(environ, "read_up", read)


def words(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


NOWHERE = Block(0x5000, 0x5010, b"A=1\0B=2\0", [], False)


@pytest.mark.parametrize(("memory", "found"), [
    ({}, None),
    ({0x10: words(0)}, []),
    ({0x10: words(0x100)}, None),
    ({0x10: words(0x100), 0x100: words(0x5000, 0x5004, 0)}, [b"A=1", b"B=2"]),
    ({0x10: words(0x100), 0x100: words(0x5004, 1 << 63, 0)}, [b"B=2", b""]),
    ({0x10: words(0x100), 0x100: words(*[0x5000] * 9000)}, None),
    ({0x10: words(0x100), 0x100: words(*[0x9000] * 600, 0), 0x9000: b"A=2\0"}, None),
    ({0x10: words(0x100), 0x100: words(0x900, 0), 0x900: b"RANK=" + b"7" * 9000}, [b"RANK=" + b"7" * (64 + 4096 - 2)]),
])  # fmt: skip
def test_memory_of_any_kind(
    monkeypatch: pytest.MonkeyPatch, memory: dict[int, bytes], found: list[bytes] | None
) -> None:
    """No end, no array, an array that leads nowhere."""
    _memory(monkeypatch, memory)
    assert live_words(1, 0x10, NOWHERE) == found


def test_an_array_that_changes_under_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from stallscope.capture import environ

    answers = iter([[0x5000], [0x5004], [0x5004], [0x5004]])
    monkeypatch.setattr(environ, "_pointers", lambda pid, at: next(answers))
    assert live_words(1, 0x10, NOWHERE) == [b"B=2"]


def test_reading_is_quick(world: World) -> None:
    """Ten looks at a process with a hundred variables."""
    target = world.python("pass", env={**GIVEN, **{f"V{n}": "x" * 50 for n in range(100)}})
    world.look()
    begin = time.process_time()
    for _ in range(10):
        world.look()
    assert time.process_time() - begin < 1
    assert world.told(target)["seen"]

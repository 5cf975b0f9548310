"""Looks at real programs that have just begun, by a clock that stands where it is put."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_segments import Sent

from stallscope.capture import startplaces
from stallscope.capture.procfs import execed_facts, facts_of, forked_facts
from stallscope.capture.startplaces import LEAST_NS, MOST_NS, StartPlaces
from stallscope.capture.target import Target
from stallscope.wire.frames import Kind

MS, S = 1_000_000, 1_000_000_000


class World:
    """A clock that begins when the program does."""

    def __init__(self) -> None:
        self.now, self.sent = 100 * S, Sent()
        self.places = StartPlaces(self.sent.send, lambda: self.now)
        self.programs: list[subprocess.Popen[bytes]] = []
        self.looks = 0
        self.targets: list[Target] = []

    def meet(self, *words: str, wait: str | None = None) -> Target:
        """A program that is in that system call by now."""
        program = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.programs.append(program)
        facts = facts_of(program.pid)._replace(start_ns=self.now)
        target = Target(len(self.targets) + 1, 0, facts, None, os.pidfd_open(program.pid), self.now)
        self.targets.append(target)
        end = time.monotonic() + 10
        while wait and time.monotonic() < end:
            thread = startplaces.read_thread(program.pid, program.pid)
            if thread and thread.syscall == wait and thread.state == "S":
                break
            time.sleep(0.01)
        self.places.began(target)
        return target

    def pass_(self, ms: int, step_ms: int = 10) -> None:
        for _ in range(ms // step_ms):
            self.now += step_ms * MS
            self.places.step()

    def told(self) -> list[tuple[float, str | None, str | None, float | None]]:
        """(seconds since the begin, system call, file, when it was last seen elsewhere)."""
        rows = []
        for body in self.sent.of(Kind.PLACE):
            last = None if body["last_ns"] is None else (body["last_ns"] - 100 * S) / S
            rows.append(((body["at_ns"] - 100 * S) / S, body["thread"][3], body["thread"][5], last))
        return rows


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for program in made.programs:
        program.kill()
        program.wait()
        for pipe in (program.stdin, program.stdout):
            assert pipe
            pipe.close()
    for target in made.targets:
        target.close()


def counted(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    real = startplaces.read_thread

    def read(pid: int, tid: int) -> object:
        world.looks += 1
        return real(pid, tid)

    monkeypatch.setattr(startplaces, "read_thread", read)


def test_once_for_each_place(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    target = world.meet("cat", wait="read")
    counted(monkeypatch, world)
    world.pass_(190)
    assert world.looks == 0
    world.pass_(60_000)
    ((at_s, syscall, file, last),) = world.told()
    assert (at_s, syscall, last) == (0.2, "read", None) and file and file.startswith("pipe:")
    # Four looks at the least pause, then ever more seldom.
    assert 10 < world.looks < 30
    program = world.programs[0]
    assert program.stdin
    program.stdin.close()
    program.wait()
    world.pass_(int(MOST_NS // MS) + 10)
    looks = world.looks
    world.pass_(20_000)
    assert world.looks == looks and target.pid == program.pid and len(world.told()) == 1


def test_another_place(world: World) -> None:
    world.meet(sys.executable, "-c", "import sys, time; sys.stdin.read(1); time.sleep(9)", wait="read")
    world.pass_(500)
    program = world.programs[0]
    assert program.stdin
    program.stdin.write(b"x")
    program.stdin.flush()
    time.sleep(0.3)
    world.pass_(int(LEAST_NS // MS) + 10)
    (_, (at_s, syscall, file, last)) = world.told()
    assert syscall == "clock_nanosleep" and file is None and last is not None
    assert at_s - last == pytest.approx(LEAST_NS / S, abs=0.011)


def test_a_path_that_is_opened(world: World, tmp_path: Path) -> None:
    """A fifo that nobody else opens: the call has no descriptor yet. The name is the target's text."""
    path = tmp_path / "a\x1b[2J"
    os.mkfifo(path)
    world.meet("cat", str(path), wait="openat")
    world.pass_(300)
    ((_, syscall, file, _last),) = world.told()
    assert syscall == "openat" and file == str(tmp_path) + "/a\\x1b[2J"


def test_until_it_calls(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    target = world.meet("cat", wait="read")
    counted(monkeypatch, world)
    target.counted_ns = 1
    world.pass_(5_000)
    assert world.looks == 0


def test_another_program(world: World) -> None:
    """What the one before waited for is not the new one's."""
    target = world.meet("cat", wait="read")
    world.pass_(300)
    world.places.began(target)
    world.pass_(300)
    assert [last for *_, last in world.told()] == [None, None]


def test_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many programs, and one look at a time; those that have ended make room."""
    monkeypatch.setattr(startplaces, "MOST", 3)
    targets = [world.meet("cat", wait="read") for _ in range(5)]
    assert world.places.turned_away == 2
    counted(monkeypatch, world)
    world.pass_(200)
    assert world.looks <= 1
    world.pass_(40)
    assert world.looks == 3
    targets[0].ended = True
    world.meet("cat", wait="read")
    assert world.places.turned_away == 2


def test_facts_of_young_processes(world: World) -> None:
    """A fork keeps all but its numbers; an exec changes names."""
    target = world.meet("cat", wait="read")
    mine = facts_of(os.getpid())
    forked = forked_facts(target.pid, mine, 77)
    assert (forked.pid, forked.ppid, forked.start_ns, forked.name) == (target.pid, os.getpid(), 77, "cat")
    assert forked.cmdline == mine.cmdline and execed_facts(forked).cmdline == ["cat"]
    assert forked.ns_pid == facts_of(target.pid).ns_pid and forked.uid == mine.uid

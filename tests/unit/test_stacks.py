"""Python stacks of processes that go on running: read from memory, checked against py-spy and against themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stallscope.capture.parser_client import ParserClient
from stallscope.capture.pylayout import LAYOUTS
from stallscope.capture.stacks import NO_PYTHON, Stacks, Wanted
from stallscope.wire.frames import Kind

pytestmark = pytest.mark.skipif(sys.version_info.minor not in LAYOUTS, reason="this Python is not known")
NOT_KNOWN, NO_SYMBOLS = "its version is not known", "the interpreter's file does not name its variables"
PROGRAM = """
import sys, threading, time
def culprit(depth):
    if depth:
        culprit(depth - 1)
    else:
        time.sleep(60)
class Loader:
    def __next__(self):
        time.sleep(60)
thread = threading.Thread(target=Loader().__next__)
thread.start()
time.sleep(0.05)
print("ready", getattr(thread, "native_id", 0), flush=True)
culprit(int(sys.argv[1]))
"""


class Taken:
    """A Stacks and what it sends, native frames apart."""

    def __init__(self, parser: ParserClient) -> None:
        self.frames: list[dict[str, Any]] = []
        self.stacks = Stacks(self._send, lambda: 7, parser)

    def _send(self, kind: Kind, body: dict[str, Any]) -> None:
        assert kind == Kind.STACK
        body["natives"] = [frame for frame in body["frames"] if frame[3] == "native"]
        body["frames"] = [frame for frame in body["frames"] if frame[3] == "python"]
        self.frames.append(body)

    def of(self, pid: int, *tids: int) -> list[dict[str, Any]]:
        """Stacks of those threads."""
        self.frames.clear()
        self.stacks.want(Wanted(3, pid, dict(zip(tids, tids, strict=True))))
        self.stacks.step()
        return self.frames


@pytest.fixture
def taken(parser: ParserClient) -> Taken:
    return Taken(parser)


def start(text: str, *words: str, python: str = sys.executable) -> tuple[subprocess.Popen[str], list[int]]:
    """A Python that runs this and has said "ready" with some numbers."""
    process = subprocess.Popen([python, "-u", "-c", text, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    ready, *numbers = process.stdout.readline().split()
    assert ready == "ready"
    time.sleep(0.05)
    return process, [int(number) for number in numbers]


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def test_the_main_thread_and_another(taken: Taken) -> None:
    process, (other,) = start(PROGRAM, "40")
    main, second = taken.of(process.pid, process.pid, other)
    end(process)
    assert [(main[k], second[k]) for k in ("proc", "why", "by", "at_ns")] == [
        (3, 3),
        (None, None),
        ("memory",) * 2,
        (7, 7),
    ]
    assert (main["tid"], second["tid"]) == (process.pid, other)
    assert main["frames"][0] == ["<string>", 7, "culprit", "python"]
    assert main["frames"][1:] == [["<string>", 5, "culprit", "python"]] * 40 + [["<string>", 15, "<module>", "python"]]
    assert second["frames"][0] == ["<string>", 10, "Loader.__next__", "python"]
    assert [frame[2] for frame in second["frames"][1:]] == [
        "Thread.run",
        "Thread._bootstrap_inner",
        "Thread._bootstrap",
    ]
    # The interpreter sleeps by itself, in libc.
    for stack in (main, second):
        assert stack["natives"] and all("/libc.so" in file for file, *_ in stack["natives"]), stack["natives"]


def test_as_py_spy_has_it(taken: Taken) -> None:
    process, (other,) = start(PROGRAM, "5")
    program = Path(sys.prefix) / "bin/py-spy"
    dump = subprocess.run([program, "dump", "--json", "--nonblocking", "--pid", str(process.pid)], capture_output=True)
    stacks = taken.of(process.pid, process.pid, other)
    end(process)
    theirs = {t["os_thread_id"]: [(f["line"], f["name"].rpartition(".")[2]) for f in t["frames"]]
              for t in json.loads(dump.stdout)}  # fmt: skip
    assert {s["tid"]: [(f[1], f[2].rpartition(".")[2]) for f in s["frames"]] for s in stacks} == theirs


def test_a_thread_that_runs_is_told_as_far_as_it_stands_still(taken: Taken) -> None:
    process, _ = start("def spin():\n    while True:\n        sum(range(9))\nprint('ready')\nspin()")
    (stack,) = taken.of(process.pid, process.pid)
    end(process)
    assert stack["why"] is None
    assert stack["frames"][-1] == ["<string>", 5, "<module>", "python"]
    assert stack["frames"][0] in (
        [None, None, "?", "python"],
        ["<string>", 2, "spin", "python"],
        ["<string>", 3, "spin", "python"],
    )


def test_why_there_is_no_stack(taken: Taken) -> None:
    """Always one frame for the main thread, none for another one that is not Python's."""
    sleeper = subprocess.Popen(["/bin/sleep", "60"])
    (stack,) = taken.of(sleeper.pid, sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    assert (stack["frames"], stack["why"]) == ([], NO_PYTHON)
    (stack,) = taken.of(sleeper.pid, sleeper.pid)
    assert stack["why"] == NO_PYTHON  # it has ended
    (stack,) = taken.of(os.getpid(), 1, 2)
    assert (stack["tid"], stack["why"]) == (1, "the thread is none of Python's")


def test_what_is_not_wanted_any_more(taken: Taken) -> None:
    taken.stacks.want(Wanted(1, os.getpid(), {os.getpid(): os.getpid()}))
    taken.stacks.forget()
    taken.stacks.step()
    assert not taken.frames


@pytest.mark.skipif(os.environ.get("STALLSCOPE_ALL_PYTHONS") != "1", reason="make test-pythons")
@pytest.mark.parametrize("python", sorted(map(str, Path.home().glob(".pyenv/versions/3.*/bin/python3"))))
def test_every_python(taken: Taken, python: str) -> None:
    process, (other,) = start(PROGRAM, "3", python=python)
    stacks = taken.of(process.pid, process.pid, other)
    end(process)
    if stacks[0]["why"]:
        assert stacks[0]["why"] in (NOT_KNOWN, NO_SYMBOLS) and "/3.1" not in python and "/3.9" not in python
        return
    main, second = stacks
    assert [frame[1] for frame in main["frames"]] == [7, 5, 5, 5, 15]
    assert second["frames"][0][1] == 10

"""Processes known by files in a folder: real segments of this very process, made here byte by byte."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_segments import FakeSegment, Sent

from stallscope.capture import guests as module
from stallscope.capture.folder import Folder
from stallscope.capture.guests import FADE_NS, LOOK_NS, MAX_GUESTS, Guests
from stallscope.capture.segment import Who
from stallscope.capture.target import MAX_PID
from stallscope.wire.frames import Kind

SECOND = 1_000_000_000


class Shims:
    """Takes everything; `calls` is what each process is said to have made."""

    def __init__(self) -> None:
        self.adopted: list[tuple[Any, int]] = []
        self.retired: list[int] = []
        self.refusals: list[str] = []
        self.calls = 0
        self.prepare: Any = None

    def adopt(self, target: Any, fd: int) -> None:
        if self.prepare(target):
            self.adopted.append((target, fd))
        else:
            os.close(fd)

    def refuse(self, target: Any, why: str) -> None:
        self.refusals.append(why)

    def made(self, target: Any) -> int:
        return self.calls

    def has(self, target: Any) -> bool:
        return False

    find = is_unread = has

    def retire(self, target: Any, at_ns: int) -> None:
        self.retired.append(target.proc)

    def hasten(self, target: Any) -> None:
        pass

    forget = hasten


class World:
    """A clock, a folder, and who holds the locks: {inode: pid or 0}; not in it: nobody."""

    def __init__(self, folder: Path, end_after_ns: int | None = None) -> None:
        self.folder, self.now, self.sent, self.shims = folder, SECOND, Sent(), Shims()
        self.holders: dict[int, int] = {}
        watched = Folder(folder, frozenset((os.geteuid(),)), lambda text: None)
        clock = lambda: self.now  # noqa: E731
        self.guests = Guests(watched, end_after_ns, self.shims, self.sent.send, clock, set)  # type: ignore[arg-type]

    def make(self, name: str, pid: int, ticks: int = 5, *, pid_ns: int = 7, locked: bool = True, lives: bool = True,
             rank: str = "3") -> Path:  # fmt: skip
        """A segment of a process of another pid namespace."""
        path = self.folder / name
        path.write_bytes(b"x" * 64)
        who = Who(locked, 1, pid_ns, "train", ["python", "train.py"], {"RANK": rank})
        fd = os.open(path, os.O_RDONLY)
        planned = FakeSegment.plan(fd, pid=pid, ticks=ticks)
        planned.header.who = who  # type: ignore[attr-defined]
        os.close(fd)
        if lives:
            self.holders[path.stat().st_ino] = 0
        return path

    def die(self, path: Path) -> None:
        del self.holders[path.stat().st_ino]

    def look(self, times: int = 1, step_ns: int = LOOK_NS) -> None:
        for _ in range(times):
            self.now += step_ns
            self.guests.watch()
            self.guests.bury()

    def processes(self) -> list[dict[str, Any]]:
        return list(self.sent.of(Kind.PROCESS))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    FakeSegment.contents.clear()
    made = World(tmp_path)
    monkeypatch.setattr(FakeSegment, "__enter__", lambda self: self, raising=False)
    monkeypatch.setattr(FakeSegment, "__exit__", lambda self, *_: None, raising=False)
    monkeypatch.setattr(module, "Segment", FakeSegment)
    monkeypatch.setattr(module, "holder_of", lambda fd: made.holders.get(os.fstat(fd).st_ino))
    yield made
    for _, fd in made.shims.adopted:
        os.close(fd)
    made.guests.close()


def test_one_of_another_pid_namespace(world: World) -> None:
    """Told with its own pid and rank; inside it has a number that no process can have."""
    world.make("4.5.seg", 4)
    world.look()
    (body,) = world.processes()
    assert (body["pid"], body["ns_pid"], body["name"], body["env"]) == (4, 4, "train", {"RANK": "3"})
    assert body["container_id"] is None and body["parent"] is None
    ((target, _),) = world.shims.adopted
    assert target.pid > MAX_PID and target.pidfd == -1
    with pytest.raises(OSError):
        os.kill(target.pid, 0)


def test_two_with_one_pid_are_two(world: World) -> None:
    world.make("1.5.seg", 1, pid_ns=7)
    world.make("1.5.1.seg", 1, pid_ns=8)
    world.make("1.6.seg", 1, ticks=6, pid_ns=7)
    world.look()
    assert [body["pid"] for body in world.processes()] == [1, 1, 1]
    assert len({target.pid for target, _ in world.shims.adopted}) == 3


def test_another_program_of_one_process(world: World) -> None:
    """The same process, told by an IMAGE frame."""
    world.make("4.5.seg", 4)
    world.look()
    world.make("4.5.1.seg", 4)
    world.look()
    assert len(world.processes()) == 1 and len(world.sent.of(Kind.IMAGE)) == 1
    assert len({target.proc for target, _ in world.shims.adopted}) == 1


def test_its_end_is_its_locks(world: World) -> None:
    """After half a second without, and without calls; then the file goes."""
    path = world.make("4.5.seg", 4)
    world.look()
    world.die(path)
    world.look()
    world.look(step_ns=FADE_NS - 2 * LOOK_NS)
    assert not world.sent.of(Kind.EXIT) and path.exists()
    world.look(4)
    (end,) = world.sent.of(Kind.EXIT)
    assert (end["code"], end["signal"], end["oom"]) == (None, None, None)
    assert not path.exists() and world.shims.retired == [1]
    world.look(3)
    assert len(world.sent.of(Kind.EXIT)) == 1


def test_who_makes_calls_without_a_lock_lives(world: World) -> None:
    path = world.make("4.5.seg", 4)
    world.look()
    world.die(path)
    world.look()
    world.shims.calls = 9
    world.look(30)
    assert not world.sent.of(Kind.EXIT) and path.exists()
    assert sum("its end can't be seen" in note["text"] for note in world.sent.of(Kind.NOTE)) == 1


def test_what_was_over_before(world: World) -> None:
    """Read all the same, and its end told at once."""
    path = world.make("4.5.seg", 4, lives=False)
    world.look(3)
    assert len(world.shims.adopted) == 1 and len(world.sent.of(Kind.EXIT)) == 1 and not path.exists()


def test_an_older_library_holds_no_lock(world: World) -> None:
    path = world.make("4.5.seg", 4, locked=False, lives=False)
    world.look(30)
    assert not world.sent.of(Kind.EXIT) and path.exists()


def test_nothing_left_to_trace(tmp_path: Path, world: World) -> None:
    """Only once somebody was there, and only where that was asked for."""
    assert world.guests.any_live()
    ending = World(tmp_path, end_after_ns=2 * SECOND)
    ending.holders = world.holders
    ending.look(step_ns=100 * SECOND)
    assert ending.guests.any_live()
    path = world.make("4.5.seg", 4)
    ending.look()
    ending.look(step_ns=100 * SECOND)
    assert ending.guests.any_live()
    world.die(path)
    ending.look(30)
    assert ending.guests.any_live()
    ending.look(step_ns=3 * SECOND)
    assert not ending.guests.any_live()
    for _, fd in ending.shims.adopted:
        os.close(fd)
    ending.guests.close()


def test_a_crowd_is_bounded(world: World) -> None:
    """What does not get in is counted and closed; descriptors stay few."""
    before = len(os.listdir("/proc/self/fd"))
    for number in range(MAX_GUESTS + 20):
        world.make(f"{number}.5.seg", number)
    world.look()
    assert len(world.processes()) == MAX_GUESTS
    assert sum("processes already" in why for why in world.shims.refusals) == 20
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * MAX_GUESTS
    world.guests.bury(final=True)


def test_what_is_no_segment(world: World) -> None:
    (world.folder / "1.2.seg").write_bytes(struct.pack("<Q", 5))
    world.look()
    assert world.shims.refusals == ["1.2.seg: no magic"] and not world.processes()

"""Processes found by looking at /proc: real ones, some of them short-lived."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_segments import Sent

from stallscope.capture import kin as module
from stallscope.capture.exits import exit_code_of, has_ended, is_zombie, zombie_children
from stallscope.capture.handover import Handed
from stallscope.capture.kin import SLOTS, Kin
from stallscope.capture.segments import start_ticks_of
from stallscope.errors import TargetProblem
from stallscope.wire.frames import Kind

SECOND = 1_000_000_000


class Shims:
    """Remembers who was handed over."""

    def __init__(self) -> None:
        self.adopted: dict[int, int] = {}
        self.retired: list[int] = []
        self.unread: set[int] = set()
        self.prepare: Any = None

    def adopt(self, target: Any, fd: int) -> None:
        if self.prepare(target):
            self.adopted[target.pid] = fd

    def has(self, target: Any) -> bool:
        return False

    def find(self, target: Any) -> bool:
        return False

    def retire(self, target: Any, at_ns: int) -> None:
        self.retired.append(target.pid)

    def hasten(self, target: Any) -> None:
        pass

    def is_unread(self, target: Any) -> bool:
        return target.pid in self.unread

    def retire_if_left(self, target: Any, at_ns: int) -> None:
        pass

    def forget(self, target: Any) -> None:
        pass


class World:
    """A clock, what was told, and some children."""

    def __init__(self) -> None:
        self.now, self.sent, self.shims = SECOND, Sent(), Shims()
        self.kin = Kin(self.shims, self.sent.send, lambda: self.now, set, follow=True)  # type: ignore[arg-type]
        self.children: list[subprocess.Popen[str]] = []

    def start(self, text: str) -> subprocess.Popen[str]:
        """A Python program that reads its stdin."""
        command = [sys.executable, "-c", text]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.children.append(child)
        return child

    def look(self) -> None:
        """As the loop does."""
        self.kin.watch()
        self.kin.bury()

    def exits(self) -> dict[int, tuple[int | None, int | None]]:
        pids = {body["proc"]: body["pid"] for body in self.sent.of(Kind.PROCESS)}
        return {pids[body["proc"]]: (body["code"], body["signal"]) for body in self.sent.of(Kind.EXIT)}


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for child in made.children:
        child.kill()
        child.communicate()


def until(condition: Any) -> None:
    """Within ten seconds."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


FORKS = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); {}"


def test_a_tree_is_found(world: World) -> None:
    """Parents are told before their children."""
    child = world.start(FORKS.format("input()"))
    assert child.stdout
    grandchild = int(child.stdout.readline())
    world.kin.adopt([child.pid])
    told = world.sent.of(Kind.PROCESS)
    assert [body["pid"] for body in told] == [child.pid, grandchild]
    assert told[1]["parent"] == told[0]["proc"] and told[1]["name"] == "sleep"
    os.kill(grandchild, signal.SIGKILL)
    target = world.kin.by_pid(grandchild)
    assert target
    until(lambda: has_ended(target.pidfd))
    world.look()
    assert world.sent.of(Kind.EXIT) == []  # its last segment may be under way
    world.look()
    assert world.exits() == {grandchild: (None, signal.SIGKILL)}
    assert world.kin.any_live()


def test_how_a_grandchild_ended_that_its_parent_waited_for(world: World) -> None:
    """The pidfd knows it since Linux 6.15; before, nobody does, and after a second it is null."""
    text = "import subprocess; p = subprocess.Popen(['sh', '-c', 'read x; exit 5']); print(p.pid, flush=True); p.wait()"
    child = world.start(f"{text}; print('waited', flush=True); input()")
    assert child.stdout and child.stdin
    grandchild = int(child.stdout.readline())
    world.kin.adopt([child.pid])
    child.stdin.write("x\n")
    child.stdin.flush()
    assert child.stdout.readline() == "waited\n"
    world.look()
    world.look()
    if grandchild not in world.exits():
        world.now += 2 * SECOND
        world.look()
    assert world.exits()[grandchild] in ((5, None), (None, None))
    assert world.kin.no_code == (world.exits()[grandchild][0] is None)


def test_a_zombie_tells(world: World) -> None:
    """Whose parent has not got round to waiting."""
    child = world.start(FORKS.format("input()"))
    assert child.stdout
    grandchild = int(child.stdout.readline())
    pidfd = os.pidfd_open(grandchild)
    assert exit_code_of(grandchild, pidfd) is None
    os.kill(grandchild, signal.SIGTERM)
    until(lambda: is_zombie(grandchild))
    assert exit_code_of(grandchild, pidfd) == signal.SIGTERM
    os.close(pidfd)


def test_a_child_of_ours_is_waited_for() -> None:
    """A subreaper's lot."""
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 9"], {})
    pidfd = os.pidfd_open(pid)
    until(lambda: pid in zombie_children())
    assert exit_code_of(pid, pidfd) == 9 << 8
    assert pid not in zombie_children()
    os.close(pidfd)


def test_no_such_process(world: World) -> None:
    with pytest.raises(TargetProblem, match="no such process"):
        world.kin.adopt([(1 << 22) - 1])


def test_who_was_gone_before_he_was_seen(world: World) -> None:
    """Only his segment is there."""
    fd = os.memfd_create("x")
    world.kin.take(Handed((1 << 22) - 1, 500, fd))
    (told,) = world.sent.of(Kind.PROCESS)
    assert (told["name"], told["cmdline"]) == ("?", [])
    assert world.shims.adopted == {(1 << 22) - 1: fd}
    (slot,) = world.sent.of(Kind.SLOT)
    assert (slot["slot"], slot["proc"]) == (1, 1)
    world.look()
    world.look()
    assert world.exits() == {(1 << 22) - 1: (None, None)}
    os.close(fd)


def test_handed_over_and_gone_between_two_looks(world: World) -> None:
    """The end is noticed before the segment is taken: one process all the same."""
    child = world.start("input()")
    ticks = start_ticks_of(child.pid)
    assert ticks is not None
    world.kin.adopt([child.pid])
    child.kill()
    target = world.kin.by_pid(child.pid)
    assert target
    until(lambda: has_ended(target.pidfd))
    world.kin.watch()
    world.kin.take(Handed(child.pid, ticks, 0))
    world.kin.bury()
    assert len(world.sent.of(Kind.PROCESS)) == 1 and world.shims.adopted == {child.pid: 0}
    assert world.exits() == {}
    world.shims.unread = {child.pid}  # more than one batch
    world.look()
    assert world.shims.retired == []
    world.shims.unread = set()
    world.look()
    assert world.shims.retired == [child.pid]


def test_slots_are_given_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gets none waits, his segment keeps what it has; beyond what can wait, one is a gap."""
    monkeypatch.setattr(module, "MAX_PENDING", 4)
    for number in range(SLOTS + 5):
        world.kin.take(Handed((1 << 22) - 1 - number, 500, os.open(os.devnull, os.O_RDONLY)))
    slots = [body["slot"] for body in world.sent.of(Kind.SLOT)]
    assert slots == list(range(1, SLOTS + 1))
    (gap,) = world.sent.of(Kind.GAP)
    assert gap["reason"].endswith("no free process slot") and world.kin.turned_away["segments"] == 1
    world.look()
    assert world.exits() == {}
    world.look()
    assert len(world.shims.adopted) == SLOTS + 4 and sorted(world.sent.of(Kind.SLOT)[-1].keys()) == [
        "at_ns",
        "proc",
        "slot",
    ]
    world.look()
    assert len(world.exits()) == SLOTS + 5 and not world.kin.any_live()
    for fd in world.shims.adopted.values():
        os.close(fd)


def test_the_end_comes_before_a_slot(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that have ended nobody is left out."""
    for number in range(2 * SLOTS):
        world.kin.take(Handed((1 << 22) - 1 - number, 500, os.open(os.devnull, os.O_RDONLY)))
    world.kin.watch()
    world.kin.bury(final=True)
    assert len(world.exits()) == 2 * SLOTS == len(world.shims.adopted) and world.sent.of(Kind.GAP) == []
    for fd in world.shims.adopted.values():
        os.close(fd)


def test_the_end_of_a_command_is_the_end(world: World) -> None:
    """Others may go on."""
    child = world.start(FORKS.format("input()"))
    assert child.stdout
    child.stdout.readline()
    world.kin.adopt_command(child.pid)
    child.kill()
    child.wait()
    world.kin.command_ended(9)
    world.look()
    assert world.kin.any_live()
    world.look()
    assert world.exits()[child.pid] == (None, 9)
    assert not world.kin.any_live()
    (left,) = [target for target in world.kin.live() if target.facts.name == "sleep"]
    os.kill(left.pid, signal.SIGKILL)


def test_a_child_makes_itself_known_before_its_parent(world: World) -> None:
    """What uses CUDA hands over; its parent, who does not, is found through it."""
    text = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {!r}]); print(p.pid, flush=True); input()"
    )
    root = world.start("input()\n" + text.format(FORKS.format("input()")))
    assert root.stdin and root.stdout
    world.kin.adopt([root.pid])
    root.stdin.write("go\n")
    root.stdin.flush()
    parent, child = int(root.stdout.readline()), int(root.stdout.readline())
    ticks = start_ticks_of(child)
    assert ticks
    world.kin.take(Handed(child, ticks, os.open("/dev/null", os.O_RDONLY)))
    told = [body for body in world.sent.of(Kind.PROCESS) if body.get("traced", True)]
    assert [body["pid"] for body in told] == [root.pid, parent, child]
    assert [body["parent"] for body in told[1:]] == [told[0]["proc"], told[1]["proc"]]

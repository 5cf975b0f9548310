"""Who started the traced processes: told first, watched for their end, never our own."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from fake_segments import Sent

from stallscope.capture import ancestors as module
from stallscope.capture.ancestors import Ancestors, chain_of
from stallscope.wire.frames import Kind

STARTS = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); input(); sys.exit(3)"


class World:
    """A parent with a child, and what is told."""

    def __init__(self) -> None:
        self.sent, self.images = Sent(), []
        numbers = itertools.count(1)
        self.ancestors = Ancestors(self.sent.send, lambda: 7, lambda: next(numbers))
        self.ancestors.on_image = lambda target: self.images.append(target.pid)
        words = [sys.executable, "-c", STARTS]
        self.parent = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.parent.stdout
        self.child = int(self.parent.stdout.readline())

    def told(self) -> list[int]:
        return [body["pid"] for body in self.sent.of(Kind.PROCESS)]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.ancestors.close()
    os.kill(made.child, 9)
    made.parent.kill()
    made.parent.communicate()


def test_not_our_own(world: World) -> None:
    """Nor what is above us: we started the target."""
    world.ancestors.find([world.child])
    assert world.told() == [world.parent.pid] == world.images
    (body,) = world.sent.of(Kind.PROCESS)
    assert body["traced"] is False and body["parent"] is None
    assert world.ancestors.proc_of(world.parent.pid) == body["proc"] and world.ancestors.proc_of(world.child) is None


def test_the_farthest_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = chain_of(world.child)
    monkeypatch.setattr(module.os, "getpid", lambda: -1)
    world.ancestors.find([world.child])
    assert world.told() == chain[::-1]
    keys = {body["pid"]: body["proc"] for body in world.sent.of(Kind.PROCESS)}
    for body in world.sent.of(Kind.PROCESS)[1:]:
        assert body["parent"] == keys[body["ppid"]]
    world.ancestors.find([world.child])
    assert len(world.told()) == len(chain)


def test_those_that_are_given_are_none(world: World) -> None:
    world.ancestors.find([world.child, world.parent.pid])
    assert world.told() == []


def test_its_end_is_told(world: World) -> None:
    world.ancestors.find([world.child])
    world.ancestors.check()
    assert world.sent.of(Kind.EXIT) == []
    assert world.parent.stdin is not None
    world.parent.stdin.write("go\n")
    world.parent.stdin.flush()
    world.parent.wait(60)
    world.ancestors.check()
    (body,) = world.sent.of(Kind.EXIT)
    assert body["proc"] == 1 and body["signal"] is None and body["code"] in (3, None)
    assert world.ancestors.proc_of(world.parent.pid) is None and not world.ancestors.live()
    world.ancestors.check()
    assert len(world.sent.of(Kind.EXIT)) == 1


def test_who_is_gone_has_none(world: World) -> None:
    world.ancestors.find([1 << 30])
    assert world.told() == []

"""Capture's local rule: when a block is suspected, when is looked at whom, and what a look costs. No process is real."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stallscope.capture import suspicion as module
from stallscope.capture.hoststate import HostThread
from stallscope.capture.rings import Thread
from stallscope.capture.suspicion import MAX_STACKS, Suspicion
from stallscope.wire.frames import Kind
from stallscope.wire.hook_table import BY_NAME

SECOND = 1_000_000_000
TICK = SECOND // 4
LEFT = 64
SYNC, LAUNCH = BY_NAME["cudaStreamSynchronize"].id, BY_NAME["cudaLaunchKernel"].id


class World:
    """Some processes with NCCL, what they are inside of, and a clock that ticks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, processes: int, look_ns: int = 0) -> None:
        self.now = 100 * SECOND
        self.look_ns = look_ns
        self.flying: list[Any] = []
        self.frames: list[tuple[Kind, dict[str, Any]]] = []
        self.taps: list[bool] = []
        self.wanted: list[int] = []
        self.targets = [self._target(proc) for proc in range(1, processes + 1)]
        callers = lambda target: [Thread(target.pid, 0, 5)]  # noqa: E731
        stacks = SimpleNamespace(want=lambda w: self.wanted.append(w.proc), step=lambda: None, forget=lambda: None)
        monkeypatch.setattr(module, "read_threads", self._read)
        monkeypatch.setattr(module, "own_tid", lambda pid, tid: tid)
        monkeypatch.setattr(module.WrittenFiles, "advance", lambda files, pid, tid: None)
        send = lambda kind, body: self.frames.append((kind, body))  # noqa: E731
        self.suspicion = Suspicion(self.taps.append, callers, send, lambda: self.now, stacks)  # type: ignore[arg-type]

    def _target(self, proc: int) -> Any:
        linked = {1: SimpleNamespace(library="NCCL")}
        return SimpleNamespace(proc=proc, pid=1000 + proc, linked=linked, inferred=[], ended=False, preloaded=False,
                               used_nccl=False, counted_ns=self.now)  # fmt: skip

    def _read(self, pid: int, callers: list[int]) -> list[HostThread]:
        self.now += self.look_ns
        return [HostThread(pid, "t", "S", "futex", None, None, 1)]

    def waits(self, proc: int, since_ns: int, hook: int = SYNC, flags: int = 0) -> None:
        """A thread of it is inside a call."""
        self.flying.append([proc, 1000 + proc, [[hook, since_ns, 1, flags, [0] * 8]]])

    def run(self, seconds: float) -> None:
        """Ticks, and ten steps between two."""
        end = self.now + int(seconds * SECOND)
        while self.now < end:
            self.suspicion.judge(self.now, self.flying, self.targets)
            for _ in range(10):
                self.suspicion.step()
            self.now += TICK

    def looks(self, proc: int, since_ns: int) -> list[float]:
        """Ages of the block, in s, at which it was looked at."""
        return [(b["at_ns"] - since_ns) / SECOND for kind, b in self.frames if kind == Kind.HOST and b["proc"] == proc]

    def suspects(self) -> list[tuple[bool, int]]:
        """SUSPECT frames."""
        return [(b["on"], b["since_ns"]) for kind, b in self.frames if kind == Kind.SUSPECT]


def test_the_looks_of_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 1, 2 and 4 s, then every 30, and once after the end; stacks of the one outside at 1 and 4 s; the tap."""
    world = World(monkeypatch, 3)
    start = world.now
    world.waits(1, start)
    world.waits(2, start)
    world.run(70)
    world.flying.clear()
    world.run(2)
    assert world.suspects() == [(True, start), (False, start)]
    assert world.taps == [True, False]
    for proc in (1, 2, 3):
        assert world.looks(proc, start) == [1, 2, 4, 34, 64, 70]
    assert world.wanted == [3, 3]


def test_short_calls_launches_and_left_calls_are_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a second, not a wait, or left by longjmp."""
    world = World(monkeypatch, 3)
    world.waits(1, world.now + 4 * SECOND)
    world.waits(2, world.now, hook=LAUNCH)
    world.waits(3, world.now, flags=LEFT)
    world.run(4.9)
    assert world.frames == [] and world.taps == []


def test_a_process_that_makes_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one that used NCCL; since when its counters stand still."""
    world = World(monkeypatch, 2)
    world.run(5)
    assert world.frames == []
    world.targets[0].used_nccl, world.targets[0].counted_ns = True, world.now
    start = world.now
    world.run(2)
    assert world.suspects() == [(True, start)]
    assert world.looks(2, start) == [1.25]


def test_a_call_from_before_the_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at as soon as it is known to go on, and at 1 s."""
    world = World(monkeypatch, 2)
    start = world.now
    world.targets[0].inferred.append(SimpleNamespace(hook=SYNC, tid=1001, since_ns=start))
    world.run(1.5)
    assert world.suspects() == [(True, start)]
    assert world.looks(2, start) == [0.25, 1]
    assert world.wanted == [2, 2]


def test_one_that_waits_for_ever_hides_no_other_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for work all day: a block of others is looked at as any."""
    world = World(monkeypatch, 3)
    world.waits(1, world.now)
    world.run(20)
    second = world.now
    world.waits(2, second)
    world.run(5)
    assert world.looks(3, second)[-3:] == [1, 2, 4]
    assert world.wanted == [2, 3, 2, 3, 3, 3]


def test_a_consequence_is_no_second_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes to wait a few seconds later waits for the same."""
    world = World(monkeypatch, 3)
    start = world.now
    world.waits(1, start)
    world.run(3)
    world.waits(2, world.now)
    world.run(5)
    assert world.looks(3, start) == [1, 2, 4]


def test_a_look_at_many_is_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 10 ms a step and the one that was begun; those outside come first, eight of them with a stack."""
    world = World(monkeypatch, 127, look_ns=3_000_000)
    world.waits(1, world.now - SECOND)
    world.suspicion.judge(world.now, world.flying, world.targets)
    steps = []
    while len(world.frames) < 128:
        before = world.now
        world.suspicion.step()
        steps.append(world.now - before)
    assert max(steps) == 12_000_000 and len(steps) == 32
    hosts = [b["proc"] for kind, b in world.frames if kind == Kind.HOST]
    assert hosts == [*range(2, 128), 1]
    assert world.wanted == list(range(2, 2 + MAX_STACKS))


def test_processes_that_end_or_have_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at them."""
    world = World(monkeypatch, 3)
    world.targets[1].linked = {}
    world.targets[2].ended = True
    world.waits(1, world.now)
    world.run(2.5)
    assert {b["proc"] for kind, b in world.frames if kind == Kind.HOST} == {1}
    assert world.wanted == []


@pytest.mark.parametrize(("linked", "looked_at"), [("CUDART", True), (None, False)])
def test_a_shims_process_may_be_on_its_way_to_nccl(
    monkeypatch: pytest.MonkeyPatch, linked: str | None, looked_at: bool
) -> None:
    """Its libraries are known from their first call on; a shell with the shim in it has none."""
    world = World(monkeypatch, 2)
    world.targets[1].preloaded = True
    world.targets[1].linked = {1: SimpleNamespace(library=linked)} if linked else {}
    world.waits(1, world.now)
    world.run(2.5)
    assert ({b["proc"] for kind, b in world.frames if kind == Kind.HOST} == {1, 2}) is looked_at

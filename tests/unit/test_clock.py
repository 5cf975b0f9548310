"""The counter on CLOCK_MONOTONIC: what was converted once stays, and the line follows the truth."""

from __future__ import annotations

import random

import pytest

from stallscope.capture.segment import Clock

SECOND = 10**9
WIDTH = 30


class Machine:
    """A counter of 2.4454 GHz beside a clock that is slewed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ticks, self.ns, self.speed, self.random = 10**12, 5 * SECOND, 2.4454, random.Random(1)
        monkeypatch.setattr(Clock, "_pair", lambda _: self.pair())
        monkeypatch.setattr("stallscope.capture.segment.time.sleep", lambda s: self.wait(s))

    def wait(self, seconds: float) -> None:
        self.ns += int(seconds * SECOND)
        self.ticks += int(seconds * SECOND * self.speed)

    def pair(self) -> tuple[int, int, int]:
        return self.ticks, self.ns + self.random.randint(-WIDTH, WIDTH), WIDTH


def test_what_was_converted_once_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    clock = Clock()
    told: dict[int, int] = {}
    for i in range(3000):
        machine.speed = 2.4454 * (1 + machine.random.uniform(-20e-6, 20e-6))
        machine.wait(1)
        told[machine.ticks] = clock.to_ns(machine.ticks)
        assert abs(told[machine.ticks] - machine.ns) < 60_000, i
        clock.recalibrate()
        told[machine.ticks - 7] = clock.to_ns(machine.ticks - 7)
    assert {ticks: clock.to_ns(ticks) for ticks in told} == told
    in_order = [told[ticks] for ticks in sorted(told)]
    assert in_order == sorted(in_order)


def test_a_steady_clock_needs_few_lines_and_is_followed_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    clock = Clock()
    for _ in range(200):
        machine.wait(1)
        clock.recalibrate()
    assert clock.c.count < 10
    assert abs(clock.to_ns(machine.ticks) - machine.ns) < 3000
    assert clock.error_ns < 5000


def test_after_hours_of_slewing_the_oldest_lines_go(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    clock = Clock()
    for i in range(9000):
        machine.speed = 2.4454 * (1 + (1e-4 if i % 2 else -1e-4))
        machine.wait(1)
        clock.recalibrate()
        assert 0 < clock.c.count <= 4096
    assert abs(clock.to_ns(machine.ticks) - machine.ns) < 500_000


def test_a_counter_that_stands_still_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.speed = 0
    with pytest.raises(OSError, match="does not advance"):
        Clock()

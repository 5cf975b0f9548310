"""How fast records leave a full ring, by the calls that a session makes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from driver import Driver
from figures import Figure, of
from stub_library import StubLibrary
from tracer import Tracer, Use, records_of

from stallscope.capture.rings import Drained, Ring
from stallscope.capture.session import BATCH_RECORDS

__all__ = ["measure"]

BAR = 10.0
FUNCTION = 2
CALLS = 140_000  # the bulk ring of 16 MiB holds 149 796 records of 112 bytes


def _nothing(_drained: Drained) -> None:
    """The records stay where the drain put them."""


def _copy(drained: Drained) -> None:
    """As a session does before it packs them into a frame."""
    bytes(drained.recs)


def _rate(ring: Ring, then: Callable[[Drained], None]) -> tuple[float, int]:
    """Million records a second, and how many there were."""
    total, start = 0, time.perf_counter_ns()
    while (drained := ring.drain(BATCH_RECORDS)).n_recs:
        total += drained.n_recs
        then(drained)
    return total / (time.perf_counter_ns() - start) * 1e3, total


def _series(name: str, driver: Driver, tracer: Tracer, then: Callable[[Drained], None], rounds: int) -> Figure:
    rates, faults = [], []
    for _ in range(rounds + 1):
        driver.measure(FUNCTION, CALLS, 1)
        rate, count = _rate(tracer.tables.bulk, then)
        rates.append(rate)
        if count != CALLS:
            faults = [f"{count} of {CALLS} records came"]
    return of(name, "M records/s", rates[1:], at_least=True, note="M records/s", faults=faults)


def measure(driver: Driver, library: StubLibrary, backend: str, rounds: int, core: int) -> list[Figure]:
    """Fill the bulk ring by calls, empty it, again and again; this thread is pinned meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        with Tracer(backend, driver.pid) as tracer:
            tracer.link(library, [Use(FUNCTION, "cudaLaunchKernel", 0xFFFFFFFF)])
            records_of(tracer.tables)
            plain = _series("drain", driver, tracer, _nothing, rounds)
            copied = _series("drain and copy out", driver, tracer, _copy, rounds)
    finally:
        os.sched_setaffinity(0, before)
    plain.bar = BAR
    return [plain, copied]

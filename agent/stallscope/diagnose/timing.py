"""Totals, maxima and percentiles of timed calls."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.hooks import HookFacts
from stallscope.aggregate.process import Counts, Process
from stallscope.wire.columns import BUCKETS, TIME, percentile

__all__ = ["Timing", "all_calls", "is_timed", "outermost", "outermost_hist", "timing_of", "untimed"]


class Timing(NamedTuple):
    """Durations of `calls` that returned, ns. Total and maximum are exact, percentiles within 12.5 %."""

    calls: int
    total_ns: int
    max_ns: int
    p50_ns: int | None
    p99_ns: int | None


def is_timed(process: Process, hook: HookFacts) -> bool:
    """Whether returns of the function are probed in that process."""
    return hook.timed and hook.id not in process.entry_only


def outermost(process: Process, hook: HookFacts) -> Timing | None:
    """Calls that were not inside another call of their family; None where calls are not timed."""
    return _timing(process, [hook.time_id]) if is_timed(process, hook) else None


def all_calls(process: Process, hook: HookFacts) -> Timing | None:
    """Nested calls too."""
    return _timing(process, [hook.time_id, hook.time_id + 1]) if is_timed(process, hook) else None


def untimed(counts: Counts, timing: Timing, in_flight: int) -> bool:
    """Whether calls returned (or were abandoned) without being timed."""
    return counts.calls > timing.calls + in_flight


def _timing(process: Process, numbers: list[int]) -> Timing:
    rows = [np.frombuffer(process.times[n], dtype=TIME)[0] for n in numbers if n in process.times]
    if not rows:
        return Timing(0, 0, 0, None, None)
    hist: NDArray[Any] = np.sum([row["hist"].astype(np.uint64) for row in rows], axis=0)
    longest = max(int(row["max_ns"]) for row in rows)
    return timing_of(sum(int(row["n"]) for row in rows), sum(int(row["sum_ns"]) for row in rows), longest, hist)


def timing_of(calls: int, total_ns: int, max_ns: int, hist: NDArray[Any]) -> Timing:
    """With the percentiles of a histogram as in wire_time."""
    p50, p99 = (_percentile(hist, q, max_ns) for q in (0.5, 0.99))
    return Timing(calls, total_ns, max_ns, p50, p99)


def outermost_hist(process: Process, hook: HookFacts) -> NDArray[Any]:
    """The histogram behind `outermost`."""
    row = process.times.get(hook.time_id)
    hist: NDArray[Any] = np.frombuffer(row, dtype=TIME)[0]["hist"] if row else np.zeros(BUCKETS, np.uint32)
    return hist.astype(np.uint64)


def _percentile(hist: NDArray[Any], q: float, longest: int) -> int | None:
    # The middle of the last bucket may lie beyond the longest call.
    value = percentile(hist, q)
    return None if value is None else min(value, longest)

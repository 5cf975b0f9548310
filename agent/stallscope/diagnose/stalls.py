"""Where threads waited: one entry for each process and function."""

from __future__ import annotations

from typing import NamedTuple

from stallscope.aggregate.hooks import HookFacts
from stallscope.aggregate.process import Counts, Process
from stallscope.aggregate.state import State
from stallscope.diagnose.timing import Timing, outermost, untimed

__all__ = ["Stall", "stalls"]


class Stall(NamedTuple):
    """The outermost timed calls of one function in one process.

    `cut` says that some of them were not timed, so that count and total are too small. `longest` is [(duration,
    instant)] of recorded calls, longest first.
    """

    process: Process
    hook: HookFacts
    timing: Timing
    cut: bool
    longest: list[tuple[int, int]]

    @property
    def cause(self) -> str | None:
        """A synchronize call waits because it says so; for the others something must be found out first."""
        return "explicit" if self.hook.kind == "wait" else None


def stalls(state: State) -> list[Stall]:
    """All of them, the largest total first."""
    under_way = state.flight.under_way()
    rows = ((p, n) for p in state.processes.table.values() for n in p.counts)
    found = [s for p, n in rows if (s := _stall(state, p, n, under_way[p.proc, n, False])) is not None]
    return sorted(found, key=lambda s: (-s.timing.total_ns, s.process.order, s.hook.id))


def _stall(state: State, process: Process, number: int, under_way: int) -> Stall | None:
    hook, counts = state.hooks.get(number), process.counts[number]
    timing = outermost(process, hook) if hook.stall_kind else None
    if timing is None or not timing.calls:
        return None
    outer = Counts(calls=counts.calls - counts.nested)
    cut = untimed(outer, timing, under_way)
    return Stall(process, hook, timing, cut or process.untimed, process.longest.get(number, []))

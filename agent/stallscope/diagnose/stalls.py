"""Where threads waited: one entry for each process, function and Python line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.hooks import HookFacts
from stallscope.aggregate.process import Counts, Process
from stallscope.aggregate.state import State
from stallscope.aggregate.waits import WHOLE_DEVICE
from stallscope.diagnose.callsites import CallSite, call_sites, rest_of
from stallscope.diagnose.causes import Cause, Causes, cause_without_site
from stallscope.diagnose.timing import Timing, outermost, outermost_hist, untimed
from stallscope.wire.columns import bucket_from

__all__ = ["Stall", "stalls"]

NOT_LOOKED_UP = "it waited before its Python was known, or the table of call sites was full"
TOO_SHORT = "it was shorter than {:.2f} ms, which the shim does not look up"


class Stall(NamedTuple):
    """The outermost timed calls of one function in one process, from one line where that is known.

    `cut` says that some of them were not timed, so that count and total are too small. `longest` is [(duration,
    instant, frames or None)], longest first. `why`: why `site` is None, None where nobody looked. `is_rest`: what the
    sites don't account for, so that its maximum is not known. `idle`: how many of the calls are known to have left
    nothing queued, None where nobody looked, and for how long in all; `is_whole`: then the device as a whole was idle.
    """

    process: Process
    hook: HookFacts
    timing: Timing
    cut: bool
    longest: Sequence[tuple[int, int, list[dict[str, Any]] | None]]
    site: dict[str, Any] | None = None
    user_site: dict[str, Any] | None = None
    why: str | None = None
    is_rest: bool = False
    cause: Cause = Cause(None)
    idle: int | None = None
    idle_ns: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the function waits for all of the device, so that all of it was idle then."""
        return self.hook.name in WHOLE_DEVICE or self.hook.name == "cuCtxSynchronize_v2"


def stalls(state: State) -> list[Stall]:
    """All of them, the largest total first."""
    under_way = state.flight.under_way()
    rows = ((p, n) for p in state.processes.table.values() for n in p.counts)
    causes = Causes(state)
    found = [s for p, n in rows for s in _stalls(state, causes, p, n, under_way[p.proc, n, False])]
    return sorted(found, key=lambda s: (-s.timing.total_ns, s.process.order, s.hook.id))


def _stalls(state: State, causes: Causes, process: Process, number: int, under_way: int) -> list[Stall]:
    hook, counts = state.hooks.get(number), process.counts[number]
    timing = outermost(process, hook) if hook.stall_kind else None
    if timing is None or not timing.calls:
        return []
    outer = Counts(calls=counts.calls - counts.nested)
    cut = untimed(outer, timing, under_way) or process.untimed
    sites = call_sites(state.sites, process.proc, number, causes.of)
    if not sites:
        longest = [(ns, at, None) for ns, at in process.longest.get(number, [])]
        why = state.sites.unknown.get(process.proc) or _too_short(state, process, outermost_hist(process, hook))
        return [Stall(process, hook, timing, cut, longest, why=why, cause=Cause(cause_without_site(hook, why)))]
    found = [
        Stall(
            process,
            hook,
            s.timing,
            cut,
            s.longest,
            s.site,
            s.user_site,
            s.why,
            False,
            s.cause,
            s.idle or None,
            s.idle_ns,
        )
        for s in sites
    ]
    return found + _rest(state, process, hook, timing, sites, cut)


def _rest(
    state: State, process: Process, hook: HookFacts, whole: Timing, sites: list[CallSite], cut: bool
) -> list[Stall]:
    parts = [t.hist for s in state.sites.of(process.proc, hook.id) if (t := state.sites.times.get(s.number))]
    hist, known = outermost_hist(process, hook), np.sum(parts, axis=0)
    rest = rest_of(whole, hist, sites, known)
    if rest is None:
        return []
    why = _too_short(state, process, np.where(hist > known, hist - known, 0)) or NOT_LOOKED_UP
    cause = Cause(cause_without_site(hook, why))
    return [Stall(process, hook, rest, cut, [], why=why, is_rest=True, cause=cause)]


def _too_short(state: State, process: Process, hist: NDArray[Any]) -> str | None:
    """Why calls have no site where only long ones are looked up; None where all are.

    Args:
        hist: durations of those without one.
    """
    least_ns = state.sites.least_ns.get(process.proc)
    if least_ns is None:
        return None
    why = TOO_SHORT.format(least_ns / 1e6)
    return f"{why}; or {NOT_LOOKED_UP}" if hist[bucket_from(least_ns) :].any() else why

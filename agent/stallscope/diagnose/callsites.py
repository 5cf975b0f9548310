"""Where in the program threads waited: stacks of one function put together by the line that they begin with and by what
made them wait."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.sites import Site, Sites, SiteTimes
from stallscope.diagnose.causes import Cause
from stallscope.diagnose.timing import Timing, timing_of

__all__ = ["CallSite", "call_sites", "not_own", "rest_of"]

KEPT = 5
# Files that the user did not write: installed packages, and the standard library in a prefix, frozen or zipped.
_FOREIGN = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3(?:\.\d+|\d+\.zip)/|^<frozen ")

Frame = dict[str, Any]


class CallSite(NamedTuple):
    """Calls of one function in one process from one line, that waited for one cause.

    Attributes:
        site: the innermost Python frame, None where it is not known, and `why`.
        user_site: the innermost one in a file of the user's own.
        longest: (duration in ns, instant, frames) of the longest call of each of a few stacks, longest first.
        idle: of how many of them it is known that nothing was queued when they ended; `idle_ns`: for how long then.
    """

    site: Frame | None
    user_site: Frame | None
    why: str | None
    timing: Timing
    longest: list[tuple[int, int, list[Frame]]]
    cause: Cause
    idle: int
    idle_ns: int


def not_own(file: str | None) -> bool:
    """Whether a file belongs to an installed package or to the standard library."""
    return file is None or bool(_FOREIGN.search(file))


def call_sites(sites: Sites, proc: int, hook: int, cause_of: Callable[[Site], Cause]) -> list[CallSite]:
    """Those of one function in one process, the largest total first."""
    groups: dict[tuple[Any, ...], list[tuple[Site, SiteTimes]]] = defaultdict(list)
    for site in sites.of(proc, hook):
        times = sites.times.get(site.number)
        if times is not None and times.calls:
            cause = cause_of(site)
            groups[(*_place(site), cause)].append((site, times))
    found = [_merged(group, place[-1]) for place, group in groups.items()]
    return sorted(found, key=lambda s: (-s.timing.total_ns, str(s.site), str(s.user_site), s.why or "", str(s.cause)))


def _ends(site: Site) -> tuple[Frame | None, Frame | None]:
    frames = [frame for frame in site.frames if frame["kind"] == "python"]
    own = next((frame for frame in frames if not not_own(frame["file"])), None)
    return (frames[0] if frames and site.why is None else None), own


def _place(site: Site) -> tuple[Any, ...]:
    innermost, own = _ends(site)
    return (*(tuple(frame.values()) if frame else None for frame in (innermost, own)), site.why)


def _merged(group: list[tuple[Site, SiteTimes]], cause: Cause) -> CallSite:
    innermost, own = _ends(group[0][0])
    hist: NDArray[Any] = np.sum([times.hist for _, times in group], axis=0)
    calls, total_ns = sum(times.calls for _, times in group), sum(times.total_ns for _, times in group)
    timing = timing_of(calls, total_ns, max(times.max_ns for _, times in group), hist)
    longest = sorted(((t.max_ns, t.max_at_ns, s.frames) for s, t in group), key=lambda c: (-c[0], c[1]))[:KEPT]
    idle, idle_ns = sum(times.idle for _, times in group), sum(times.idle_ns for _, times in group)
    return CallSite(innermost, own, group[0][0].why, timing, longest, cause, idle, idle_ns)


def rest_of(whole: Timing, hist: NDArray[Any], sites: list[CallSite], parts: NDArray[Any]) -> Timing | None:
    """The calls that no site accounts for; None where there are none. Its maximum is at most that of the whole.

    Args:
        hist: of the whole; `parts` of all sites together.
    """
    calls = whole.calls - sum(s.timing.calls for s in sites)
    total_ns = whole.total_ns - sum(s.timing.total_ns for s in sites)
    if calls <= 0:
        return None
    left = np.where(hist > parts, hist - parts, 0)
    return timing_of(calls, max(0, total_ns), whole.max_ns, left)

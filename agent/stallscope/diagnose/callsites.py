"""Where in the program threads waited: stacks of one function put together by the line that they begin with."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.sites import Site, Sites, SiteTimes
from stallscope.diagnose.timing import Timing, timing_of

__all__ = ["CallSite", "call_sites", "not_own", "rest_of"]

KEPT = 5
# Files that the user did not write: installed packages, and the standard library in a prefix, frozen or zipped.
_FOREIGN = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3(?:\.\d+|\d+\.zip)/|^<frozen ")

Frame = dict[str, Any]


class CallSite(NamedTuple):
    """Calls of one function in one process from one line.

    Attributes:
        site: the innermost Python frame, None where it is not known, and `why`.
        user_site: the innermost one in a file of the user's own.
        longest: (duration in ns, instant, frames) of the longest call of each of a few stacks, longest first.
    """

    site: Frame | None
    user_site: Frame | None
    why: str | None
    timing: Timing
    longest: list[tuple[int, int, list[Frame]]]


def not_own(file: str | None) -> bool:
    """Whether a file belongs to an installed package or to the standard library."""
    return file is None or bool(_FOREIGN.search(file))


def call_sites(sites: Sites, proc: int, hook: int) -> list[CallSite]:
    """Those of one function in one process, the largest total first."""
    groups: dict[tuple[Any, ...], list[tuple[Site, SiteTimes]]] = defaultdict(list)
    for site in sites.of(proc, hook):
        times = sites.times.get(site.number)
        if times is not None and times.calls:
            groups[_place(site)].append((site, times))
    found = [_merged(group) for group in groups.values()]
    return sorted(found, key=lambda s: (-s.timing.total_ns, str(s.site), str(s.user_site), s.why or ""))


def _ends(site: Site) -> tuple[Frame | None, Frame | None]:
    frames = [frame for frame in site.frames if frame["kind"] == "python"]
    own = next((frame for frame in frames if not not_own(frame["file"])), None)
    return (frames[0] if frames and site.why is None else None), own


def _place(site: Site) -> tuple[Any, ...]:
    innermost, own = _ends(site)
    return (*(tuple(frame.values()) if frame else None for frame in (innermost, own)), site.why)


def _merged(group: list[tuple[Site, SiteTimes]]) -> CallSite:
    innermost, own = _ends(group[0][0])
    hist: NDArray[Any] = np.sum([times.hist for _, times in group], axis=0)
    calls, total_ns = sum(times.calls for _, times in group), sum(times.total_ns for _, times in group)
    timing = timing_of(calls, total_ns, max(times.max_ns for _, times in group), hist)
    longest = sorted(((t.max_ns, t.max_at_ns, s.frames) for s, t in group), key=lambda c: (-c[0], c[1]))[:KEPT]
    return CallSite(innermost, own, group[0][0].why, timing, longest)


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

"""Python call sites of waits: SITE and SITES frames."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.checks import BadField, integer, items, maybe_integer, maybe_text
from stallscope.aggregate.hooks import WIRE_HOOKS
from stallscope.aggregate.hosts import stack_frame
from stallscope.aggregate.limits import Overflow
from stallscope.wire.columns import BUCKETS
from stallscope.wire.frames import Body

__all__ = ["Site", "SiteTimes", "Sites"]

MAX_FRAMES = 64
MAX_NUMBER = 1 << 63


class SiteTimes(NamedTuple):
    """Outermost calls there that returned: durations in ns, `hist` as in wire_time.

    `idle`: how many of them left nothing queued, until the process queued something `idle_ns` later in all.
    """

    calls: int
    total_ns: int
    max_ns: int
    max_at_ns: int
    hist: NDArray[np.uint64]
    idle: int = 0
    idle_ns: int = 0


class Site(NamedTuple):
    """One Python stack that waits in one function. Frames innermost first; `cut`: outer ones are missing. Native frames
    between those of Python are those of the first call there.

    `why`: why the innermost frame is not known, None where it is. `what`: the copy that its calls are, or wait for
    (enum wire_class of native/wire.h), 0: there is none, None: nobody looked.
    """

    number: int
    proc: int
    hook: int
    frames: list[dict[str, Any]]
    cut: bool
    why: str | None
    what: int | None = None


class Sites:
    """All of them.

    Attributes:
        times: by number of the site.
        unknown: processes without sites, and why.
        least_ns: of processes where only calls from this duration on are looked up.
    """

    def __init__(self, overflow: Overflow) -> None:
        self.table: dict[int, Site] = {}
        self.times: dict[int, SiteTimes] = {}
        self.unknown: dict[int, str] = {}
        self.least_ns: dict[int, int] = {}
        self._overflow = overflow
        self._frames: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._by_hook: dict[tuple[int, int], list[Site]] = {}

    def add(self, body: Body) -> None:
        """A SITE frame. A second one of the same number changes nothing."""
        frames = [stack_frame(row) for row in items(body, "frames", MAX_FRAMES)]
        cut = body.get("cut")
        if not isinstance(cut, bool):
            raise BadField("cut is no boolean")
        number, proc, hook = integer(body, "id"), integer(body, "proc"), integer(body, "hook", 0, WIRE_HOOKS)
        why, what = maybe_text(body, "why"), maybe_integer(body, "what", 0)
        if number not in self.table and not self._overflow.full("call sites", len(self.table)):
            site = Site(number, proc, hook, [self._shared(frame) for frame in frames], cut, why, what)
            self.table[number] = site
            self._by_hook.setdefault((proc, hook), []).append(site)

    def restack(self, body: Body) -> None:
        """A SITE_STACK frame."""
        frames = [stack_frame(row) for row in items(body, "frames", MAX_FRAMES)]
        site = self.table.get(integer(body, "id"))
        if site is not None:
            site.frames[:] = [self._shared(frame) for frame in frames]

    def of(self, proc: int, hook: int) -> list[Site]:
        """Those of one function in one process."""
        return self._by_hook.get((proc, hook), [])

    def _shared(self, frame: dict[str, Any]) -> dict[str, Any]:
        """One object for equal frames: stacks have most of them in common."""
        key = tuple(frame.values())
        if key not in self._frames and not self._overflow.full("frames of call sites", len(self._frames)):
            self._frames[key] = frame
        return self._frames.get(key, frame)

    def count(self, body: Body) -> None:
        """A SITES frame: cumulative."""
        proc, why = integer(body, "proc"), maybe_text(body, "unknown")
        rows = [_row(row) for row in items(body, "rows")]
        if why is not None and not self._overflow.full("processes", len(self.unknown)):
            self.unknown[proc] = why
        if "least_ns" in body and not self._overflow.full("processes", len(self.least_ns)):
            self.least_ns[proc] = integer(body, "least_ns")
        for number, times in rows:
            if number in self.table:
                self.times[number] = times


def _row(row: Any) -> tuple[int, SiteTimes]:
    if not isinstance(row, list) or len(row) not in (6, 8) or not isinstance(row[5], list) or len(row[5]) > 2 * BUCKETS:
        raise BadField("rows holds no site")
    pairs, numbers = row[5], [*row[:5], *row[6:]]
    if not all(type(n) is int and 0 <= n < MAX_NUMBER for n in (*numbers, *pairs)) or len(pairs) % 2:
        raise BadField("rows holds a site of impossible numbers")
    hist = np.zeros(BUCKETS, np.uint64)
    if any(bucket >= BUCKETS for bucket in pairs[::2]):
        raise BadField("rows holds a site with an impossible bucket")
    hist[pairs[::2]] = pairs[1::2]
    number, calls, total_ns, max_ns, max_at_ns, *idle = numbers
    return number, SiteTimes(calls, total_ns, max_ns, max_at_ns, hist, *idle)

"""Losses become events: counters of what was turned away, placed in time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stallscope.wire.frames import Kind

__all__ = ["LOSS_PLACES", "TURNED_AWAY", "Losses", "Totals"]

LOSS_PLACES = {
    0: "bulk ring full",
    1: "vital ring full",
    2: "thread table full",
    3: "nested too deep to time",
    4: "never returned in sight (longjmp, exception, too deep)",
}
# Not calls: what was turned away here stands in the notes. A return without an entry (place 8) is no loss at all: its
# call began before the link.
TURNED_AWAY = {
    5: "process events (fork, exec, exit, a kill for want of memory) were lost because their ring was full",
    9: "operations have no sequence number because the communicator table was full",
    10: "forked processes are not traced because no process slot was free",
    42: "waits have no call site because the table of sites was full",
    43: "ranges of pinned memory found no place in their table: of later copies it is not known what they touch",
    44: "call sites have no native frames because the table of stacks was full",
}
QUIET_NS = 200_000_000
LONGEST_NS = 1_000_000_000

Send = Callable[[Kind, dict[str, Any]], None]


@dataclass
class _Open:
    count: int
    from_ns: int
    to_ns: int


class Losses:
    """Watches loss counters.

    Each increase opens or extends a gap of its place; a gap is sent when nothing was lost for QUIET_NS or it is
    LONGEST_NS old, so that a long flood is a few frames and not one a poll.

    Args:
        read: the counters by place, cumulative.
        source: as in GAP frames.
        proc: whose losses they are, None for all.
        since_ns: since when something may have been lost, 0 for the first look.
    """

    def __init__(
        self, read: Callable[[], Mapping[str, int]], send: Send, source: str = "bpf", proc: int | None = None,
        since_ns: int = 0,
    ) -> None:  # fmt: skip
        self._read, self._send = read, send
        self._source, self._proc = source, proc
        self._seen: dict[str, int] = {}
        self._open: dict[str, _Open] = {}
        self._last_ns = since_ns

    def poll(self, now_ns: int) -> None:
        """Compare the counters with the last look; call it at least every 20 ms, it costs a few loads."""
        for place, count in self._read().items():
            before = self._seen.get(place, 0)
            if count > before:
                self._extend(place, count - before, now_ns)
                self._seen[place] = count
        for place, gap in list(self._open.items()):
            if now_ns - gap.to_ns > QUIET_NS or now_ns - gap.from_ns > LONGEST_NS:
                self._close(place)
        self._last_ns = now_ns

    def _extend(self, place: str, count: int, now_ns: int) -> None:
        gap = self._open.setdefault(place, _Open(0, self._last_ns or now_ns, now_ns))
        gap.count += count
        gap.to_ns = now_ns

    def _close(self, place: str) -> None:
        gap = self._open.pop(place)
        self._send(
            Kind.GAP,
            {"source": self._source, "proc": self._proc, "count": gap.count, "from_ns": gap.from_ns,
             "to_ns": gap.to_ns, "reason": place},
        )  # fmt: skip

    def totals(self) -> dict[str, int]:
        """What was lost up to the last look, by place."""
        return dict(self._seen)

    def finish(self, now_ns: int) -> None:
        """Last look: close every gap."""
        self.poll(now_ns)
        for place in list(self._open):
            self._close(place)


class Totals:
    """LOST frames: the newest replaces those before, so there is one sender for all sources."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sent: dict[str, int] = {}

    def report(self, now_ns: int, places: Mapping[str, int]) -> None:
        """Send the totals if they changed."""
        found = {name: count for name, count in places.items() if count}
        if found != self._sent:
            self._sent = found
            self._send(Kind.LOST, {"at_ns": now_ns, "places": found})

"""Losses become events: counters of what was turned away, placed in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stallscope.wire.frames import Kind

__all__ = ["LOSS_PLACES", "Losses"]

LOSS_PLACES = {
    0: "bulk ring full",
    1: "vital ring full",
    2: "thread table full",
    3: "nested too deep to time",
    4: "never returned in sight (longjmp, exception, too deep)",
}
# Not calls: what was turned away here stands in the notes. A return without an entry (place 8) is no loss at all: its
# call began before the link.
_TURNED_AWAY = {
    5: "process events (fork, exec, exit) were lost because their ring was full",
    9: "operations have no sequence number because the communicator table was full",
    10: "forked processes are not traced because no process slot was free",
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
    """Watches the loss counters of the ctl map.

    Each increase opens or extends a gap of its place; a gap is sent when nothing was lost for QUIET_NS or it is
    LONGEST_NS old, so that a long flood is a few frames and not one a poll.
    """

    def __init__(self, read: Callable[[int], int], send: Send) -> None:
        self._read = read
        self._send = send
        self._seen = dict.fromkeys(LOSS_PLACES, 0)
        self._open: dict[int, _Open] = {}
        self._last_ns = 0
        self._sent: dict[str, int] = {}

    def poll(self, now_ns: int) -> None:
        """Compare the counters with the last look; call it at least every 20 ms, it costs six loads."""
        for place in LOSS_PLACES:
            count = self._read(place)
            if count > self._seen[place]:
                self._extend(place, count - self._seen[place], now_ns)
                self._seen[place] = count
        for place, gap in list(self._open.items()):
            if now_ns - gap.to_ns > QUIET_NS or now_ns - gap.from_ns > LONGEST_NS:
                self._close(place)
        self._last_ns = now_ns

    def _extend(self, place: int, count: int, now_ns: int) -> None:
        gap = self._open.setdefault(place, _Open(0, self._last_ns or now_ns, now_ns))
        gap.count += count
        gap.to_ns = now_ns

    def _close(self, place: int) -> None:
        gap = self._open.pop(place)
        self._send(
            Kind.GAP,
            {"source": "bpf", "proc": None, "count": gap.count, "from_ns": gap.from_ns, "to_ns": gap.to_ns,
             "reason": LOSS_PLACES[place]},
        )  # fmt: skip

    def report(self, now_ns: int) -> None:
        """Send the totals if they changed."""
        places = {name: self._read(place) for place, name in LOSS_PLACES.items()}
        places = {name: count for name, count in places.items() if count}
        if places != self._sent:
            self._sent = places
            self._send(Kind.LOST, {"at_ns": now_ns, "places": places})

    def finish(self, now_ns: int) -> None:
        """Last look: close every gap, send the totals."""
        self.poll(now_ns)
        for place in list(self._open):
            self._close(place)
        self.report(now_ns)
        for place, what in _TURNED_AWAY.items():
            count = self._read(place)
            if count:
                self._send(Kind.NOTE, {"at_ns": now_ns, "proc": None, "text": f"{count} {what}"})

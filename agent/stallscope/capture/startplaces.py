"""Where programs that have just begun wait: PLACE frames.

A start-up is slow while nothing of CUDA is there yet, so no probe tells of it. The main thread of each program that
runs for more than 0.2 s is looked at, ever more seldom while it stays where it is, until its process calls CUDA.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stallscope.capture.exits import has_ended
from stallscope.capture.hoststate import HostThread, read_thread
from stallscope.capture.target import Target
from stallscope.wire.frames import Kind

__all__ = ["StartPlaces"]

FIRST_NS, LEAST_NS, MOST_NS = 200_000_000, 250_000_000, 8_000_000_000
SHARE = 4  # of the time that it has been in one place: so exact is that time known
LAST_NS = 900_000_000_000  # what has not called CUDA by then is no start-up any more
MOST = 256
PACE_NS = 10_000_000  # from one look to the next, whoever is due: 0.1 ms each
Send = Callable[[Kind, dict[str, Any]], None]
Place = tuple[str | None, str | None]


@dataclass
class _Entry:
    """A program: since when it runs, where it was last seen, since when, and when that was."""

    target: Target
    begun_ns: int
    place: Place | None = None
    since_ns: int = 0
    last_ns: int | None = None


class StartPlaces:
    """`began` for each program, `step` at every look of the loop.

    Attributes:
        turned_away: programs that were not looked at because too many others were.
    """

    def __init__(self, send: Send, clock: Callable[[], int]) -> None:
        self._send, self._clock = send, clock
        self._entries: dict[int, _Entry] = {}
        self._due: list[tuple[int, int, int]] = []  # (when, proc, which program of it)
        self._next_ns = 0
        self.turned_away = 0

    def began(self, target: Target) -> None:
        """The process runs another program now, or is new."""
        if target.proc not in self._entries and len(self._entries) >= MOST:
            self._sweep()
        if target.proc not in self._entries and len(self._entries) >= MOST:
            self.turned_away += 1
            return
        now = self._clock()
        self._entries[target.proc] = _Entry(target, now)
        age_ns = max(0, now - target.facts.start_ns)
        heapq.heappush(self._due, (now + max(0, FIRST_NS - age_ns), target.proc, now))

    def _sweep(self) -> None:
        for proc in [proc for proc, entry in self._entries.items() if entry.target.ended]:
            del self._entries[proc]
        self._due = [row for row in self._due if row[1] in self._entries]
        heapq.heapify(self._due)

    def step(self) -> None:
        """Look at one of those that are due, the longest overdue first."""
        while self._due and self._due[0][0] <= (now := self._clock()) and now >= self._next_ns:
            _, proc, begun_ns = heapq.heappop(self._due)
            entry = self._entries.get(proc)
            if entry is None or entry.begun_ns != begun_ns:
                continue  # it has run another program since
            if self._is_over(entry, now):
                del self._entries[proc]
                continue
            self._next_ns = now + PACE_NS
            self._look(entry)

    def _is_over(self, entry: _Entry, now: int) -> bool:
        target = entry.target
        return target.ended or target.counted_ns > 0 or now - entry.begun_ns > LAST_NS

    def _look(self, entry: _Entry) -> None:
        target = entry.target
        thread, now = read_thread(target.pid, target.pid), self._clock()
        if thread is None or target.pidfd < 0 or has_ended(target.pidfd):
            self._entries.pop(target.proc, None)
            return  # its number may be another's by now
        place = _place(thread)
        if place != entry.place:
            body = {"at_ns": now, "proc": target.proc, "last_ns": entry.last_ns, "thread": list(thread)}
            self._send(Kind.PLACE, body)
            entry.place, entry.since_ns = place, now
        entry.last_ns = now
        pause = min(MOST_NS, max(LEAST_NS, (now - entry.since_ns) // SHARE))
        heapq.heappush(self._due, (now + pause, target.proc, entry.begun_ns))


def _place(thread: HostThread) -> Place:
    """What makes a place: a program that computes, or waits for a page, is in one, however it is caught."""
    return (None, None) if thread.state == "R" else (thread.syscall, thread.file)

"""Calls that have not returned: the last look at the threads, and calls that began before the link."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from stallscope.aggregate.checks import BadField, integer, items
from stallscope.aggregate.events import ENTERED, LEFT, NESTED
from stallscope.aggregate.hooks import WIRE_HOOKS
from stallscope.aggregate.limits import Overflow
from stallscope.wire.frames import Body

__all__ = ["Call", "Flight", "Inferred", "Thread"]

ARGUMENTS = 8


class Call(NamedTuple):
    """One call under way."""

    hook: int
    ts_ns: int
    n: int
    flags: int
    a: list[int]


class Thread(NamedTuple):
    """The calls under way in one thread, outermost first."""

    proc: int
    tid: int
    calls: list[Call]


class Inferred(NamedTuple):
    """A call that began before the link; `since_ns` is when it was first seen under way."""

    proc: int
    tid: int
    hook: int
    since_ns: int


class Flight:
    """INFLIGHT and INFERRED frames: only the newest look counts.

    Attributes:
        sites: (process, thread) -> number of the call site of its outermost call.
    """

    def __init__(self, overflow: Overflow) -> None:
        self.threads: list[Thread] = []
        self.sites: dict[tuple[int, int], int] = {}
        self.at_ns = 0
        self.final = False
        self.inferred: dict[tuple[int, int], Inferred] = {}
        self._overflow = overflow

    def look(self, body: Body) -> None:
        """An INFLIGHT frame."""
        at_ns = integer(body, "at_ns")
        final = body.get("final")
        if not isinstance(final, bool):
            raise BadField("final is no boolean")
        threads = [_thread(row) for row in items(body, "rows")]
        sites = dict(_site(row) for row in items(body, "sites"))
        if self.final:
            return
        self.at_ns, self.final, self.threads, self.sites = at_ns, final, [], sites
        for thread in threads:
            if thread.calls and not self._overflow.full("threads in flight", len(self.threads)):
                self.threads.append(thread)

    def infer(self, body: Body) -> None:
        """An INFERRED frame: begins, goes on, or (with a reason) ends."""
        call = Inferred(
            integer(body, "proc"), integer(body, "tid"), integer(body, "hook", 0, WIRE_HOOKS), integer(body, "since_ns")
        )
        integer(body, "at_ns")
        key = (call.proc, call.tid)
        if body.get("ended") is not None:
            self.inferred.pop(key, None)
        elif key in self.inferred or not self._overflow.full("inferred calls", len(self.inferred)):
            self.inferred[key] = call

    def forget(self, proc: int) -> None:
        """The process ended, and with it what was only inferred."""
        for key in [k for k in self.inferred if k[0] == proc]:
            del self.inferred[key]

    def waiting(self) -> list[Thread]:
        """Threads inside a call, without calls that a thread left by longjmp (they never return in sight)."""
        there = (t._replace(calls=[c for c in t.calls if not c.flags & LEFT]) for t in self.threads)
        return [thread for thread in there if thread.calls]

    def unrecorded(self) -> Counter[int]:
        """By process: calls that are an event only because the final look names them."""
        if not self.final:
            return Counter()
        return Counter(t.proc for t in self.threads for call in t.calls if not call.flags & ENTERED)

    def under_way(self) -> Counter[tuple[int, int, bool]]:
        """Calls under way by (process, hook, nested)."""
        return Counter((t.proc, call.hook, bool(call.flags & NESTED)) for t in self.threads for call in t.calls)


def _thread(row: Any) -> Thread:
    if not isinstance(row, list) or len(row) != 3 or not isinstance(row[2], list) or len(row[2]) > 64:
        raise BadField("rows holds no thread")
    if not all(type(x) is int and 0 <= x < 1 << 32 for x in row[:2]):
        raise BadField("rows holds a thread without numbers")
    return Thread(row[0], row[1], [_call(call) for call in row[2]])


def _site(row: Any) -> tuple[tuple[int, int], int]:
    if not isinstance(row, list) or len(row) != 3 or not all(type(x) is int for x in row):
        raise BadField("sites holds no thread and site")
    return (row[0], row[1]), row[2]


def _call(row: Any) -> Call:
    if not isinstance(row, list) or len(row) != 5 or not isinstance(row[4], list) or len(row[4]) != ARGUMENTS:
        raise BadField("rows holds no call")
    if not all(type(x) is int and 0 <= x < 1 << 64 for x in (*row[:4], *row[4])) or row[0] >= WIRE_HOOKS:
        raise BadField("rows holds a call of impossible numbers")
    return Call(*row)

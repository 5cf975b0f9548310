"""Stacks of all Python threads of processes in which something waits, as capture took them after 2 s and 10 s."""

from __future__ import annotations

from typing import Any, NamedTuple

from stallscope.aggregate.checks import BadField, integer, items, maybe_text, text
from stallscope.aggregate.hosts import stack_frame
from stallscope.aggregate.limits import Overflow
from stallscope.wire.frames import Body

__all__ = ["Round", "Rounds", "ThreadStack"]

MAX_FRAMES, MAX_THREADS = 128, 256


class ThreadStack(NamedTuple):
    """One thread; `waits`: inside a hooked call. `why` it has no frames."""

    at_ns: int
    tid: int
    name: str
    waits: bool
    frames: list[dict[str, Any]]
    why: str | None


class Round(NamedTuple):
    """One look at a process: `since_ns` is when the oldest wait in it began; `left_out`: threads beyond the cap."""

    at_ns: int
    since_ns: int
    left_out: int
    threads: list[ThreadStack]

    @property
    def age_ns(self) -> int:
        return self.at_ns - self.since_ns


class Rounds:
    """Of each process the newest round, and that of the longest wait before it."""

    def __init__(self, overflow: Overflow) -> None:
        self.table: dict[int, list[Round]] = {}
        self._overflow = overflow
        self._stacks = 0
        self._frames: dict[tuple[Any, ...], dict[str, Any]] = {}

    def add(self, body: Body) -> None:
        """A STACK frame with `round_ns`."""
        frames = [self._shared(stack_frame(row)) for row in items(body, "frames", MAX_FRAMES)]
        waits, name = body.get("waits"), text(body, "name")
        if not isinstance(waits, bool):
            raise BadField("waits is no boolean")
        stack = ThreadStack(integer(body, "at_ns"), integer(body, "tid"), name, waits, frames, maybe_text(body, "why"))
        mine = self._round(body).threads
        if len(mine) < MAX_THREADS and not self._overflow.full("stacks of threads", self._stacks):
            mine.append(stack)
            self._stacks += 1

    def _round(self, body: Body) -> Round:
        proc, at_ns = integer(body, "proc"), integer(body, "round_ns")
        known = self.table.get(proc, [])
        if not known or known[-1].at_ns != at_ns:
            known = [*_longest(known), Round(at_ns, integer(body, "since_ns"), integer(body, "left_out"), [])]
            if proc in self.table or not self._overflow.full("processes with stacks", len(self.table)):
                self._stacks -= sum(len(one.threads) for one in self.table.get(proc, []) if one not in known)
                self.table[proc] = known
        return known[-1]

    def _shared(self, frame: dict[str, Any]) -> dict[str, Any]:
        """One object for equal frames."""
        key = tuple(frame.values())
        if key not in self._frames and not self._overflow.full("frames of threads", len(self._frames)):
            self._frames[key] = frame
        return self._frames.get(key, frame)


def _longest(rounds: list[Round]) -> list[Round]:
    return sorted(rounds, key=lambda one: one.age_ns)[-1:]

"""The communicators of processes with a shim, as CommReader wants them: only NCCL's memory tells which rank a split
made."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stallscope.capture.commreader import MADE, SPREAD, TAKEN
from stallscope.capture.rings import InflightRow
from stallscope.capture.segment import Comm

__all__ = ["ShimComms"]

MAX_ROWS = 1 << 14
_MASK = (1 << 64) - 1


class ShimComms:
    """Rows are taken once and never freed, as in the table that BPF has.

    Args:
        made: how many communicators the shims have seen made.
        comms: (pid, its communicators) of each process.
        inflight: threads inside a call; None where every operation since the creation was numbered, so that nobody
            compares with NCCL's own count.
    """

    def __init__(
        self, made: Callable[[], int], comms: Callable[[], Iterable[tuple[int, list[Comm]]]],
        inflight: Callable[[], list[InflightRow]] | None = None,
    ) -> None:  # fmt: skip
        self._made, self._comms, self._inflight = made, comms, inflight
        self._rows: list[int] = []
        self._known: set[int] = set()
        self._free: list[int] = []
        self._taken = self._seen = 0

    def ctl(self, index: int) -> int:
        """How many rows are TAKEN, how many communicators were MADE."""
        made = self._made()
        if made != self._seen or self._inflight is not None:  # communicators that are older than the library, too
            self._seen = made
            self._look()
        return {TAKEN: self._taken, MADE: made}[index]

    def _look(self) -> None:
        for pid, comms in self._comms():
            for comm in comms:
                key = (comm.pointer + pid * SPREAD) & _MASK
                if key not in self._known and (self._free or len(self._rows) < MAX_ROWS):
                    self._take(key)

    def _take(self, key: int) -> None:
        self._known.add(key)
        self._taken += 1
        if self._free:
            self._rows[self._free.pop()] = key
        else:
            self._rows.append(key)

    def free(self, row: int) -> None:
        """Of a process that has ended."""
        self._known.discard(self._rows[row])
        self._rows[row] = 0
        self._free.append(row)

    def keys(self) -> list[int]:
        """The key of every row, 0 where it is free."""
        return list(self._rows)

    def next(self, row: int) -> int:
        """Operations numbered so far; 0 where nobody compares."""
        key = self._rows[row]
        every = self._comms() if self._inflight is not None else ()
        found = (comm.next for pid, comms in every for comm in comms if (comm.pointer + pid * SPREAD) & _MASK == key)
        return next(found, 0)

    def inflight(self) -> list[InflightRow]:
        """Threads that are inside a call now."""
        return self._inflight() if self._inflight is not None else []

"""Collectives that every rank's GPU has begun: whose came last, by how much.

Where hosts run ahead of their GPUs, or keep each other waiting, only this tells which of them is slow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.state import State
from stallscope.diagnose.completed import CLEAR_NS, FLOOR_NS, TIMES_P99, WARM_UP, Completed

__all__ = ["Begun"]

Array = NDArray[Any]
KEPT = 256


class Begun:
    """Attributes:
    last: by communicator: (rank whose GPU came last, by how much later than the one before it, when, whether it was
        the GPU and not the host that was late), newest last, without episodes of hosts.
    """

    def __init__(self, state: State, completed: Completed) -> None:
        self._state, self._completed = state, completed
        self._upto: dict[int, int] = {}
        self._previous_ns: dict[int, int] = {}
        self.last: dict[int, Array] = {}

    def step(self) -> None:
        """Look at what came since the last step."""
        operations = self._state.operations
        for comm, upto in operations.starts.upto.items():
            ranks = np.flatnonzero(operations.arrivals.present[operations.arrivals.rank_rows(comm)])
            common = int(upto[ranks].min()) if len(ranks) >= 2 else 0
            first = self._upto.setdefault(comm, max(0, common - 1))
            if common > first and operations.arrivals.trusted[comm]:
                self._look(comm, ranks, first, common)
                self._upto[comm] = common

    def _look(self, comm: int, ranks: Array, low: int, high: int) -> None:
        times = self._state.operations.starts.times[comm]
        numbers = np.arange(max(low, high - times.shape[1]), high)
        began = times[ranks][:, numbers % times.shape[1]]
        known = (began > 0).all(axis=0)
        began, numbers = began[:, known], numbers[known]
        if not len(numbers):
            return
        ordered = np.sort(began, axis=0)
        last = ordered[-1]
        previous = np.concatenate(([self._previous_ns.get(comm, 0)], last[:-1]))
        self._previous_ns[comm] = int(last[-1])
        since = np.maximum(ordered[-2], previous)
        who = ranks[began.argmax(axis=0)]
        held = self._held(comm, numbers, who, since, last)
        rows = np.stack([who, np.maximum(0, last - since), last, held], axis=1)
        usual = rows[:, 1] <= max(FLOOR_NS, TIMES_P99 * (self._completed.slowest_p99_ns(comm) or 0))
        rows = rows[(numbers >= WARM_UP) & (usual | (held == 1))]
        kept = self.last.get(comm)
        self.last[comm] = (rows if kept is None else np.concatenate([kept, rows]))[-KEPT:]

    def _held(self, comm: int, numbers: Array, who: Array, since: Array, last: Array) -> Array:
        """Whether the host of the last one had called early enough, or waited for its GPU meanwhile."""
        operations = self._state.operations
        entered, _ = operations.arrivals.history(comm)
        entries = entered[who, numbers % entered.shape[1]]
        held: Array = (2 * (last - np.maximum(since, entries)) >= last - since).astype(np.int64)
        issuers = {p.rank: i for i in operations.issuers.values() for p in i.places.values() if p.comm == comm}
        for at in np.flatnonzero((held == 0) & (last - since >= CLEAR_NS)).tolist():
            issuer = issuers.get(int(who[at]))
            if issuer is not None:
                begin, end = int(since[at]), int(last[at])
                held[at] = 2 * issuer.waited_ns(begin, end) >= end - begin
        return held

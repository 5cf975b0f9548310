"""How far every rank is in every communicator, as columns: one pass over all of them tells who lags behind."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Arrivals", "Lag"]

Array = NDArray[Any]
CELLS = 1 << 21  # of the history, over all communicators
MAX_U64 = (1 << 64) - 1
DEEPEST, SHALLOWEST = 4096, 16
FIRST = 256


class Lag(NamedTuple):
    """A communicator in which some ranks issued an operation that others did not: `missing` are those others."""

    comm: int
    number: int
    since_ns: int
    missing: list[int]


class Arrivals:
    """Rows of all communicators back to back, one for each rank of it.

    Attributes:
        arrived: collectives that the rank has issued.
        present: whether the rank is one that we trace.
        last_ns: when it issued the last of them; signature: of the last of them.
    """

    def __init__(self) -> None:
        self.comms = self.rows = 0
        self.first = np.zeros(FIRST, np.int64)
        self.size = np.zeros(FIRST, np.int64)
        self.frontier = np.zeros(FIRST, np.int64)
        self.moved_ns = np.zeros(FIRST, np.int64)
        self.trusted = np.zeros(FIRST, bool)
        self.arrived = np.zeros(FIRST, np.int64)
        self.present = np.zeros(FIRST, bool)
        self.last_ns = np.zeros(FIRST, np.int64)
        self.signature = np.zeros(FIRST, np.uint64)
        self._times: dict[int, tuple[Array, Array]] = {}

    def add(self, nranks: int, now_ns: int) -> int:
        """A communicator of that many ranks; its index."""
        while self.comms + 1 > len(self.first):
            for name in ("first", "size", "frontier", "moved_ns", "trusted"):
                self._double(name)
        while self.rows + nranks > len(self.arrived):
            for name in ("arrived", "present", "last_ns", "signature"):
                self._double(name)
        comm = self.comms
        self.first[comm], self.size[comm] = self.rows, nranks
        self.moved_ns[comm], self.trusted[comm] = now_ns, True
        self.comms, self.rows = comm + 1, self.rows + nranks
        return comm

    def _double(self, name: str) -> None:
        old: Array = getattr(self, name)
        setattr(self, name, np.concatenate((old, np.zeros_like(old))))

    def rank_rows(self, comm: int) -> slice:
        """The rows of a communicator's ranks, in order."""
        first = int(self.first[comm])
        return slice(first, first + int(self.size[comm]))

    def history(self, comm: int) -> tuple[Array, Array]:
        """(times, signatures) of the newest operations: [rank, index modulo the number of columns]."""
        found = self._times.get(comm)
        if found is None:
            nranks = int(self.size[comm])
            fair = max(1, CELLS // max(1, self.rows + 1024 - nranks))
            depth = 1 << max(0, min(fair, DEEPEST).bit_length() - 1)
            depth = max(SHALLOWEST, depth)
            found = np.zeros((nranks, depth), np.int64), np.zeros((nranks, depth), np.uint64)
            self._times[comm] = found
        return found

    def came(self, comm: int, rank: int, indices: Array, times: Array, signatures: Array) -> None:
        """A rank issued operations of these numbers, in order."""
        kept_times, kept_signatures = self.history(comm)
        row, columns = int(self.first[comm]) + rank, kept_times.shape[1]
        upto, places = int(indices[-1]) + 1, indices % columns
        # Where numbers were lost, their places still hold operations of long ago.
        kept_times[rank, np.arange(max(int(self.arrived[row]), upto - columns), upto) % columns] = 0
        kept_times[rank, places], kept_signatures[rank, places] = times, signatures
        if upto > self.arrived[row]:
            self.arrived[row] = upto
            self.last_ns[row], self.signature[row] = int(times[-1]), signatures[-1]

    def lowest(self) -> Array:
        """By communicator: how many operations all ranks that we trace have issued."""
        return self._by_comm(np.minimum, np.where(self.present[: self.rows], self.arrived[: self.rows], 1 << 62))

    def _by_comm(self, way: Any, values: Array) -> Array:
        found: Array = way.reduceat(values, self.first[: self.comms]) if self.comms else np.zeros(0, np.int64)
        return found

    def lagging(self, now_ns: int, older_than_ns: int = 0) -> list[Lag]:
        """Communicators in which somebody waits for a rank that we trace, since so long ago or longer.

        Call it regularly: `since_ns` is the time of the first call that saw the communicator where it stands now.
        """
        lowest, rows = self.lowest(), slice(0, self.rows)
        highest = self._by_comm(np.maximum, np.where(self.present[rows], self.arrived[rows], -1))
        comms = slice(0, self.comms)
        moved = lowest != self.frontier[comms]
        self.frontier[comms] = lowest
        self.moved_ns[comms] = np.where(moved | (highest <= lowest), now_ns, self.moved_ns[comms])
        late = (highest > lowest) & self.trusted[comms] & (now_ns - self.moved_ns[comms] >= older_than_ns)
        return [self._lag(comm, int(lowest[comm])) for comm in np.flatnonzero(late).tolist()]

    def _lag(self, comm: int, index: int) -> Lag:
        rows = self.rank_rows(comm)
        missing = np.flatnonzero(self.present[rows] & (self.arrived[rows] <= index)).tolist()
        return Lag(comm, index, int(self.moved_ns[comm]), missing)

    def differing(self) -> list[int]:
        """Communicators where all issued as many operations, and the last one is not the same everywhere."""
        rows = slice(0, self.rows)
        low = self._by_comm(np.minimum, np.where(self.present[rows], self.signature[rows], np.uint64(MAX_U64)))
        high = self._by_comm(np.maximum, np.where(self.present[rows], self.signature[rows], np.uint64(0)))
        highest = self._by_comm(np.maximum, np.where(self.present[rows], self.arrived[rows], -1))
        return np.flatnonzero((low < high) & (self.lowest() == highest)).tolist()

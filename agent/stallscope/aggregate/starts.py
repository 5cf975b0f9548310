"""When the GPUs began the newest collectives of each communicator, as far as a witness told."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Starts"]

Array = NDArray[Any]
CELLS = 1 << 20  # over all communicators
DEEPEST, SHALLOWEST = 512, 16


class Starts:
    """By communicator: `times` [rank, number modulo the columns] in ns, 0 = not told; `upto` by rank: the number behind
    the newest that was told."""

    def __init__(self) -> None:
        self.times: dict[int, Array] = {}
        self.upto: dict[int, Array] = {}
        self._cells = 0

    def began(self, comm: int, nranks: int, rank: int, numbers: Array, times: Array) -> None:
        """A rank's GPU began collectives of these numbers, at these instants."""
        if not len(numbers) or (comm not in self.times and not self._add(comm, nranks)):
            return
        kept, upto = self.times[comm], self.upto[comm]
        columns = kept.shape[1]
        newest = max(int(upto[rank]), int(numbers.max()) + 1)
        skipped = np.arange(max(int(upto[rank]), newest - columns), newest)
        kept[rank, skipped % columns] = 0  # of numbers that long ago had these places
        fresh = numbers >= newest - columns
        kept[rank, numbers[fresh] % columns] = times[fresh]
        upto[rank] = newest

    def _add(self, comm: int, nranks: int) -> bool:
        depth = DEEPEST
        while depth > SHALLOWEST and depth * nranks > CELLS // 8:
            depth //= 2
        if self._cells + depth * nranks > CELLS:
            return False
        self._cells += depth * nranks
        self.times[comm], self.upto[comm] = np.zeros((nranks, depth), np.int64), np.zeros(nranks, np.int64)
        return True

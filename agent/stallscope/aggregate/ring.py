"""The newest rows of something, oldest first."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ring"]

FIRST = 64


class Ring:
    """Keeps the newest `cap` rows (a power of two); starts small. `total` counts all that ever came."""

    def __init__(self, dtype: np.dtype[Any], cap: int) -> None:
        self._rows = np.zeros(min(FIRST, cap), dtype)
        self._cap = cap
        self.total = 0

    def __len__(self) -> int:
        return min(self.total, len(self._rows))

    def append(self, rows: NDArray[Any]) -> None:
        """Newer rows, in order."""
        while len(self._rows) < self._cap and self.total + len(rows) > len(self._rows):
            self._grow()
        size = len(self._rows)
        kept = rows[-size:]
        first = self.total + len(rows) - len(kept)
        self._rows[(first + np.arange(len(kept))) & (size - 1)] = kept
        self.total += len(rows)

    def _grow(self) -> None:
        # Only while nothing has been overwritten: then row i still stands at place i.
        bigger = np.zeros(2 * len(self._rows), self._rows.dtype)
        bigger[: len(self._rows)] = self._rows
        self._rows = bigger

    def newest(self, count: int) -> NDArray[Any]:
        """Copies of at most so many rows, oldest first."""
        count = min(count, len(self))
        found: NDArray[Any] = self._rows[(self.total - count + np.arange(count)) & (len(self._rows) - 1)]
        return found

    def update(self, field: str, chosen: NDArray[np.bool_], value: int) -> None:
        """Set a field of the rows that `chosen` marks, in the order of `newest(len(self))`."""
        self.assign(field, np.flatnonzero(chosen), value)

    def assign(self, field: str, places: NDArray[Any], values: NDArray[Any] | int) -> None:
        """Set a field of the rows at these places in the order of `newest(len(self))`."""
        self._rows[field][(self.total - len(self) + places) & (len(self._rows) - 1)] = values

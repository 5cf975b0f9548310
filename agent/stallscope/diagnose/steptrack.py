"""The steps of one process as its calls come: what has no rhythm yet is kept, what has one is counted and forgotten."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.tape import TOKEN, WAITED
from stallscope.diagnose.stepcut import Cut, cut
from stallscope.diagnose.stepfind import LEAST, Anchor, learn
from stallscope.diagnose.stepledger import Ledger

__all__ = ["LOG", "Track"]

Array = NDArray[Any]
LOG = 8192
MOST_SIZES, MOST_SORTS = 32, 2048
LEAST_USUAL = 0.3
LEFT_STEPS = 3


class Track:
    """Of one process.

    Attributes:
        anchor: what marks its steps, None while that is not known.
        dropped: tokens that had to go without a rhythm found in them.
        from_start: whether the process was seen from its first step on.
        in_front: steps without the mark that came before all others.
        unsure: whether some number of steps was a guess.
        eras: how often the mark changed.
    """

    def __init__(self) -> None:
        self.anchor: Anchor | None = None
        self.ledger = Ledger()
        self.dropped = 0
        self.unsure = False
        self.eras = 0
        self.from_start = False
        self.in_front = 0
        self._parts: list[Array] = []
        self._size = 0
        self._n: int | None = None
        self._sizes: dict[int, set[int]] = {}
        self._host_calls = 0

    def __len__(self) -> int:
        return self._size

    def add(self, tokens: Array) -> None:
        """The next tokens, in order."""
        if len(tokens):
            self._parts.append(self._plain(tokens))
            self._size += len(tokens)

    def _plain(self, tokens: Array) -> Array:
        """Calls whose sizes are never the same again go without their size."""
        sort, at = np.unique(tokens["sort"], return_inverse=True)
        changing = np.zeros(len(sort), bool)
        for index, value in enumerate(sort.tolist()):
            if value not in self._sizes and len(self._sizes) >= MOST_SORTS:
                continue
            sizes = self._sizes.setdefault(value, set())
            if len(sizes) <= MOST_SIZES:
                sizes.update(np.unique(tokens["key"][at == index]).tolist())
            changing[index] = len(sizes) > MOST_SIZES
        if changing.any():
            tokens["key"] = np.where(changing[at], tokens["sort"], tokens["key"])
        return tokens

    def newest_ns(self) -> int | None:
        """When the newest call was made."""
        return int(self._parts[-1]["at_ns"][-1]) if self._parts and len(self._parts[-1]) else self.ledger.last_ns

    def is_full(self) -> bool:
        """Whether `fold` has to make room."""
        return self._size >= LOG

    def fold(self, host_calls: int) -> None:
        """Count the steps in what is kept. `host_calls`: waits and copies of the process so far."""
        rows = self._rows()
        made = host_calls - self._host_calls
        found = self._cut(rows, made, is_end=False, is_open=True)
        if found is None or not len(found.ends):
            half = len(rows) // 2
            self.dropped += half
            self.ledger.last_ns, self._n = None, None
            self._keep(rows[half:])
            return
        self._host_calls = host_calls
        self._count(rows, found)
        self._n = found.n
        self._keep(rows[int(found.ends["row"][-1]) + 1 :])

    def closed(self, host_calls: int, *, is_end: bool) -> Track:
        """As it stands with all that is kept counted, too. `is_end`: whether the process has ended its loop."""
        whole = copy.copy(self)
        whole.ledger, whole._parts = copy.deepcopy(self.ledger), list(self._parts)
        rows = whole._rows()
        made = host_calls - self._host_calls
        found = whole._cut(rows, made, is_end=is_end, is_open=False) if len(rows) else None
        if found is not None and len(found.ends):
            whole._count(rows, found)
        return whole

    def _rows(self) -> Array:
        rows = np.concatenate(self._parts) if self._parts else np.zeros(0, TOKEN)
        self._parts = [rows]
        return rows

    def _keep(self, rows: Array) -> None:
        self._parts, self._size = [rows.copy()], len(rows)

    def _cut(self, rows: Array, host_calls: int, *, is_end: bool, is_open: bool) -> Cut | None:
        """The steps in these rows, by the mark so far or by a new one."""
        is_first = self.ledger.count == 0
        best: Cut | None = None
        if self.anchor is not None:
            best = cut(rows, self.anchor, self._n, is_first=is_first, is_end=is_end, is_open=is_open)
            if (best is not None and self._share(best) >= LEAST_USUAL) or len(rows) < 4 * LEAST:
                return best
        made = host_calls if host_calls > 0 else sum(_spans(rows))  # without counters: all that the records tell of
        anchor = learn(rows, made, is_first=is_first and self.from_start, is_end=is_end)
        if anchor is None:
            return best
        if best is not None and self.anchor is not None and anchor[:3] == self.anchor[:3]:
            self.anchor = anchor  # the same mark of steps that are other ones now
            return best
        fresh = cut(rows, anchor, None, is_first=self.anchor is None, is_end=is_end, is_open=is_open)
        if fresh is not None and self.anchor is not None:
            fresh = self._joined(rows, self.anchor, fresh)
        self.eras += self.anchor is not None
        self.anchor = anchor
        self.unsure |= not anchor.sure
        return fresh

    def _joined(self, rows: Array, old: Anchor, fresh: Cut) -> Cut:
        """With the last steps by the mark so far in front, as far as they are as they always were."""
        upto = int(fresh.ends["row"][0]) + 1
        before = cut(rows[:upto], old, self._n, is_first=False, is_end=False, is_open=False)
        if before is None:
            return fresh
        same = before.ends[before.ends["what"] == np.uint64(old.usual)]
        ends = np.concatenate([same[same["row"] < upto - 1], fresh.ends])
        return fresh._replace(ends=ends)

    def _share(self, found: Cut) -> float:
        """How many of the steps are as the mark's steps were when it was found."""
        assert self.anchor is not None
        return float((found.ends["what"] == np.uint64(self.anchor.usual)).mean()) if len(found.ends) else 0.0

    def _count(self, rows: Array, found: Cut) -> None:
        if self.ledger.count == 0 and not self.from_start and self.anchor is not None:
            found.ends["what"][0] = self.anchor.usual  # its beginning was not seen: nobody knows what was in it
            self.ledger.kinds.setdefault(self.anchor.usual, dict(self.anchor.calls))  # not what is left of it
        self.ledger.add(rows, found.ends)
        self.unsure |= not found.sure
        self.in_front += found.in_front


def _spans(rows: Array) -> Iterator[int]:
    """How many calls of each waiting function lie between the first and the last one that was recorded."""
    waits = rows[rows["kind"] == WAITED]
    for hook in np.unique(waits["hook"]).tolist():
        n = waits["n"][waits["hook"] == hook].astype(np.int64)
        yield int(n.max() - n.min()) + 1

"""What the steps of one process add up to, in bounded memory: runs of equal steps, durations, the slowest ones."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.tape import NCCL
from stallscope.diagnose.completed import buckets
from stallscope.wire.columns import BUCKETS, percentile

__all__ = ["Ledger", "Run", "Slow"]

Array = NDArray[Any]
MOST_RUNS = 4096
MOST_KINDS = 128
MOST_SLOW = 8
SLOW_TIMES = 1.5
LEAST_BATCH = 8
OTHER = 0


class Run(NamedTuple):
    """Equal steps in a row: first to last (from 1 on), from the end of the one before to the end of the last."""

    what: int
    first: int
    last: int
    from_ns: int
    to_ns: int


class Slow(NamedTuple):
    """One slow step and what was different in it.

    Attributes:
        usual_ns: how long steps about it took.
        key: of the wait that was longer than usual by most, None where none was; wait_ns, wait_usual_ns: how long.
        what: its content.
    """

    ns: int
    step: int
    at_ns: int
    usual_ns: int
    key: int | None
    wait_ns: int
    wait_usual_ns: int
    what: int


class Ledger:
    """Filled step by step.

    Attributes:
        kinds: by content of a step, its NCCL operations by key; times: how many steps had it.
        left_out: steps whose content found no room (`kinds`, `runs`): their number counts, their differences don't.
    """

    def __init__(self) -> None:
        self.count = 0
        self.runs: list[Run] = []
        self.kinds: dict[int, dict[int, int]] = {}
        self.times: dict[int, int] = {}
        self.slow: list[Slow] = []
        self.left_out = 0
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self._hist = np.zeros(BUCKETS, np.uint64)

    def percentile_ns(self, q: float) -> int | None:
        """Of the durations of steps; None while there are none."""
        return percentile(self._hist, q)

    def usual(self) -> int | None:
        """The content of the steady state: what most steps of the second half have."""
        late: Counter[int] = Counter()
        for run in self.runs:
            late[run.what] += max(0, run.last - max(run.first - 1, self.count // 2))
        return max(late, key=lambda what: (late[what], self.times.get(what, 0), -what), default=None)

    def add(self, rows: Array, ends: Array) -> None:
        """The steps that end at CUT rows `ends` of the tokens `rows`, the first right behind the one before."""
        before = ends["at_ns"][0] if self.last_ns is None else self.last_ns
        from_ns = np.concatenate(([before], ends["at_ns"][:-1]))
        lasted = ends["at_ns"] - from_ns
        known = lasted if self.last_ns is not None else lasted[1:]
        if len(known):
            self._hist += np.bincount(buckets(known), minlength=BUCKETS).astype(np.uint64)
        begins = np.concatenate(([0], ends["row"][:-1] + 1))
        self._name(rows, ends, begins)
        self._slowest(rows, ends, begins, lasted)
        self._extend(ends["what"], from_ns, ends["at_ns"])
        self.count += len(ends)
        self.first_ns = int(ends["at_ns"][0]) if self.first_ns is None else self.first_ns
        self.last_ns = int(ends["at_ns"][-1])

    def _name(self, rows: Array, ends: Array, begins: Array) -> None:
        """What new contents stand for; contents that find no room become OTHER."""
        values, first, counts = np.unique(ends["what"], return_index=True, return_counts=True)
        for value, at, many in zip(values.tolist(), first.tolist(), counts.tolist(), strict=True):
            if value not in self.kinds:
                if len(self.kinds) >= MOST_KINDS:
                    ends["what"][ends["what"] == np.uint64(value)] = OTHER
                    self.left_out += many
                    continue
                inside = rows[begins[at] : ends["row"][at] + 1]
                keys, times = np.unique(inside["key"][inside["kind"] == NCCL], return_counts=True)
                self.kinds[value] = dict(zip(keys.tolist(), times.tolist(), strict=True))
            self.times[value] = self.times.get(value, 0) + many

    def _extend(self, what: Array, from_ns: Array, to_ns: Array) -> None:
        heads = np.flatnonzero(np.concatenate(([True], what[1:] != what[:-1])))
        lasts = np.concatenate((heads[1:], [len(what)])) - 1
        for head, last in zip(heads.tolist(), lasts.tolist(), strict=True):
            value = int(what[head])
            run = Run(value, self.count + head + 1, self.count + last + 1, int(from_ns[head]), int(to_ns[last]))
            if self.runs and self.runs[-1].what == value and self.runs[-1].last == run.first - 1:
                self.runs[-1] = self.runs[-1]._replace(last=run.last, to_ns=run.to_ns)
            elif len(self.runs) < MOST_RUNS:
                self.runs.append(run)
            else:
                self.left_out += run.last - run.first + 1

    def _slowest(self, rows: Array, ends: Array, begins: Array, lasted: Array) -> None:
        if len(ends) < LEAST_BATCH:
            return
        usual = int(np.median(lasted[1:]))
        floor = self.slow[-1].ns if len(self.slow) == MOST_SLOW else 0
        odd = np.flatnonzero((lasted > SLOW_TIMES * usual) & (lasted > floor))
        odd = odd[np.argsort(-lasted[odd], kind="stable")][:MOST_SLOW]
        if not len(odd):
            return
        waits = rows["kind"] != NCCL
        usual_of: dict[int, int] = {}
        for key in np.unique(rows["key"][waits]).tolist():
            mine = rows["ns"][waits & (rows["key"] == np.uint64(key))]
            usual_of[key] = int(np.median(mine)) if 2 * len(mine) >= len(ends) else 0
        for at in odd.tolist():
            inside = rows[begins[at] : ends["row"][at] + 1]
            self.slow.append(self._why(inside[inside["kind"] != NCCL], at, ends, int(lasted[at]), usual, usual_of))
        self.slow.sort(key=lambda one: (-one.ns, one.step))
        del self.slow[MOST_SLOW:]

    def _why(
        self, waits: Array, at: int, ends: Array, ns: int, usual_ns: int, usual_of: dict[int, int]
    ) -> Slow:  # fmt: skip
        step, at_ns, what = self.count + at + 1, int(ends["at_ns"][at]), int(ends["what"][at])
        longer = [
            (int(ns) - usual_of[int(key)], int(ns), int(key)) for key, ns in zip(waits["key"], waits["ns"], strict=True)
        ]
        more, wait_ns, key = max(longer, default=(0, 0, 0))
        if 2 * more < ns - usual_ns:
            return Slow(ns, step, at_ns, usual_ns, None, 0, 0, what)
        return Slow(ns, step, at_ns, usual_ns, key, wait_ns, usual_of[key], what)

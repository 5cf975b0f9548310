"""Collectives that every rank has issued by now: who came last by how much, and what they agreed on.

One pass a tick over the communicators that moved, in columns.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.state import State
from stallscope.wire.columns import BUCKETS, percentile

__all__ = ["CLEAR_NS", "FLOOR_NS", "TIMES_P99", "WARM_UP", "Completed", "Late", "Odd", "buckets"]

Array = NDArray[Any]
FLOOR_NS = 10_000_000
TIMES_P99 = 5
ENOUGH = 20
WARM_UP = 32  # operations of a communicator that say nothing of its later ones
CLEAR_NS = 200_000
MAX_BASELINES = 8192
_FIRST_EXPONENT = 7


class Late(NamedTuple):
    """One collective for which a rank came late: `since_ns` others waited, `at_ns` it came."""

    comm: int
    rank: int
    number: int
    since_ns: int
    at_ns: int
    signature: int


class Odd(NamedTuple):
    """A collective that ranks called differently: signature of each rank."""

    comm: int
    number: int
    at_ns: int
    signatures: list[int]


class Completed:
    """Waits of each operation, and what stands out.

    Attributes:
        late: found by the last step; odd: likewise, calls that differ among ranks.
        calls: by (communicator, signature): how many; waits_ns: for late ranks.
        last: by communicator: (rank that came last, by how much later than the one before it, when, whether
            its host waited for its GPU meanwhile), newest last, without episodes of hosts; recent: with them, three
            columns.
    """

    KEPT = 256
    KEPT_RECENT = 1024  # episodes look back half a second

    def __init__(self, state: State) -> None:
        self._state = state
        self._upto: dict[int, int] = {}
        self._previous_ns: dict[int, int] = {}
        self._baselines: dict[tuple[int, int], Array] = {}
        self._skipped = 0
        self.late: list[Late] = []
        self.odd: list[Odd] = []
        self.calls: dict[tuple[int, int], int] = defaultdict(int)
        self.waits_ns: dict[tuple[int, int], int] = defaultdict(int)
        self.last: dict[int, Array] = {}
        self.recent: dict[int, Array] = {}
        self.cut = False

    def step(self) -> None:
        """Look at what came since the last step."""
        arrivals = self._state.operations.arrivals
        self.late, self.odd = [], []
        lowest = arrivals.lowest()
        for comm in range(arrivals.comms):
            upto = int(lowest[comm])
            if comm not in self._upto:
                self._upto[comm] = self._start(comm)
            if upto > self._upto[comm] and upto < 1 << 60 and arrivals.trusted[comm]:
                self._look(comm, self._upto[comm], upto)
                self._upto[comm] = upto

    def _start(self, comm: int) -> int:
        """The first number that every rank's record can have."""
        places = [p for i in self._state.operations.issuers.values() for p in i.places.values() if p.comm == comm]
        return max((place.base or 0 for place in places), default=0)

    def _look(self, comm: int, low: int, high: int) -> None:
        arrivals = self._state.operations.arrivals
        times, signatures = arrivals.history(comm)
        if high - low > times.shape[1]:
            low, self.cut = high - times.shape[1], True
        places = np.arange(low, high) % times.shape[1]
        ranks = np.flatnonzero(arrivals.present[arrivals.rank_rows(comm)])
        came, called = times[ranks][:, places], signatures[ranks][:, places]
        known = (came > 0).all(axis=0)
        if len(ranks) >= 2:
            self._measure(comm, low, ranks, came[:, known], called[:, known], np.flatnonzero(known))
        seen = (came > 0).any(axis=0)  # not what was before the attach, nor what was lost of all
        told = called[(came > 0).argmax(axis=0), np.arange(high - low)][seen]
        for value, count in zip(*(x.tolist() for x in np.unique(told, return_counts=True)), strict=True):
            if (comm, value) in self.calls or len(self.calls) < MAX_BASELINES:
                self.calls[comm, value] += count

    def _measure(self, comm: int, low: int, ranks: Array, came: Array, called: Array, offsets: Array) -> None:
        if not came.shape[1]:
            return
        ordered = np.sort(came, axis=0)
        last = ordered[-1]
        previous = np.concatenate(([self._previous_ns.get(comm, 0)], last[:-1]))
        self._previous_ns[comm] = int(last[-1])
        half = np.maximum(ordered[(len(ranks) - 1) // 2], previous)
        late_ns = np.maximum(0, last - half)
        who = ranks[came.argmax(axis=0)]
        first_value = called[0]
        differs = (called != first_value).any(axis=0)
        for at in np.flatnonzero(differs)[:64].tolist():
            self.odd.append(Odd(comm, low + int(offsets[at]), int(last[at]), called[:, at].tolist()))
        is_late = np.zeros(len(last), bool)
        is_usual = low + offsets >= self._start(comm) + WARM_UP
        for value in np.unique(first_value).tolist():
            mine = first_value == value
            is_late |= mine & (late_ns > self.threshold_ns(comm, value))
            self._add(comm, value, late_ns[mine & ~is_late & is_usual])
            if (comm, value) in self.waits_ns or len(self.waits_ns) < MAX_BASELINES:
                self.waits_ns[comm, value] += int(late_ns[mine].sum())
        for at in np.flatnonzero(is_late).tolist():
            since = max(int(ordered[0, at]), int(previous[at]))
            self.late.append(
                Late(comm, int(who[at]), low + int(offsets[at]), since, int(last[at]), int(first_value[at]))
            )
        fresh = np.stack([who, np.maximum(0, last - np.maximum(ordered[-2], previous)), last], axis=1)
        # A host that was elsewhere for long made an episode; one that waits for its slow GPU does so again and again.
        held = self._held(comm, fresh)
        self._remember(self.last, comm, held[is_usual & (~is_late | (held[:, 3] == 1))], self.KEPT)
        self._remember(self.recent, comm, fresh, self.KEPT_RECENT)

    def _held(self, comm: int, rows: Array) -> Array:
        """The same with a fourth column: whether the last rank's host waited for its GPU most of that time."""
        held = np.zeros(len(rows), np.int64)
        issuers = {
            p.rank: i for i in self._state.operations.issuers.values() for p in i.places.values() if p.comm == comm
        }
        for at in np.flatnonzero(rows[:, 1] >= CLEAR_NS).tolist():
            who, margin, came = rows[at].tolist()
            issuer = issuers.get(who)
            if issuer is not None:
                held[at] = 2 * issuer.waited_ns(came - margin, came) >= margin
        return np.concatenate([rows, held[:, None]], axis=1)

    def _remember(self, table: dict[int, Array], comm: int, fresh: Array, most: int) -> None:
        kept = table.get(comm)
        joined = fresh if kept is None else np.concatenate([kept, fresh])
        table[comm] = joined[-most:]

    def threshold_ns(self, comm: int, signature: int) -> int:
        """A wait beyond this is an episode."""
        p99 = self.p99_ns(comm, signature)
        return max(FLOOR_NS, TIMES_P99 * (p99 or 0))

    def p99_ns(self, comm: int, signature: int) -> int | None:
        """99th percentile of the waits that were no episodes; None while there were few."""
        hist = self._baselines.get((comm, signature))
        return percentile(hist, 0.99) if hist is not None and int(hist.sum()) >= ENOUGH else None

    def slowest_p99_ns(self, comm: int) -> int | None:
        """The largest of a communicator's operations' `p99_ns`."""
        found = [self.p99_ns(*key) for key in self._baselines if key[0] == comm]
        return max((p99 for p99 in found if p99 is not None), default=None)

    def _add(self, comm: int, signature: int, waits_ns: Array) -> None:
        key = (comm, signature)
        if key not in self._baselines:
            if len(self._baselines) >= MAX_BASELINES:
                self._skipped += 1
                return
            self._baselines[key] = np.zeros(BUCKETS, np.uint64)
        self._baselines[key] += np.bincount(buckets(waits_ns), minlength=BUCKETS).astype(np.uint64)


def buckets(waits_ns: Array) -> Array:
    """Index in the histogram of native/wire.h: quarters of an octave from 2^7 ns on."""
    value = np.maximum(waits_ns.astype(np.float64), 1.0)
    exponent = np.floor(np.log2(value)).astype(np.int64)
    quarter = np.floor((value / np.exp2(exponent) - 1) * 4).astype(np.int64)
    found: Array = np.clip((exponent - _FIRST_EXPONENT) * 4 + quarter, 0, BUCKETS - 1)
    return found

"""Waits for a late rank, one by one, also those that end by themselves."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from stallscope.aggregate.issuer import Issuer
from stallscope.aggregate.state import State
from stallscope.diagnose.completed import Completed, Late
from stallscope.diagnose.incident import Episode, Longest, Place

__all__ = ["Episodes"]

KEPT = 8
LONGEST_CHAIN = 4
MAX_ROWS = 4096
MAX_DURATIONS = 100_000
SETTLED_NS = 500_000_000  # by then the waits that caused a wait have been found too
BLOCKS = 64  # of a process, the newest
STACK_FROM_NS = 2_000_000_000


@dataclass
class _Row:
    durations: list[int] = field(default_factory=list)
    count: int = 0
    total_ns: int = 0
    max_ns: int = 0
    longest: list[Longest] = field(default_factory=list)


@dataclass
class _Block:
    """A time in which a rank was waited for; what overlaps it belongs to it, in whatever communicator."""

    start_ns: int
    end_ns: int

    def shared_ns(self, late: Late) -> int:
        """How much of that wait lies in it; negative where they are apart."""
        return min(self.end_ns, late.at_ns) - max(self.start_ns, late.since_ns)


class Episodes:
    """Groups the late collectives of `Completed` into blocks, by rank at fault."""

    def __init__(self, state: State, completed: Completed) -> None:
        self._state, self._completed = state, completed
        self._rows: dict[tuple[str, int], _Row] = {}
        self._blocks: dict[int, deque[_Block]] = {}
        self._held: list[Late] = []
        self.turned_away = 0

    def step(self, now: int) -> None:
        """Take what the last step of `Completed` found, and charge what is old enough."""
        self._held += self._completed.late
        self._charge_up_to(now - SETTLED_NS)

    def finish(self) -> None:
        """Charge the rest: nothing more will come."""
        self._charge_up_to(None)

    def _charge_up_to(self, end_ns: int | None) -> None:
        """In the order in which they ended: what a rank is charged with depends on what others are."""
        ripe = [late for late in self._held if end_ns is None or late.at_ns <= end_ns]
        self._held = [late for late in self._held if end_ns is not None and late.at_ns > end_ns]
        for late in sorted(ripe, key=lambda late: (late.at_ns, late.comm)):
            self._charge(late)

    def _charge(self, late: Late) -> None:
        """A rank that came late because it waited for another one passes the blame on."""
        for _ in range(LONGEST_CHAIN):
            issuer = self._issuer(late)
            if issuer is None:
                return
            half = (late.at_ns - late.since_ns) // 2
            if issuer.waited_ns(late.since_ns, late.at_ns) < half:
                return self._take(issuer, late)
            cause = self._cause(issuer, late, half)
            if cause is None:
                # What it waited for was no collective: a send or receive of one that was itself late, or its own GPU.
                return None if self._overlaps(issuer, late, half) else self._take(issuer, late)
            late = cause
        return None

    def _overlaps(self, issuer: Issuer, late: Late, least_ns: int) -> bool:
        """Whether another rank's absence fills that time."""
        return any(
            block.shared_ns(late) >= least_ns
            for proc, blocks in self._blocks.items()
            if proc != issuer.process.proc
            for block in blocks
        )

    def _issuer(self, late: Late) -> Issuer | None:
        for issuer in self._state.operations.issuers.values():
            if any(p.comm == late.comm and p.rank == late.rank for p in issuer.places.values()):
                return issuer
        return None

    def _cause(self, issuer: Issuer, late: Late, half: int) -> Late | None:
        """The operation, and its last rank, for which this rank's host itself waited most of that time."""
        found: list[tuple[int, Late]] = []
        for place in issuer.places.values():
            rows = self._completed.recent.get(place.comm)
            if rows is None:
                continue
            here = rows[(rows[:, 0] != place.rank) & (rows[:, 2] > late.since_ns + half) & (rows[:, 2] <= late.at_ns)]
            found += [
                (int(margin), late._replace(comm=place.comm, rank=int(rank), at_ns=int(at_ns)))
                for rank, margin, at_ns in here[here[:, 1] >= half // 2].tolist()
            ]
        return max(found, key=lambda pair: pair[0])[1] if found else None

    def _take(self, issuer: Issuer, late: Late) -> None:
        proc = issuer.process.proc
        blocks = self._blocks.setdefault(proc, deque(maxlen=BLOCKS))
        if any(2 * block.shared_ns(late) >= late.at_ns - late.since_ns for block in blocks):
            return  # other communicators, and later operations, that waited for the same absence
        blocks.append(_Block(late.since_ns, late.at_ns))
        key = (self._state.operations.key_of[late.comm], proc)
        if key not in self._rows and len(self._rows) >= MAX_ROWS:
            self.turned_away += 1
            return
        row = self._rows.setdefault(key, _Row())
        duration = late.at_ns - late.since_ns
        row.count += 1
        row.total_ns += duration
        row.max_ns = max(row.max_ns, duration)
        if len(row.durations) < MAX_DURATIONS:
            row.durations.append(duration)
        row.longest.append(self._longest(proc, late, duration))
        row.longest.sort(key=lambda item: -item.duration_ns)
        del row.longest[KEPT:]

    def _longest(self, proc: int, late: Late, duration_ns: int) -> Longest:
        name = self._state.operations.meaning.get(late.signature, ("unknown",))[0]
        stack = None
        if duration_ns >= STACK_FROM_NS:
            found = self._state.hosts.stack_during(proc, late.since_ns, late.at_ns)
            stack = found.frames if found else None
        return Longest(late.since_ns, duration_ns, name, late.number, stack)

    def rows(self) -> list[Episode]:
        """By communicator and rank at fault, the largest total first."""
        found = [self._episode(comm, proc, row) for (comm, proc), row in self._rows.items()]
        return sorted(found, key=lambda e: (-e.total_ns, e.comm, e.place.proc))

    def _episode(self, comm: str, proc: int, row: _Row) -> Episode:
        process = self._state.processes.table[proc]
        places = self._state.operations.issuers[proc].places.values()
        rank = next((p.rank for p in places if p.key == comm), None)
        place = Place(rank, process.global_rank, proc, process.pid)
        p99 = int(np.percentile(np.array(row.durations), 99, method="inverted_cdf"))
        return Episode(comm, place, row.count, row.total_ns, row.max_ns, p99, row.longest)

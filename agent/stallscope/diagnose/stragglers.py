"""A rank that is last again and again, by its own time, without ever blocking anybody for long."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.state import State
from stallscope.diagnose.completed import Completed

__all__ = ["Straggler", "stragglers"]

ENOUGH = 100
SIGMAS = 6.0
LEAST_SHARE = 0.5
LEAST_OWN_NS = 500_000


class Straggler(NamedTuple):
    """A rank that came last in `percent` of the operations on a communicator, then by `own_ns` (the median)."""

    comm: int
    rank: int
    proc: int
    percent: int
    own_ns: int
    operations: int


def stragglers(state: State, completed: Completed) -> list[Straggler]:
    """One a process at most: where it is latest. Stages of a pipeline are not compared with each other."""
    owners = _owners(state)
    staged = _staged(state)
    found: dict[int, Straggler] = {}
    for comm, rows in completed.last.items():
        one = _of(comm, rows, int(state.operations.arrivals.size[comm]))
        if one is None or comm in staged or (comm, one.rank) not in owners:
            continue
        one = one._replace(proc=owners[comm, one.rank])
        if one.proc not in found or found[one.proc].own_ns < one.own_ns:
            found[one.proc] = one
    return _without_victims(list(found.values()), owners)


def _of(comm: int, rows: NDArray[Any], nranks: int) -> Straggler | None:
    total = len(rows)
    if total < ENOUGH or nranks < 2:
        return None
    ranks, counts = np.unique(rows[:, 0], return_counts=True)
    rank, count = int(ranks[counts.argmax()]), int(counts.max())
    fair = 1 / nranks
    sigmas = (count - total * fair) / math.sqrt(total * fair * (1 - fair))
    own_ns = int(np.median(rows[rows[:, 0] == rank, 1]))
    if sigmas < SIGMAS or count < LEAST_SHARE * total or own_ns < LEAST_OWN_NS:
        return None
    return Straggler(comm, rank, -1, round(100 * count / total), own_ns, total)


def _owners(state: State) -> dict[tuple[int, int], int]:
    issuers = state.operations.issuers.values()
    return {(p.comm, p.rank): i.process.proc for i in issuers for p in i.places.values() if p.comm >= 0}


def _staged(state: State) -> set[int]:
    """Communicators of which some members send to each other: their ranks do different work."""
    pairs: set[tuple[int, int]] = set()
    owners = _owners(state)
    for issuer in state.operations.issuers.values():
        for place in issuer.places.values():
            for _, peer in place.peers:
                other = owners.get((place.comm, peer))
                if other is not None:
                    pairs.add((issuer.process.proc, other))
    members: dict[int, set[int]] = {}
    for (comm, _), proc in owners.items():
        members.setdefault(comm, set()).add(proc)
    return {comm for comm, procs in members.items() if any(a in procs and b in procs for a, b in pairs)}


def _without_victims(found: list[Straggler], owners: dict[tuple[int, int], int]) -> list[Straggler]:
    """A rank that works with a later one is late because of it: it is left out."""
    comms_of: dict[int, set[int]] = {}
    for (comm, _), proc in owners.items():
        comms_of.setdefault(proc, set()).add(comm)
    later = sorted(found, key=lambda s: (-s.own_ns, s.proc))
    return [one for i, one in enumerate(later) if not any(other.comm in comms_of[one.proc] for other in later[:i])]

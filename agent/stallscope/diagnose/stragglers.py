"""A rank that is last again and again, by its own time, without ever blocking anybody for long."""

from __future__ import annotations

import math
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.state import State
from stallscope.diagnose.begun import Begun
from stallscope.diagnose.completed import CLEAR_NS, Completed

__all__ = ["Straggler", "colleagues", "stragglers"]

WINDOWS = (48, 96, 256)
ENOUGH = 25
LEAST_OWN_NS = 1_000_000
SIGMAS = 5.0  # by chance once in two million windows
LEAST_TIME_SHARE = 0.75
LEAST_COST = 0.08  # of the time
POWER_WINDOW_NS = 2_200_000_000
POWER_MARGIN = 1.1
LEAST_SAMPLES = 1
OFTEN = 1.5
FRESH_NS = 1_000_000_000


class Straggler(NamedTuple):
    """A rank that came last in `percent` of the newest operations that had a clear last one, then by `own_ns` (median).

    others: ranks whose delay can't be told from its own; empty where it is the only one. cost: the share of the time
    that it cost the others.
    """

    comm: int
    rank: int
    proc: int
    percent: int
    own_ns: int
    operations: int
    cost: float
    others: tuple[int, ...] = ()
    why: str = ""
    evidence: str = "api"


Owners = dict[tuple[int, int], int]


def stragglers(state: State, completed: Completed, begun: Begun) -> list[Straggler]:
    """One for each set of ranks that keep each other waiting. Stages of a pipeline are not compared with each other.

    Of a communicator all of whose GPUs have a witness, their begins count, else the calls of the hosts.
    """
    owners = _owners(state)
    tied = _tied(state, owners)
    found: list[Straggler] = []
    for comm in sorted(completed.last.keys() | begun.last.keys()):
        one = _on(state, comm, completed, begun)
        if one is not None and not _is_staged(comm, owners, tied) and (comm, one.rank) in owners:
            found.append(one._replace(proc=owners[comm, one.rank]))
    roots = (
        _root(state, completed, group, together, owners) for group, together in _groups(state, found, owners, tied)
    )
    return [root for root in roots if root is not None]


def colleagues(state: State, proc: int) -> set[int]:
    """All processes that are connected with one by communicators, and it itself."""
    owners = _owners(state)
    groups = [_members(comm, owners) for comm in {comm for comm, _ in owners}]
    found, grows = {proc}, True
    while grows:
        near = found.union(*(group for group in groups if group & found))
        grows, found = len(near) > len(found), near
    return found


def _on(state: State, comm: int, completed: Completed, begun: Begun) -> Straggler | None:
    """GPUs that begin together are not late, whatever their hosts do meanwhile."""
    gpu, host = begun.last.get(comm), completed.last.get(comm)
    newest = int(host[-1, 2]) if host is not None and len(host) else 0
    if gpu is None or len(gpu) < ENOUGH or int(gpu[-1, 2]) < newest - FRESH_NS:
        return _by_host(state, comm, completed)
    one = _of(comm, gpu, int(state.operations.arrivals.size[comm]))
    return None if one is None else one._replace(evidence="gpu_start")


def _by_host(state: State, comm: int, completed: Completed) -> Straggler | None:
    rows = completed.last.get(comm)
    if rows is None:
        return None
    return _of(comm, _meaningful(state, comm, rows), int(state.operations.arrivals.size[comm]))


def _meaningful(state: State, comm: int, rows: NDArray[Any]) -> NDArray[Any]:
    """Where hosts run ahead of their GPUs, one that issues late delays nobody, unless it waited for its GPU."""
    since = int(rows[0, 2]) if len(rows) else 0
    for issuer in state.operations.issuers.values():
        if any(place.comm == comm for place in issuer.places.values()):
            waits = issuer.waits.newest(len(issuer.waits))
            if not (waits["ends"] & (waits["ts_ns"] >= since)).any():
                kept: NDArray[Any] = rows[(rows[:, 3] == 1) | (rows[:, 1] < CLEAR_NS)]
                return kept
    return rows


def _of(comm: int, rows: NDArray[Any], nranks: int) -> Straggler | None:
    """Looked for in the newest few operations first: then it is told early."""
    found = (_in_window(comm, rows[-newest:], nranks) for newest in WINDOWS)
    return next((one for one in found if one is not None), None)


def _in_window(comm: int, rows: NDArray[Any], nranks: int) -> Straggler | None:
    clear = rows[rows[:, 1] >= CLEAR_NS]
    total = len(clear)
    if total < ENOUGH or nranks < 2:
        return None
    # A pause of another kind (a checkpoint) must not outweigh a hundred small delays.
    margins = np.minimum(clear[:, 1], 2 * np.median(clear[:, 1]))
    times = np.bincount(clear[:, 0], weights=margins, minlength=nranks)
    rank = int(times.argmax())
    mine = clear[clear[:, 0] == rank, 1]
    own_ns, fair = int(np.median(mine)), 1 / nranks
    sigmas = (len(mine) - total * fair) / math.sqrt(total * fair * (1 - fair))
    span_ns = int(rows[-1, 2] - rows[0, 2])
    if sigmas < SIGMAS or times[rank] < LEAST_TIME_SHARE * times.sum():
        return None
    cost = float(times[rank]) / span_ns if span_ns else 0.0
    if own_ns < LEAST_OWN_NS or cost < LEAST_COST:
        return None
    return Straggler(comm, rank, -1, round(100 * len(mine) / total), own_ns, total, cost)


def _owners(state: State) -> Owners:
    issuers = state.operations.issuers.values()
    return {(p.comm, p.rank): i.process.proc for i in issuers for p in i.places.values() if p.comm >= 0}


def _tied(state: State, owners: Owners) -> set[frozenset[int]]:
    """Pairs of processes that send to each other."""
    pairs = set()
    for issuer in state.operations.issuers.values():
        for place in issuer.places.values():
            for _, peer in place.peers:
                other = owners.get((place.comm, peer))
                if other is not None:
                    pairs.add(frozenset((issuer.process.proc, other)))
    return pairs


def _members(comm: int, owners: Owners) -> set[int]:
    return {proc for (index, _), proc in owners.items() if index == comm}


def _is_staged(comm: int, owners: Owners, tied: set[frozenset[int]]) -> bool:
    """Whether members send to each other: then they do different work, and one is last by design."""
    members = _members(comm, owners)
    return any(pair <= members for pair in tied)


def _groups(
    state: State, found: list[Straggler], owners: Owners, tied: set[frozenset[int]]
) -> list[tuple[list[Straggler], set[int]]]:
    """Late ranks by the ranks that they work with so closely that these are late with them, flagged or not."""
    groups: list[tuple[list[Straggler], set[int]]] = []
    for one in sorted(found, key=lambda s: (-s.own_ns, s.proc)):
        together = _together(state, one, owners, tied)
        near = [group for group in groups if group[1] & together]
        merged = ([one, *(other for group in near for other in group[0])], together.union(*(g[1] for g in near)))
        groups = [group for group in groups if group not in near] + [merged]
    return groups


def _together(state: State, one: Straggler, owners: Owners, tied: set[frozenset[int]]) -> set[int]:
    """A replica: ranks that meet more often than where this one is late, or send to each other."""
    lowest = state.operations.arrivals.lowest()
    often = {comm for comm, _ in owners if lowest[comm] > OFTEN * lowest[one.comm]}
    bonds = [_members(comm, owners) for comm in sorted(often)] + [set(pair) for pair in tied]
    together, grows = {one.proc}, True
    while grows:
        near = together.union(*(bond for bond in bonds if bond & together))
        grows, together = len(near) > len(together), near
    return together


def _root(
    state: State, completed: Completed, group: list[Straggler], together: set[int], owners: Owners
) -> Straggler | None:
    """Who of a replica slows it: who is last where its ranks are among themselves, else whose GPU works most.

    None: it is one that has not been seen to be late long enough.
    """
    inner = [one for one in group if len(_members(one.comm, owners) & together) > 1]
    best = max(inner or group, key=lambda s: (s.own_ns, -s.proc))
    rest = together - {best.proc}
    if inner or not rest:
        return best
    if _is_held_up(completed, best, together, owners):
        return None
    hardest = _hardest(state, together)
    if hardest is None:
        return best._replace(others=tuple(sorted(rest)), why="ranks that wait for each other are late together")
    chosen = [one for one in group if one.proc == hardest] or _often_late(state, completed, hardest, owners)
    why = "of the ranks that are late together, its GPU draws the most power"
    return max(chosen, key=lambda s: s.own_ns)._replace(why=why) if chosen else None


def _is_held_up(completed: Completed, one: Straggler, together: set[int], owners: Owners) -> bool:
    """Whether another one that it works with made it wait for as long as it was late: by pauses that are episodes."""
    late = completed.last[one.comm][-one.operations :] if one.comm in completed.last else None
    if late is None or not len(late):
        return False
    since, own_ns = int(late[0, 2]) - int(late[0, 1]), one.own_ns * one.operations
    for comm, rows in completed.recent.items():
        if len(_members(comm, owners) & together) < 2:
            continue
        fresh = rows[rows[:, 2] >= since]
        for rank in np.unique(fresh[:, 0]).tolist():
            lost_ns = int(fresh[fresh[:, 0] == rank, 1].sum())
            if owners.get((comm, rank)) in together - {one.proc} and 2 * lost_ns >= own_ns:
                return True
    return False


def _often_late(state: State, completed: Completed, proc: int, owners: Owners) -> list[Straggler]:
    """Where a rank is last, with the waits for it that were long enough to be episodes."""
    found = []
    for (comm, rank), owner in owners.items():
        if owner == proc and comm in completed.recent:
            one = _of(comm, completed.recent[comm], int(state.operations.arrivals.size[comm]))
            found += [one._replace(proc=proc)] if one is not None and one.rank == rank else []
    return found


def _hardest(state: State, procs: set[int]) -> int | None:
    """The process whose GPU has clearly drawn the most power lately: the others wait in NCCL, which takes less."""
    since = state.now_ns - POWER_WINDOW_NS
    powers: list[tuple[float, int]] = []
    for proc in procs:
        pid = state.processes.table[proc].pid
        samples = [s.power_mw for gpu in state.witnesses.gpus.values() for s in gpu.samples
                   if s.at_ns >= since and pid in s.pids and s.power_mw is not None]  # fmt: skip
        if len(samples) >= LEAST_SAMPLES:
            powers.append((median(samples), proc))
    powers.sort(reverse=True)
    if len(powers) < len(procs) or len(powers) < 2 or powers[0][0] < POWER_MARGIN * powers[1][0]:
        return None
    return powers[0][1]

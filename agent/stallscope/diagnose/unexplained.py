"""All have called, nothing is missing, and still nothing moves: a GPU, a link, or a host inside NCCL."""

from __future__ import annotations

from stallscope.diagnose.graph import LIFE_CYCLE, is_leaving
from stallscope.diagnose.hosts import is_waiting
from stallscope.diagnose.replay import Replay
from stallscope.diagnose.verdict import Verdict
from stallscope.diagnose.view import DEAD, FINISHED, IN_API, IN_SYNC, USER, Key, Rank

__all__ = ["all_arrived", "odd_host", "own_work", "stuck_gpu"]


def _stuck(replay: Replay) -> list[int]:
    return [number for number, rank in enumerate(replay.view.ranks) if is_waiting(rank)]


def _standing(replay: Replay) -> dict[int, list[int]]:
    """By waiting rank: what it issued and all the others too, and is not known to be complete, in order of issue."""
    return {rank: sorted(replay.unproven(rank)) for rank in _stuck(replay)}


def stuck_gpu(replay: Replay) -> list[Verdict]:
    """Where it is known what began on the GPU: the ranks on which an operation did not begin that all others began."""
    if all(op.started is None for rank in replay.view.ranks for op in reversed(rank.operations)):
        return _last_one(replay)
    standing = _standing(replay)
    keys = dict.fromkeys(replay.op(rank, index).key for rank, places in standing.items() for index in places)
    found: dict[int, Verdict] = {}
    for key in keys:
        for rank in _not_begun(replay, key):
            found.setdefault(rank, _gpu_verdict(replay, rank, key))
    return list(found.values()) or _last_one(replay)


def own_work(rank: Rank) -> str:
    """What to say of a host that waits while all the operations it issued are done."""
    return f"waits in {rank.api or 'a synchronize call'} for its own GPU work"


def _last_one(replay: Replay) -> list[Verdict]:
    """Those that wait for their GPU with all their operations done, while the others have finished as they should."""
    ranks = replay.view.ranks
    found = []
    for number in _stuck(replay):
        rank, comms = ranks[number], [c for c, members in enumerate(replay.sure) if number in members]
        near = {member for comm in comms for member in replay.sure[comm]} - {number}
        is_alone = near and all(ranks[member].state == FINISHED for member in near)
        if is_alone and rank.state == IN_SYNC and rank.operations and not _open(replay, number):
            since_ns = replay.view.now_ns if rank.since_ns is None else rank.since_ns
            found.append(
                Verdict("GPU_STUCK", (number,), None, None, since_ns, (), (), "completion", "medium", own_work(rank))
            )
    return found


def _not_begun(replay: Replay, key: Key) -> list[int]:
    here = replay.at[key]
    began = {rank: replay.has_begun(rank, index) for rank, index in here.items()}
    # A GPU runs nothing more of what a process called that has ended: that is the process's end.
    late = [rank for rank, has in began.items() if has is False and replay.view.ranks[rank].state != DEAD]
    if not 0 < len(late) < len(began) or None in began.values():
        return []
    return [rank for rank in late if _is_first(replay, rank, here[rank])]


def _is_first(replay: Replay, rank: int, index: int) -> bool:
    """Whether nothing that it issued earlier is unfinished."""
    return min(_open(replay, rank), default=-1) == index and not replay.is_behind_unknown(rank, index)


def _gpu_verdict(replay: Replay, rank: int, key: Key) -> Verdict:
    since_ns = min(replay.op(r, i).enter_ns for r, i in replay.at[key].items())
    victims = tuple(r for r in _stuck(replay) if r != rank)
    why = f"its GPU has not begun {replay.op(rank, replay.at[key][rank]).name}, which the others have"
    cascade = tuple(c for c in _comms_of(replay, victims) if c != key[0])
    return Verdict("GPU_STUCK", (rank,), key, int(key[0]), since_ns, victims, cascade, "gpu_start", "high", why)


def _comms_of(replay: Replay, ranks: tuple[int, ...]) -> list[int]:
    """Those in which the ranks have something unfinished."""
    return sorted({int(replay.op(rank, i).key[0]) for rank in ranks for i in _open(replay, rank)})


def _open(replay: Replay, rank: int) -> list[int]:
    return [*replay.unproven(rank), *replay.heads(rank)]


def odd_host(replay: Replay) -> list[Verdict]:
    """A rank that ended, or that is inside a call which waits for nobody, with operations that did not run any more."""
    found = []
    stuck = _stuck(replay)
    inside = [rank for rank in stuck if replay.view.ranks[rank].state == IN_API]
    for number, rank in enumerate(replay.view.ranks):
        api = rank.api or ""
        if rank.state == DEAD and stuck:
            found.append(_odd_verdict(replay, "DIED", number, "has ended; its GPU runs no more of what it called"))
        elif is_leaving(rank) or (rank.state == IN_API and api.startswith(LIFE_CYCLE) and len(inside) == 1):
            found.append(_odd_verdict(replay, "IN_API", number, f"is inside {api}, which has not returned"))
        elif inside == [number] and len(stuck) > 1 and _is_behind(replay, number):
            found.append(_odd_verdict(replay, "IN_API", number, f"is inside {api}, in which nobody is missing"))
    found = [verdict for verdict in found if verdict.victims]
    deaths = [v for v in found if v.kind == "DIED"]
    if len(deaths) > 1:
        first = min(deaths, key=lambda v: (replay.view.ranks[v.culprits[0]].since_ns or 0, v.culprits))
        return [first]
    return found


def _is_behind(replay: Replay, rank: int) -> bool:
    """Whether its call has not returned, and that of another member of the operation has."""
    for index in reversed(range(len(replay.view.ranks[rank].operations))):
        op = replay.op(rank, index)
        if op.returned:
            return False
        others = replay.at.get(op.key, {}).items()
        if any(replay.op(r, i).returned for r, i in others if r != rank):
            return True
    return False


def _odd_verdict(replay: Replay, kind: str, culprit: int, why: str) -> Verdict:
    comms = [c for c, members in enumerate(replay.sure) if culprit in members]
    near = {rank for comm in comms for rank in replay.sure[comm]}
    victims = [rank for rank in _stuck(replay) if rank != culprit and rank in near]
    key = _first_open(replay, victims, [c for c in comms if _in_call(replay, culprit) in (None, c)] or comms)
    comm = int(key[0]) if key else None
    cascade = tuple(c for c in _comms_of(replay, tuple(victims)) if c != comm)
    confidence = "medium" if key else "low"
    since_ns = _since_ns(replay, victims)
    return Verdict(kind, (culprit,), key, comm, since_ns, tuple(victims), cascade, "api", confidence, why)


def _in_call(replay: Replay, rank: int) -> int | None:
    return replay.view.ranks[rank].in_comm


def _first_open(replay: Replay, ranks: list[int], comms: list[int]) -> Key | None:
    """The first operation that is not known to be complete, on the smallest of some communicators.

    Hosts that are far ahead have proved little: the first one of all is often long done, and on a large communicator,
    which others come to only after their smaller ones.
    """
    found = [
        (len(replay.sure[int(replay.op(rank, i).key[0])]), replay.op(rank, i).enter_ns, rank, i)
        for rank in ranks
        for i in _open(replay, rank)
        if replay.op(rank, i).key[0] in comms
    ]
    return replay.op(*min(found)[2:]).key if found else None


def _since_ns(replay: Replay, ranks: list[int]) -> int:
    known = [since for rank in ranks if (since := replay.view.ranks[rank].since_ns) is not None]
    return min(known, default=replay.view.now_ns)


def all_arrived(replay: Replay) -> list[Verdict]:
    """Everybody waits, and for nobody: the first operation, of the smallest communicator with all of them, that is not
    known to be complete. Empty where one of them goes about something else: then it is no common wait."""
    stuck = _stuck(replay)
    near = {member for members in replay.sure if set(members) & set(stuck) for member in members}
    if any(replay.view.ranks[member].state == USER for member in near):
        return []
    standing = {rank: open_ for rank, open_ in _standing(replay).items() if open_}
    if not standing:
        return []
    begun = _begun(replay, standing)
    if begun:
        why = "all ranks have called it: all their GPUs have begun it, so a link, the network or NCCL itself stands"
        return [_arrived(replay, stuck, standing, key, "gpu_start", why) for key in begun]
    key = _common(replay, stuck, standing)
    if key is None:
        return []
    why = "all ranks have called it: a GPU may be stuck before it, or the transport stands"
    return [_arrived(replay, stuck, standing, key, "api", why)]


def _arrived(replay: Replay, stuck: list[int], standing: dict[int, list[int]], key: Key, evidence: str,
             why: str) -> Verdict:  # fmt: skip
    here = replay.at[key]
    since_ns = max(min(replay.op(r, i).enter_ns for r, i in here.items()), 0)
    if evidence == "api":  # the first that may not be done is often one that is: nobody waited yet
        since_ns = max(since_ns, min((s for r in stuck if (s := replay.view.ranks[r].since_ns) is not None), default=0))
    where = tuple((rank, key if rank in here else replay.op(rank, standing[rank][0]).key) for rank in sorted(standing))
    cascade = tuple(c for c in _comms_of(replay, tuple(stuck)) if c != key[0])
    return Verdict("ALL_ARRIVED", (), key, int(key[0]), since_ns, tuple(stuck), cascade, evidence, "low", why, where)


def _begun(replay: Replay, standing: dict[int, list[int]]) -> list[Key]:
    """What all its ranks have begun and none is known to have ended: oldest first."""
    found: dict[Key, None] = {}
    for rank, places in standing.items():
        for index in places:
            op = replay.op(rank, index)
            if op.started and all(replay.op(r, i).started for r, i in replay.at[op.key].items()):
                found[op.key] = None
    return sorted(found, key=lambda key: min(replay.op(r, i).enter_ns for r, i in replay.at[key].items()))


def _common(replay: Replay, stuck: list[int], standing: dict[int, list[int]]) -> Key | None:
    """Of the smallest communicator that contains the waiting ranks, and of whose members nobody goes on."""
    found: dict[int, Key] = {}
    inside = {comm for comm, members in enumerate(replay.sure) if set(members) <= set(stuck)}
    for rank, places in standing.items():
        for index in places:
            key = replay.op(rank, index).key
            comm = int(key[0])
            if comm in inside and (comm not in found or _earlier(key, found[comm])):
                found[comm] = key
    best = min(found, key=lambda c: (-len(replay.sure[c]), c), default=None)
    return None if best is None else found[best]


def _earlier(one: Key, other: Key) -> bool:
    """Of two operations of one communicator; sends and collectives are not comparable."""
    return one[:-1] == other[:-1] and int(one[-1]) < int(other[-1])

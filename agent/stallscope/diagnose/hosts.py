"""What host states alone tell, where operations can't be compared: attached in the middle, records lost, ranks that
nobody traces."""

from __future__ import annotations

from collections.abc import Iterator

from stallscope.diagnose.graph import LIFE_CYCLE
from stallscope.diagnose.replay import Replay
from stallscope.diagnose.verdict import Verdict
from stallscope.diagnose.view import DEAD, FINISHED, IN_API, IN_SYNC, USER, Key, Rank, View

__all__ = ["is_certain", "is_waiting", "judge_hosts"]

_OUTSIDE = {USER: "NOT_ARRIVED", DEAD: "DIED", FINISHED: "LEFT"}
_WORDS = {
    "NOT_ARRIVED": "waits in no CUDA or NCCL call, while all others of its communicators do",
    "DIED": "has ended, while all others of its communicators wait",
    "LEFT": "has finished, while all others of its communicators wait",
}


def is_waiting(rank: Rank) -> bool:
    """Whether its host is inside a call that waits."""
    return rank.state in (IN_SYNC, IN_API)


def is_certain(view: View) -> bool:
    """Whether the operations of all ranks are known and can be compared."""
    whole = all(comm.aligned and len(comm.members) >= (comm.nranks or len(comm.members)) for comm in view.comms)
    return whole and any(rank.operations for rank in view.ranks) and not any(rank.gap for rank in view.ranks)


def judge_hosts(replay: Replay) -> list[Verdict]:
    """One verdict for each group of ranks that share communicators and in which somebody waits."""
    view = replay.view
    return [found for group in _groups(view) if (found := _judge(replay, group)) is not None]


def _groups(view: View) -> Iterator[list[int]]:
    """Ranks connected by communicators; all of them where none is known. Those without any wait for nobody."""
    if not view.comms:
        yield list(range(len(view.ranks)))
        return
    group = list(range(len(view.ranks)))
    for comm in view.comms:
        together = {group[rank] for rank in comm.members.values()}
        group = [min(together) if number in together else number for number in group]
    in_one = {rank for comm in view.comms for rank in comm.members.values()}
    for number in sorted({group[rank] for rank in in_one}):
        yield [rank for rank, other in enumerate(group) if other == number]


def _judge(replay: Replay, group: list[int]) -> Verdict | None:
    view = replay.view
    waiting = [rank for rank in group if is_waiting(view.ranks[rank])]
    if not waiting:
        return None
    begin_ns = min((s for rank in waiting if (s := view.ranks[rank].since_ns) is not None), default=view.now_ns)
    outside = [rank for rank in group if view.ranks[rank].state in _OUTSIDE]
    early = [rank for rank in outside if not _is_later_death(view.ranks[rank], begin_ns)]
    found = [rank for rank in (early or outside) if _may_lack(replay, rank, waiting)]
    late = len(outside) - len(early or outside)
    if len(found) == 1 and len(waiting) + late == len(group) - 1:
        kind = _OUTSIDE[view.ranks[found[0]].state]
        return _verdict(replay, kind, found[0], _WORDS[kind], waiting, begin_ns)
    odd = [rank for rank in waiting if (view.ranks[rank].api or "").startswith(LIFE_CYCLE)]
    if not outside and len(odd) == 1 and len(waiting) == len(group) > 1:
        others = [rank for rank in waiting if rank != odd[0]]
        why = f"is inside {view.ranks[odd[0]].api}, which waits for no operation of the others"
        return _verdict(replay, "IN_API", odd[0], why, others, begin_ns)
    where = tuple((rank, key) for rank in waiting if (key := _stands_in(replay, rank)) is not None)
    why = "who holds up the others can't be told from what was seen"
    return Verdict("CANNOT_DECIDE", (), None, None, begin_ns, tuple(waiting), (), "host_state", "low", why, where)


def _is_later_death(rank: Rank, begin_ns: int) -> bool:
    return rank.state == DEAD and rank.since_ns is not None and rank.since_ns > begin_ns


def _verdict(replay: Replay, kind: str, culprit: int, why: str, waiting: list[int], begin_ns: int) -> Verdict:
    comms = replay.view.comms
    victims = set(waiting) - {culprit}
    shared = [c for c, comm in enumerate(comms) if {culprit} < set(comm.members.values()) and victims]
    key = next((k for rank in sorted(victims) if (k := _stands_in(replay, rank)) is not None and k[0] in shared), None)
    comm = int(key[0]) if key else max(shared, key=lambda c: (len(comms[c].members), -c), default=None)
    cascade = tuple(c for c in range(len(comms)) if c != comm and victims & set(comms[c].members.values()))
    return Verdict(kind, (culprit,), key, comm, begin_ns, tuple(sorted(victims)), cascade, "host_state", "medium", why)


def _may_lack(replay: Replay, rank: int, waiting: list[int]) -> bool:
    """Whether somebody may wait for it unseen: by their operations they do not, where these can be compared."""
    view = replay.view
    for other in waiting:
        common = [c for c in view.comms if {rank, other} <= set(c.members.values())]
        unsure = view.ranks[rank].gap or view.ranks[other].gap or not view.ranks[other].operations
        if unsure or any(not comm.aligned for comm in common):
            return True
    return False


def _stands_in(replay: Replay, rank: int) -> Key | None:
    """The operation that it waits in, as far as known."""
    if replay.view.ranks[rank].gap:
        return None
    first = next(iter(replay.heads(rank)), None)
    first = next(replay.unproven(rank), None) if first is None else first
    return None if first is None else replay.op(rank, first).key

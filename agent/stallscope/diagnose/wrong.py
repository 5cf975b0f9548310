"""From a mismatch or a ring of waits to the ranks that are wrong, and what they did."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from stallscope.diagnose.agree import difference
from stallscope.diagnose.blame import Blame, Deviation
from stallscope.diagnose.graph import MISMATCH, Graph
from stallscope.diagnose.history import EXTRA, FEW, MOVED, SKIPPED
from stallscope.diagnose.replay import Replay
from stallscope.diagnose.view import Key, Signature

__all__ = ["Wrong", "minority", "wrong_in_cycle", "wrong_in_leaving", "wrong_in_mismatch"]

_DEADLOCK = "ORDER_DEADLOCK"


class Wrong(NamedTuple):
    """Who, how it is called, the operation at which it shows, and why."""

    kind: str
    culprits: tuple[int, ...]
    key: Key
    confidence: str
    why: str


def minority(signatures: dict[int, Signature]) -> tuple[int, ...]:
    """The ranks that call something else than a strict majority of three or more; empty where there is none."""
    usual, count = Counter(signatures.values()).most_common(1)[0]
    if len(signatures) < 3 or 2 * count <= len(signatures):
        return ()
    return tuple(sorted(rank for rank, one in signatures.items() if one != usual))


def wrong_in_mismatch(replay: Replay, blame: Blame, key: Key) -> Wrong:
    """By majority, else by the ranks' own histories; a shift shows that calls were left out, or made too often."""
    signatures = replay.signatures(key)
    few = minority(signatures)
    deviants = blame.deviants(set(few or signatures), weak=True)
    if not few and 0 < len(deviants) < len(signatures):
        few = tuple(deviants)
    if not few:
        return Wrong(MISMATCH, tuple(sorted(signatures)), key, "low", _two_ways(replay, key))
    if len(few) == 1:
        model = next(rank for rank in signatures if rank not in few)
        deviation = deviants.get(few[0]) or blame.shifted(few[0], model, int(key[0]))
        if deviation and deviation.kind in (SKIPPED, EXTRA) and deviation.calls <= FEW:
            return _deviant(few[0], deviation)
        if deviation and deviation.kind == MOVED and deviation.key[0] != key[0]:
            return _deviant(few[0], deviation)
    return Wrong(MISMATCH, few, key, "high", _calls_instead(signatures, few))


def _calls_instead(signatures: dict[int, Signature], few: tuple[int, ...]) -> str:
    others = {rank: one for rank, one in signatures.items() if rank not in few}
    usual, count = Counter(others.values()).most_common(1)[0]
    odd, expected = difference(signatures[few[0]], usual)
    others_call = "1 other calls" if count == 1 else f"{count} others call"
    return f"calls {odd} where {others_call} {expected}"


def _two_ways(replay: Replay, key: Key) -> str:
    kinds = list(dict.fromkeys(replay.signatures(key).values()))
    odd, usual = difference(kinds[0], kinds[1])
    return f"some call {odd}, some {usual}; who is wrong can't be told"


def _deviant(rank: int, deviation: Deviation) -> Wrong:
    confidence = "high" if deviation.is_sure else "medium"
    if deviation.kind == SKIPPED:
        why = f"left out {_calls(deviation)}: {deviation.got} comes where {deviation.expected} is due"
        return Wrong(SKIPPED, (rank,), deviation.key, confidence, why)
    if deviation.kind == EXTRA:
        why = f"made {_calls(deviation)} too many: {deviation.got} where {deviation.expected} is due"
        return Wrong(EXTRA, (rank,), deviation.key, confidence, why)
    why = f"calls {deviation.got} before {deviation.expected}, in another order than before"
    return Wrong(_DEADLOCK, (rank,), deviation.key, confidence, why)


def _calls(deviation: Deviation) -> str:
    return "1 call" if deviation.calls == 1 else f"{deviation.calls} calls"


def wrong_in_cycle(replay: Replay, blame: Blame, graph: Graph, component: list[Key]) -> Wrong:
    """By the ranks' own histories, else by ranks of the same role, else all of the shortest ring."""
    first = min(component, key=lambda key: (graph[key].since_ns, component.index(key)))
    inside = set(component)
    passed = {via for key in component for after, via in graph[key].edges if after in inside}
    waiting = {rank for key in component for rank in graph[key].waiting}
    deviants = blame.deviants(passed) or blame.deviants(waiting)
    if len(deviants) == 1 and not (_is_pair(component) and any(blame.step(rank) is None for rank in passed)):
        return _deviant(*next(iter(deviants.items())))
    if len(deviants) > 1:
        earliest = min(deviants, key=lambda rank: (graph[first].since_ns, rank))
        key = deviants[earliest].key if deviants[earliest].key in graph else first
        why = "call in an order of which each waits for the other"
        return Wrong(_DEADLOCK, tuple(deviants), key, "high" if _is_pair(component) else "medium", why)
    if alone := _by_majority(replay, graph, component):
        return alone
    ring, ranks = _shortest(graph, component)
    names = sorted({replay.op(rank, index).name for key in ring for rank, index in replay.at[key].items()})
    why = f"wait for each other in a ring, in {' and '.join(names)}; whose order is wrong can't be told"
    if _is_pair(ring):
        return Wrong(_DEADLOCK, ranks, ring[0], "medium", "both send, or both receive, before the other's call")
    return Wrong(_DEADLOCK, ranks, first, "low", why)


def wrong_in_leaving(replay: Replay, blame: Blame, key: Key, left: set[int], waiting: list[int]) -> Wrong | None:
    """Whether it is the ranks that wait for others that ended: they depart from their history, or from most members."""
    if blame.deviants(left):
        return None
    deviants = {rank: own for rank, own in blame.deviants(set(waiting)).items() if own.kind == EXTRA}
    if len(deviants) == 1:
        return _deviant(*next(iter(deviants.items())))
    members = replay.members(key)
    if key[1] == "c" and len(members) > 2 and 2 * len(left) > len(members):
        name = next(replay.op(rank, index).name for rank, index in replay.at[key].items())
        why = f"calls {name} once more than {len(left)} others, which have finished"
        return Wrong(EXTRA, tuple(sorted(waiting)), key, "medium", why)
    return None


def _by_majority(replay: Replay, graph: Graph, component: list[Key]) -> Wrong | None:
    """Where most of three or more ranks wait in an operation of theirs, and the rest in later ones of theirs: these
    have left it out, or come to it too late."""
    for key in component:
        members = set(replay.members(key))
        there = members & set(graph[key].waiting)
        same = [k for k in component if k != key and k[1] != "p" and set(replay.members(k)) == members]
        rest = members - there
        elsewhere = {rank for other in same for rank in graph[other].waiting}
        if len(members) > 2 and key[1] != "p" and 2 * len(there) > len(members) and rest and rest <= elsewhere:
            names = {replay.op(rank, replay.at[k][rank]).name for k in same for rank in rest if rank in replay.at[k]}
            due = next(replay.op(rank, index).name for rank, index in replay.at[key].items())
            why = f"left out {due}: {' and '.join(sorted(names))} comes where {len(there)} others call it"
            return Wrong(SKIPPED, tuple(sorted(rest)), key, "medium", why)
    return None


def _is_pair(ring: list[Key]) -> bool:
    """Whether two ranks stand in sends and receives between them."""
    return all(key[1] == "p" for key in ring) and len({frozenset(key[2:4]) for key in ring}) == 1


def _shortest(graph: Graph, component: list[Key]) -> tuple[list[Key], tuple[int, ...]]:
    """The operations of a shortest ring of a component, and the ranks by which they hold up each other."""
    inside = set(component)
    best: list[tuple[Key, int]] = []
    for start in component[:256]:
        ring = _ring(graph, start, inside)
        if ring and (not best or len(ring) < len(best)):
            best = ring
    return [key for key, _ in best], tuple(sorted({via for _, via in best}))


def _ring(graph: Graph, start: Key, inside: set[Key]) -> list[tuple[Key, int]]:
    """The shortest way from an operation back to it, as (operation, rank that it goes on by)."""
    came: dict[Key, tuple[Key, int]] = {}
    todo = [start]
    for key in todo:
        for after, via in graph[key].edges:
            if after == start:
                way = [(key, via)]
                while way[-1][0] != start:
                    way.append(came[way[-1][0]])
                return way
            if after in inside and after not in came:
                came[after] = (key, via)
                todo.append(after)
    return []

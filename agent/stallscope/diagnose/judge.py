"""Which rank blocks the NCCL collectives: from a View to its roots."""

from __future__ import annotations

from collections.abc import Iterable

from stallscope.diagnose.blame import Blame, Deviation
from stallscope.diagnose.graph import MISMATCH, UNPROVEN, Cause, Graph, build, components
from stallscope.diagnose.history import EXTRA, SKIPPED
from stallscope.diagnose.hosts import is_certain, is_waiting, judge_hosts
from stallscope.diagnose.replay import Replay
from stallscope.diagnose.silent import silent_mismatches
from stallscope.diagnose.unexplained import all_arrived, odd_host, own_work, stuck_gpu
from stallscope.diagnose.verdict import Verdict
from stallscope.diagnose.view import DEAD, FINISHED, UNKNOWN, Key, View
from stallscope.diagnose.wrong import Wrong, wrong_in_cycle, wrong_in_leaving, wrong_in_mismatch

__all__ = ["judge", "silent_mismatches"]


def judge(view: View) -> list[Verdict]:
    """Who holds up whom, one verdict a root: the one that others have waited for longest in front.

    Meant for a View in which something has been stuck for a while. Empty where nobody waits for anybody.
    """
    replay = Replay(view)
    found = _Roots(replay).verdicts()
    if found:
        return _sorted([*found, *_beside(replay, found)])
    if not any(is_waiting(rank) for rank in view.ranks):
        return []
    if not is_certain(view):
        return _sorted(judge_hosts(replay))
    return _sorted(_unexplained(replay))


def _unexplained(replay: Replay) -> list[Verdict]:
    """Every absence and order is accounted for; what is weaker than that comes now, the strongest first."""
    view = replay.view
    found = stuck_gpu(replay) or odd_host(replay)
    if found:
        return found
    strict = _strict(view) if replay.tolerated else []
    if strict and all(verdict.kind in (MISMATCH, SKIPPED, EXTRA) for verdict in strict):
        return [verdict._replace(confidence="medium" if verdict.culprits else "low") for verdict in strict]
    if any(len({op.stream for op in rank.operations}) > 1 for rank in view.ranks):
        # As if streams waited for each other: believed only where one rank departs from its own history.
        serial = _Roots(Replay(view, serial=True)).verdicts()
        named = [verdict for verdict in serial if len(verdict.culprits) == 1 and verdict.confidence != "low"]
        if named and len(named) == len(serial):
            return [verdict._replace(confidence="medium") for verdict in named]
    return _unknown(replay) or all_arrived(replay)


def _strict(view: View) -> list[Verdict]:
    """As if all calls stood that do not fit together."""
    return _Roots(Replay(view, strict=True)).verdicts()


def _beside(replay: Replay, found: list[Verdict]) -> list[Verdict]:
    """Calls that do not fit together, and may stand, where that hides nothing of what was found."""
    if not replay.tolerated:
        return []
    strict = {(v.kind, v.culprits, v.key): v for v in _strict(replay.view)}
    if any((v.kind, v.culprits, v.key) not in strict for v in found):
        return []
    named = {rank for v in found for rank in v.culprits}
    more = [v for v in strict.values() if v.kind == MISMATCH and v.culprits and named.isdisjoint(v.culprits)]
    return [v._replace(confidence="medium") for v in more if v.confidence != "low"]


def _unknown(replay: Replay) -> list[Verdict]:
    """Where somebody waits for a rank of which nothing is known."""
    graph = build(replay)
    if not any(cause.kind == UNKNOWN for node in graph.values() for cause in node.causes):
        return []
    return judge_hosts(replay)


def _sorted(verdicts: Iterable[Verdict]) -> list[Verdict]:
    return sorted(verdicts, key=lambda v: (v.since_ns, -len(v.victims), v.culprits, v.kind))


class _Roots:
    """The wait-for graph of a Replay, resolved to what is not itself a wait."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._graph: Graph = build(replay)
        self._blame = Blame(replay)
        self._into: dict[Key, set[Key]] = {}
        for key, node in self._graph.items():
            for after, _ in node.edges:
                self._into.setdefault(after, set()).add(key)

    def verdicts(self) -> list[Verdict]:
        """Roots only, in order."""
        causes: dict[Cause, list[Key]] = {}
        found = []
        for key, node in self._graph.items():
            for cause in node.causes:
                if cause.kind == MISMATCH:
                    found.append(self._mismatch(key))
                elif cause.kind not in (UNPROVEN, UNKNOWN):
                    causes.setdefault(cause, []).append(key)
        found += self._left_behind(causes)
        found += [self._absent(cause, keys) for cause, keys in causes.items() if keys]
        found += self._cycles()
        return _without_consequences(self._replay.view, _merged(_sorted(found)))

    # Kinds of roots.

    def _absent(self, cause: Cause, keys: list[Key]) -> Verdict:
        """Somebody who does not come, and the operations in which it is missing."""
        rank = self._replay.view.ranks[cause.rank]
        missed = self._first_missed(cause.rank, keys)
        kind, why = cause.kind, _ABSENT[cause.kind]
        if kind in ("LEFT", "IN_API"):
            own = self._blame.deviants({cause.rank}).get(cause.rank)
            if own and own.kind in (SKIPPED, EXTRA) and (kind == "LEFT" or rank.api in _ORDERLY_ENDS):
                return self._verdict(own.kind, (cause.rank,), own.key, keys, "high", _deviates(own))
        if kind == "GPU_STUCK":
            why = own_work(rank)
        elif kind == "IN_API":
            why = f"is inside {rank.api or 'an NCCL call'}, which waits for none of the others and has not returned"
        verdict = self._verdict(kind, (cause.rank,), missed, keys, "high", why.format(name=self._name(missed)))
        return verdict._replace(evidence="completion") if kind == "GPU_STUCK" else verdict

    def _left_behind(self, causes: dict[Cause, list[Key]]) -> list[Verdict]:
        """Who waits for others that have left, where it is they who called too often; takes the others' causes."""
        gone: dict[Key, set[int]] = {}
        for cause, keys in causes.items():
            if cause.kind == "LEFT":
                for key in keys:
                    gone.setdefault(key, set()).add(cause.rank)
        found = []
        for key, left in gone.items():
            wrong = wrong_in_leaving(self._replay, self._blame, key, left, self._graph[key].waiting)
            if wrong:
                found.append(self._wrong(wrong, [key])._replace(where=()))
                for rank in left:
                    causes[Cause("LEFT", rank)].remove(key)
        return found

    def _first_missed(self, rank: int, keys: list[Key]) -> Key:
        """Of several operations, the one that the absent rank would have come to first."""
        if len(keys) > 1:
            for key in self._blame.upcoming(rank):
                if key in keys:
                    return key
        return min(keys, key=lambda key: (self._graph[key].since_ns, keys.index(key)))

    def _mismatch(self, key: Key) -> Verdict:
        wrong = wrong_in_mismatch(self._replay, self._blame, key)
        return self._wrong(wrong, [key])

    def _cycles(self) -> list[Verdict]:
        """Rings of waits without a cause inside or behind them."""
        settled: set[Key] = set()
        found = []
        for component in components(self._graph):
            inside = set(component)
            edges = [(key, after, via) for key in component for after, via in self._graph[key].edges]
            has_cause = any(c.kind not in (UNPROVEN, UNKNOWN) for key in component for c in self._graph[key].causes)
            is_ring = any(after in inside for _, after, _ in edges)
            if has_cause or any(after in settled for _, after, _ in edges):
                settled |= inside
            elif is_ring:
                settled |= inside
                found.append(self._wrong(wrong_in_cycle(self._replay, self._blame, self._graph, component), component))
        return found

    # Making verdicts.

    def _wrong(self, wrong: Wrong, keys: list[Key]) -> Verdict:
        where = tuple((rank, key) for key in keys for rank in self._graph[key].waiting)
        verdict = self._verdict(wrong.kind, wrong.culprits, wrong.key, keys, wrong.confidence, wrong.why)
        return verdict._replace(where=where)

    def _verdict(self, kind: str, culprits: tuple[int, ...], key: Key, keys: list[Key], confidence: str,
                 why: str) -> Verdict:  # fmt: skip
        behind = self._behind(keys)
        gone = [n for n, rank in enumerate(self._replay.view.ranks) if rank.state in (DEAD, FINISHED)]
        waiting = {rank for node in behind for rank in self._graph[node].waiting} - set(culprits) - set(gone)
        cascade = {int(node[0]) for node in behind} - {int(key[0])}
        since_ns = min(self._graph[node].since_ns for node in keys)
        return Verdict(
            kind, culprits, key, int(key[0]), since_ns, tuple(sorted(waiting)), tuple(sorted(cascade)), "api",
            confidence, why,
        )  # fmt: skip

    def _behind(self, keys: list[Key]) -> set[Key]:
        """Operations that lead into some, and these."""
        found, todo = set(keys), list(keys)
        while todo:
            fresh = self._into.get(todo.pop(), set()) - found
            found |= fresh
            todo += fresh
        return found

    def _name(self, key: Key) -> str:
        return next((self._replay.op(rank, index).name for rank, index in self._replay.at[key].items()), "?")


_ABSENT = {
    "DIED": "has ended and never comes to {name}",
    "NOT_ARRIVED": "has not come to {name}: its host is in no CUDA or NCCL call that waits",
    "LEFT": "has destroyed the communicator or finished, and never comes to {name}",
    "IN_API": "",
    "GPU_STUCK": "",
}
_ORDERLY_ENDS = ("ncclCommDestroy", "ncclCommFinalize")


def _deviates(own: Deviation) -> str:
    if own.kind == SKIPPED:
        return f"left out {own.calls} of the calls that it makes in each step, first {own.expected}"
    return f"made {own.calls} calls more than in each step before, first {own.got}"


def _merged(verdicts: list[Verdict]) -> list[Verdict]:
    """One verdict where the same ranks were found by two ways; the one that says more about the cause stays."""
    found: dict[tuple[int, ...] | int, Verdict] = {}
    for number, verdict in enumerate(verdicts):
        name = verdict.culprits or number
        old = found.get(name)
        if old is None:
            found[name] = verdict
            continue
        best, other = (verdict, old) if _WEIGHT.get(verdict.kind, 1) > _WEIGHT.get(old.kind, 1) else (old, verdict)
        found[name] = best._replace(
            victims=tuple(sorted({*best.victims, *other.victims})),
            cascade=tuple(sorted({*best.cascade, *other.cascade} - {best.comm})),
            since_ns=min(best.since_ns, other.since_ns),
        )
    return _sorted(found.values())


_WEIGHT = {SKIPPED: 3, EXTRA: 3, MISMATCH: 2, "DIED": 4}


def _without_consequences(view: View, verdicts: list[Verdict]) -> list[Verdict]:
    """Without deaths that came after somebody else had begun to block."""
    kept: list[Verdict] = []
    for verdict in sorted(verdicts, key=lambda v: (v.kind == "DIED", _death_ns(view, v))):
        death_ns = _death_ns(view, verdict)
        if verdict.kind != "DIED" or not any(_explains(view, other, death_ns) for other in kept):
            kept.append(verdict)
    return _sorted(kept)


def _explains(view: View, other: Verdict, death_ns: int) -> bool:
    return other.since_ns < death_ns and (other.kind != "DIED" or _death_ns(view, other) < death_ns)


def _death_ns(view: View, verdict: Verdict) -> int:
    return (view.ranks[verdict.culprits[0]].since_ns or 0) if verdict.kind == "DIED" else 0

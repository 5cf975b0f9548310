"""Who is wrong where ranks disagree: by each rank's own history, by ranks of the same role, by majority."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median_low
from typing import NamedTuple

from stallscope.diagnose.history import (
    CHANGED,
    EXTRA,
    FEW,
    MOVED,
    SKIPPED,
    UNCLEAR,
    Break,
    Step,
    Token,
    breaks,
    first_break,
    joined_at,
    learn_step,
)
from stallscope.diagnose.replay import API_KINDS, Replay
from stallscope.diagnose.view import Key, Signature

__all__ = ["Blame", "Deviation"]

_WEAK = (CHANGED, UNCLEAR)


class Call(NamedTuple):
    """A call without its number, for comparison. `prefix`: of its key. `odd`: distinguishes the two ends of a pair."""

    prefix: Key
    signature: Signature | None
    odd: str = ""


class Deviation(NamedTuple):
    """Where a rank departs from what it, or its like, does usually.

    Attributes:
        kind: SKIPPED, EXTRA, CHANGED, MOVED or UNCLEAR.
        key: the operation at which it shows: the one left out, the one too many, the changed one.
        calls: how many.
        is_sure: enough calls followed to tell one kind from another.
        got, expected: names of the functions.
    """

    kind: str
    key: Key
    calls: int
    is_sure: bool
    got: str
    expected: str


def _same_lane(one: Token, other: Token) -> bool:
    return isinstance(one, Call) and isinstance(other, Call) and (one.prefix, one.odd) == (other.prefix, other.odd)


def _uses_all(calls: Sequence[Token], tokens: Sequence[Token]) -> bool:
    """Whether a step calls on each communicator, and with each peer, that is called on at all."""
    return _prefixes(calls) == _prefixes(tokens)


def _prefixes(tokens: Sequence[Token]) -> set[Key]:
    return {token.prefix for token in tokens if isinstance(token, Call)}


class Blame:
    """Answers for one Replay; each rank's sequence is looked at once."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._own: dict[int, list[Deviation]] = {}
        self._calls: dict[int, tuple[list[Call], list[int]]] = {}
        self._steps: dict[int, Step | None] = {}

    # Sequences.

    def calls(self, rank: int) -> tuple[list[Call], list[int]]:
        """What it issued, in order, and the index of each into its window. Inside a group the order means nothing."""
        if rank not in self._calls:
            keyed = []
            batch, begin = -1, 0
            for index, op in enumerate(self._replay.view.ranks[rank].operations):
                if op.key[1] in API_KINDS or op.key[1] == "end":
                    continue
                if op.batch < 0 or op.batch != batch:
                    batch, begin = op.batch, index
                odd = op.name if op.key[1] == "p" else ""
                keyed.append((begin, Call(op.key[:-1], op.signature, odd), index))
            keyed.sort()
            self._calls[rank] = [call for _, call, _ in keyed], [index for _, _, index in keyed]
        return self._calls[rank]

    def _until(self, rank: int) -> int:
        """Index of its first unfinished call, or the number of its calls."""
        fired = self._replay.fired[rank]
        places = self.calls(rank)[1]
        return next((n for n, index in enumerate(places) if not fired[index]), len(places))

    def step(self, rank: int) -> Step | None:
        """What the rank issues again and again."""
        if rank not in self._steps:
            self._steps[rank] = learn_step(self.calls(rank)[0], _uses_all)
        return self._steps[rank]

    def upcoming(self, rank: int) -> list[Key]:
        """The operations that it would issue in its next step, by its own history; empty where that shows no step."""
        step = self.step(rank)
        if step is None:
            return []
        calls = self.calls(rank)[0]
        phase = (len(calls) - step.at) % len(step.calls)
        if list(step.calls[:phase]) != calls[len(calls) - phase :]:
            return []
        numbers: dict[Key, int] = {}
        keys = []
        for call in step.after(phase, len(step.calls)):
            assert isinstance(call, Call)
            if call.prefix not in numbers:
                numbers[call.prefix] = self._issued(rank, call.prefix)
            keys.append((*call.prefix, numbers[call.prefix]))
            numbers[call.prefix] += 1
        return keys

    # Deviations.

    def own(self, rank: int) -> list[Deviation]:
        """From what the rank itself does usually, the last one first."""
        if rank not in self._own:
            self._own[rank] = self._look_back(rank)
        return self._own[rank]

    def _look_back(self, rank: int) -> list[Deviation]:
        step = None if self._replay.view.ranks[rank].gap else self.step(rank)
        if step is None:
            return []
        # Among equal calls the one too many or too few shows later than where it holds up the others.
        calls, until = self.calls(rank)[0], self._until(rank) + len(step.calls)
        begun = joined_at(calls, step, self._until(rank))
        return [self._deviation(rank, found) for found in breaks(calls, begun, until, _same_lane)] if begun else []

    def _deviation(self, rank: int, found: Break) -> Deviation:
        kind, distance, is_sure = self._settle(rank, found)
        calls, places = self.calls(rank)
        expected, got = found.expected, calls[found.at]
        assert isinstance(expected, Call)
        key: Key = self._replay.op(rank, places[found.at]).key
        if kind != MOVED:
            is_sure = is_sure and found.support > 0 and found.is_whole and distance <= FEW
        if kind in (SKIPPED, MOVED):
            key = (*expected.prefix, self._replay.next_number(rank, expected.prefix, places[found.at]))
        return Deviation(kind, key, distance, is_sure, _name(got), _name(expected))

    def _settle(self, rank: int, found: Break) -> tuple[str, int, bool]:
        """(kind, calls, whether sure). Between explanations that fit equally well the numbers of calls decide,
        compared with those of the other ranks."""
        first = found.kind, found.distance
        if found.kind == CHANGED and (EXTRA, 1) in found.rivals and self._is_last_repeat(rank, found):
            return EXTRA, 1, False
        if not found.rivals or found.kind == CHANGED:
            return *first, True
        assert isinstance(found.got, Call) and isinstance(found.expected, Call)
        surplus, is_seen = self._surplus(rank), True
        guesses = dict((first, *found.rivals))
        if MOVED in guesses:
            distance = guesses.pop(MOVED)
            is_seen = found.at + distance < len(self.calls(rank)[0])
            guesses = {kind: calls for kind, calls in guesses.items() if calls == 1 or kind == EXTRA}
            if not self._is_repeat(rank, found, guesses.get(EXTRA, 0)):
                guesses.pop(EXTRA, None)
            if not guesses or not any(surplus.values()):
                return MOVED, distance, is_seen
        is_missing, is_too_many = surplus.get(found.expected.prefix, 0) < 0, surplus.get(found.got.prefix, 0) > 0
        if SKIPPED in guesses and (is_missing or EXTRA not in guesses):
            return SKIPPED, guesses[SKIPPED], is_missing and is_seen
        if EXTRA in guesses and (is_too_many or SKIPPED not in guesses):
            return EXTRA, guesses[EXTRA], is_too_many and is_seen
        kind = next(iter(guesses))
        return kind, guesses[kind], False

    def _is_last_repeat(self, rank: int, found: Break) -> bool:
        """Whether its last call is the one before it once more: too many, rather than another one that looks so."""
        return found.at == len(self.calls(rank)[0]) - 1 and self._is_repeat(rank, found, 1)

    def _is_repeat(self, rank: int, found: Break, count: int) -> bool:
        """Whether calls were made once more, rather than before their time: right after the same ones. Not where the
        rank has waited in between, as long as it usually does there: then they begin what comes next."""
        (calls, places), at = self.calls(rank), found.at
        if count > at or calls[at - count : at] != calls[at : at + count]:
            return False
        ops = self._replay.view.ranks[rank].operations
        times = [ops[index].enter_ns for index in places]
        pauses = [after - before for before, after in pairwise(times[:at])]
        usual = [p for n, p in enumerate(pauses) if (calls[n], calls[n + 1]) == (calls[at - 1], found.expected)]
        if not usual or not ops[places[at - 1]].done:
            return True
        pause_ns = median_low(usual)
        return pause_ns < 2 * median_low(pauses) or 2 * (times[at] - times[at - 1]) < pause_ns

    def _surplus(self, rank: int) -> dict[Key, int]:
        """By prefix of keys: how many calls more than the other ranks there it issued."""
        found: dict[Key, int] = {}
        for prefix in {call.prefix for call in self.calls(rank)[0]}:
            members = self._replay.members((*prefix, 0))
            others = [self._issued(member, prefix) for member in members if member != rank]
            if others:
                found[prefix] = self._issued(rank, prefix) - median_low(others)
        return found

    def _issued(self, rank: int, prefix: Key) -> int:
        return self._replay.next_number(rank, prefix, len(self._replay.view.ranks[rank].operations))

    def departs_at(self, rank: int, key: Key) -> bool:
        """Whether this call of a rank is another one than it makes at this place of its steps."""
        calls, places = self.calls(rank)
        ops = self._replay.view.ranks[rank].operations
        at = next((n for n, index in enumerate(places) if ops[index].key == key), None)
        step = None if at is None else learn_step(calls, _uses_all)
        if at is None or step is None:
            return False
        begun = joined_at(calls, step, at)
        found = breaks(calls, begun, at, _same_lane) if begun else []
        return any(one.kind == CHANGED and one.at == at for one in found)

    # Several ranks.

    def deviants(self, ranks: set[int], weak: bool = False) -> dict[int, Deviation]:
        """Those that depart from their own history, or, where history is too short, from the ranks of their role.

        `weak`: also such that only changed a call, which explains a mismatch and no other block.
        """
        found = {}
        for rank in sorted(ranks):
            alone = (own for own in self.own(rank) if (weak or own.kind not in _WEAK) and not self._is_shared(own))
            if (own := next(alone, None)) is not None:
                found[rank] = own
        return found or self._unlike(ranks, weak)

    def _is_shared(self, own: Deviation) -> bool:
        """Whether all members of the communicator do the same: then it is the program (an evaluation, the end)."""
        members = self._replay.sure[int(own.key[0])]
        if own.key[1] != "c" or len(members) < 2:
            return False
        alike = own.kind, own.calls
        return all(any((other.kind, other.calls) == alike for other in self.own(member)) for member in members)

    def _unlike(self, ranks: set[int], weak: bool) -> dict[int, Deviation]:
        found = {}
        for like in self._roles():
            if len(like) < 3 or not set(like) & ranks:
                continue
            apart = {(a, b): self._compare(a, b) for a in like for b in like if a != b}
            friends = {a: sum(1 for b in like if a != b and apart[a, b] is None) for a in like}
            model = max(like, key=lambda rank: (friends[rank], -rank))
            if 2 * (friends[model] + 1) <= len(like):
                continue
            for rank in sorted(set(like) & ranks - {model}):
                deviation = apart[rank, model]
                if deviation and (weak or deviation.kind not in _WEAK):
                    found[rank] = deviation
        return found

    def _roles(self) -> list[list[int]]:
        """Ranks that do the same in their own communicators: as many, as large, and the same place in a pipeline."""
        roles: dict[tuple[object, ...], list[int]] = {}
        for number, rank in enumerate(self._replay.view.ranks):
            if not rank.gap:
                roles.setdefault(self._role(number), []).append(number)
        return list(roles.values())

    def _role(self, rank: int) -> tuple[object, ...]:
        pairs = {op.key[0] for op in self._replay.view.ranks[rank].operations if op.key[1] == "p"}
        sizes = []
        for number, comm in enumerate(self._replay.view.comms):
            place = next((p for p, r in comm.members.items() if r == rank), None)
            if place is not None:
                sizes.append((comm.nranks, place if number in pairs else None))
        return tuple(sizes)

    def _compare(self, rank: int, model: int) -> Deviation | None:
        """How it departs from a rank of its role, after an operation that both took part in."""
        begins = self._meeting(rank, model)
        if begins is None:
            return None
        mine, theirs = self._labelled(rank), self._labelled(model)
        found = first_break(mine[begins[0] :], theirs[begins[1] :], _same_lane)
        if found is None:
            return None
        here = begins[0] + found.at
        call = theirs[begins[1] + found.at]
        assert isinstance(call, Call)
        own = self._own_call(rank, call)
        return self._deviation(rank, found._replace(at=here, expected=own, got=self.calls(rank)[0][here]))

    def _meeting(self, rank: int, model: int) -> tuple[int, int] | None:
        """Indices into both sequences from which on they should be alike."""
        view, sure = self._replay.view, self._replay.sure
        if not view.ranks[rank].base and not view.ranks[model].base:
            return 0, 0
        common = [c for c, members in enumerate(sure) if {rank, model} <= set(members) and view.comms[c].aligned]
        best: tuple[int, int] | None = None
        for comm in sorted(common, key=lambda c: -len(sure[c])):
            mine, theirs = self._numbers(rank, comm), self._numbers(model, comm)
            both = sorted(mine.keys() & theirs.keys())
            if both and (best is None):
                best = mine[both[0]] + 1, theirs[both[0]] + 1
        return best

    def _numbers(self, rank: int, comm: int) -> dict[int, int]:
        ops = self._replay.view.ranks[rank].operations
        places = enumerate(self.calls(rank)[1])
        return {int(ops[i].key[2]): n for n, i in places if ops[i].key[:2] == (comm, "c")}

    def _comms_of(self, rank: int) -> list[int]:
        return [c for c, comm in enumerate(self._replay.view.comms) if rank in comm.members.values()]

    def _labelled(self, rank: int) -> list[Call]:
        """Its calls with its communicators counted, so that ranks of one role can be compared."""
        labels = {comm: n for n, comm in enumerate(self._comms_of(rank))}
        return [
            Call((labels.get(int(c.prefix[0]), -1), *c.prefix[1:]), c.signature, c.odd) for c in self.calls(rank)[0]
        ]

    def _own_call(self, rank: int, labelled: Call) -> Call:
        comm = self._comms_of(rank)[int(labelled.prefix[0])]
        return Call((comm, *labelled.prefix[1:]), labelled.signature, labelled.odd)

    def shifted(self, rank: int, model: int, comm: int) -> Deviation | None:
        """How its collectives on one communicator depart from those of another member."""
        begin = max(self._first(rank, comm), self._first(model, comm))
        mine, theirs = ([c for c in self._on(r, comm) if c[0] >= begin] for r in (rank, model))
        found = first_break([call for _, call, _ in mine], [call for _, call, _ in theirs], _same_lane)
        if found is None:
            return None
        expected = theirs[found.at][1]
        place = self.calls(rank)[1].index(mine[found.at][2])
        deviation = self._deviation(rank, found._replace(at=place, expected=expected, rivals=()))
        return deviation._replace(is_sure=found.support > 1 and not found.rivals)

    def _first(self, rank: int, comm: int) -> int:
        return next((number for number, _, _ in self._on(rank, comm)), 0)

    def _on(self, rank: int, comm: int) -> list[tuple[int, Call, int]]:
        ops = self._replay.view.ranks[rank].operations
        here = ((i, ops[i].key) for i in self.calls(rank)[1])
        return [(int(k[2]), Call(k[:2], ops[i].signature), i) for i, k in here if k[:2] == (comm, "c")]


def _name(call: Token) -> str:
    assert isinstance(call, Call)
    return call.odd or (call.signature.api if call.signature else "?")

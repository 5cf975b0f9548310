"""What a rank issues step after step, and where its latest calls differ from that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

__all__ = [
    "CHANGED",
    "EXTRA",
    "FEW",
    "MOVED",
    "SKIPPED",
    "Break",
    "Step",
    "first_break",
    "joined_at",
    "learn_step",
]

SKIPPED, EXTRA, CHANGED, MOVED, UNCLEAR = "SKIPPED", "EXTRA", "CHANGED", "MOVED", "UNCLEAR"
_MOST_AWAY = 64
_RECENT_STEPS = 4
_LEAST_STEPS = 3
FEW = 8
"""Changes of more calls are believed only where nothing else fits."""

Token = Hashable
SameLane = Callable[[Token, Token], bool]


class Break(NamedTuple):
    """A place where a sequence departs from what is expected.

    Attributes:
        kind: SKIPPED (expected calls are not there), EXTRA, CHANGED (another one in its place), MOVED (the same ones in
            another order), UNCLEAR.
        at: index into the sequence.
        distance: how many calls.
        support: how many calls afterwards are as expected again.
        is_whole: everything after it is as expected.
        rivals: (kind, distance) of other explanations, of which the sequence alone does not say that they are worse.
    """

    kind: str
    at: int
    distance: int
    expected: Token
    got: Token
    support: int
    rivals: tuple[tuple[str, int], ...] = ()
    is_whole: bool = True


class Step(NamedTuple):
    """What repeats: the calls of one period, and where in the sequence such a period was found."""

    calls: tuple[Token, ...]
    at: int

    def after(self, phase: int, count: int) -> list[Token]:
        """The calls expected from a phase of the period on."""
        return [self.calls[(phase + i) % len(self.calls)] for i in range(count)]


def learn_step(tokens: Sequence[Token], is_whole: Callable[[Sequence[Token], Sequence[Token]], bool]) -> Step | None:
    """The period of a sequence of calls that was regular for three periods or more, else None.

    `is_whole(calls, all)`: whether these may be a whole period of all.
    """
    numbers: dict[Token, int] = {}
    array = np.array([numbers.setdefault(token, len(numbers)) for token in tokens], dtype=np.int32)
    found = []
    for length in _lengths(array):
        begin, run = _longest_run(array[length:] == array[:-length])
        if run >= (_LEAST_STEPS - 1) * length and is_whole(tokens[begin : begin + length], tokens[begin:]):
            found.append(Step(tuple(tokens[begin : begin + length]), begin + length))
    strict = (step for step in found if all(n == 1 for n in _others(step, tokens).values()))
    return next(strict, None) or next((step for step in found if _is_usual(step, tokens)), None)


def _others(step: Step, tokens: Sequence[Token]) -> Counter[Token]:
    """Calls that the step does not have, from its first time on. A run of equal calls inside a step repeats as well:
    a step has all that is called more than once."""
    usual = set(step.calls)
    return Counter(token for token in tokens[step.at - len(step.calls) :] if token not in usual)


def _is_usual(step: Step, tokens: Sequence[Token]) -> bool:
    """Whether it is most of what is done, with something else now and then, as an evaluation."""
    length = len(step.calls)
    times = (len(tokens) - step.at) / length + 1
    if length < 3 or any(2 * count > times for count in _others(step, tokens).values()):
        return False
    return all(step.after(part, length) != list(step.calls) for part in range(1, length))


def _lengths(array: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> list[int]:
    """Possible periods, the one that holds for most calls first."""
    size = len(array)
    rates = [
        (np.count_nonzero(array[length:] != array[:-length]) / (size - length), length)
        for length in range(1, size // _LEAST_STEPS + 1)
    ]
    return [length for rate, length in sorted(rates)[:8] if rate <= 0.6]


def _longest_run(same: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> tuple[int, int]:
    """(begin, length) of the first longest run of true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8)))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    best = int(np.argmax(lengths))
    return int(edges[2 * best]), int(lengths[best])


def joined_at(tokens: Sequence[Token], step: Step, until: int) -> Step | None:
    """The same step, where it was done once before `until`, if it was learnt only afterwards."""
    if step.at <= until:
        return step
    length = len(step.calls)
    begins = [n for n in range(until - length + 1) if tokens[n] == step.calls[0]]
    runs = [(_alike(tokens[n:], step.after(0, len(tokens) - n)), -n) for n in begins]
    run, begin = max(runs, default=(0, 0))
    return Step(step.calls, -begin) if run >= length else None


def breaks(tokens: Sequence[Token], step: Step, until: int, same_lane: SameLane) -> list[Break]:
    """Departures from a step at or before index `until`, no more than four steps back, the last one first."""
    at, phase = step.at, 0
    found: list[Break] = []
    seen: set[Break] = set()
    while at <= until:
        here = first_break(tokens[at:], step.after(phase, len(tokens) - at + _MOST_AWAY), same_lane)
        if here is None or at + here.at > until:
            break
        # What it did before as well, an evaluation now and then, is no departure.
        like = here._replace(at=0, support=0, rivals=(), is_whole=True)
        if like not in seen:
            found.append(here._replace(at=at + here.at))
        seen.add(like)
        if here.kind == UNCLEAR:
            break
        skipped, extra = _consumed(here)
        phase += here.at + skipped
        at += here.at + extra
    return [here for here in reversed(found) if here.at >= until - _RECENT_STEPS * len(step.calls)]


def _consumed(found: Break) -> tuple[int, int]:
    """How many expected calls, and how many issued ones, a break takes up."""
    return {
        SKIPPED: (found.distance, 0),
        EXTRA: (0, found.distance),
        CHANGED: (1, 1),
        MOVED: (found.distance, found.distance),
    }[found.kind]


def first_break(got: Sequence[Token], expected: Sequence[Token], same_lane: SameLane) -> Break | None:
    """Where two sequences part, and the smallest change that makes one of the other; None where one begins the other.

    `same_lane(a, b)`: whether one call may stand in the other's place (two collectives of one communicator).
    """
    begin = _alike(got, expected)
    if begin >= min(len(got), len(expected)):
        return None
    got, expected = got[begin:], expected[begin:]
    first = _guesses(got, expected, same_lane)
    depth = 0 if any(guess.is_whole and guess.cost < 2 for guess in first) else 1
    guesses = [(_total(got, expected, guess, same_lane, depth), guess) for guess in first]
    fit = [(total, guess) for total, guess in guesses if guess.is_whole or guess.run > 1]
    if not fit:
        return Break(UNCLEAR, begin, 0, expected[0], got[0], 0)
    total, best = min(fit)
    most = total + _MOST_AWAY if best.kind == MOVED else total + 0.5
    cheapest = {guess.kind: (other, guess) for other, guess in sorted(fit, reverse=True) if guess.is_whole}
    rivals = [(guess.kind, guess.distance) for other, guess in sorted(cheapest.values()) if other <= most]
    rivals = [rival for rival in rivals if rival[0] != best.kind and best.is_whole]
    return Break(best.kind, begin, best.distance, expected[0], got[0], best.run, tuple(rivals), best.is_whole)


class _Guess(NamedTuple):
    """One change that would explain a departure: `run` calls are as expected after it, the whole rest, or not.

    `issued`, `wanted`: how much of both sequences it takes up.
    """

    cost: float
    kind: str
    distance: int
    run: int
    is_whole: bool
    issued: int
    wanted: int


def _total(got: Sequence[Token], expected: Sequence[Token], guess: _Guess, same_lane: SameLane, depth: int) -> float:
    """The cost of a change and of those further on, without which the rest would not fit."""
    if guess.is_whole:
        return guess.cost
    if depth == 0 or guess.cost > FEW:
        return guess.cost + FEW
    got, expected = got[guess.issued + guess.run :], expected[guess.wanted + guess.run :]
    return guess.cost + min(
        (_total(got, expected, other, same_lane, depth - 1) for other in _guesses(got, expected, same_lane)),
        default=float(FEW),
    )


def _guesses(got: Sequence[Token], expected: Sequence[Token], same_lane: SameLane) -> list[_Guess]:
    """Changes of which at least one call further on is as expected."""
    found: list[_Guess] = []

    def guess(cost: float, kind: str, distance: int, issued: int, wanted: int) -> None:
        rest = got[issued:]
        run = _alike(rest, expected[wanted:])
        is_whole = run == min(len(rest), len(expected) - wanted)
        if is_whole or run:
            found.append(_Guess(cost, kind, distance, run, is_whole, issued, wanted))

    if same_lane(got[0], expected[0]):
        guess(0.5 if len(got) > 1 else 1.05, CHANGED, 1, 1, 1)
    for distance in range(1, _MOST_AWAY + 1):
        if distance < len(expected) and expected[distance] == got[0]:
            guess(distance, SKIPPED, distance, 0, distance)
        if distance < len(got) and got[distance] == expected[0]:
            guess(distance, EXTRA, distance, distance, 0)
    if len(got) == 1:
        guess(1.2, EXTRA, 1, 1, 0)
    if len(expected) == 1:
        guess(1.2, SKIPPED, 1, 0, 1)
    if moved := _reordered(got, expected):
        guess(1.1, MOVED, moved, moved, moved)
    elif early := next((one for one in found if one.kind == EXTRA and one.is_whole and one.run), None):
        # Made before their time; where they are due otherwise, the sequence has not come to yet.
        due = [next((n for n, call in enumerate(expected) if call == one), 0) for one in got[: early.distance]]
        if min(due) > early.run and early.distance <= FEW:
            found.append(_Guess(early.distance + 0.1, MOVED, max(due) + 1, early.run, True, len(got), len(got)))
    return found


def _reordered(got: Sequence[Token], expected: Sequence[Token]) -> int:
    """So many calls are the same ones in another order; 0 where there is no such number."""
    balance: Counter[Token] = Counter()
    for count, (mine, wanted) in enumerate(zip(got, expected, strict=False), 1):
        balance[mine] += 1
        balance[wanted] -= 1
        if balance[mine] == 0:
            del balance[mine]
        if wanted in balance and balance[wanted] == 0:
            del balance[wanted]
        if not balance:
            return count
        if count >= 16 * _MOST_AWAY:
            break
    return 0


def _alike(one: Sequence[Token], other: Sequence[Token]) -> int:
    """Length of the common beginning."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))

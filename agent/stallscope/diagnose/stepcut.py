"""Where steps end: at their mark, and, where steps lack it, where the other calls of a usual step say so."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.tape import NCCL, WAITED
from stallscope.diagnose.stepfind import CALLS, Anchor, Clock, content, marks

__all__ = ["CUT", "UNMARKED", "Cut", "cut"]

Array = NDArray[Any]
CUT = np.dtype([("at_ns", "<i8"), ("row", "<i8"), ("what", "<u8")])
"""End of a step: when, the last row in it, and what was done in it (content)."""
MOST_TIMES, MOST_NEAR, MOST_MISSED = 64, 64, 3
MOST_STRETCHES = 16
LONGER = 1.5
CHAIN = 8
UNMARKED = 1  # content of steps without the wait that marks the others


class Cut(NamedTuple):
    """Steps found in rows.

    Attributes:
        ends: CUT rows; sure: whether their number is certain; n: of the last mark's wait.
        in_front: steps without a mark in front of the first one with it.
    """

    ends: Array
    sure: bool
    n: int
    in_front: int = 0


class _Stretch(NamedTuple):
    """Rows [low, high) without a mark inside.

    Attributes:
        begins: whether a marked step's calls are at its beginning; ends: at its end.
        n_from: the row from which on the numbers of waits are as usual.
        tail: what came behind the very last mark, None where that is not known.
    """

    low: int
    high: int
    begins: bool
    ends: bool
    n_from: int
    tail: Array | None


def cut(
    rows: Array, anchor: Anchor, before_n: int | None, *, is_first: bool, is_end: bool, is_open: bool
) -> Cut | None:
    """The steps in rows that begin right behind the end of one; None where no mark is among them.

    Args:
        before_n: number of the wait that marked the step before, None where there was none.
        is_first: no step was found before these rows: there may be some without the mark in front of the first one.
        is_end: nothing comes behind these rows: likewise.
        is_open: more rows come: the last mark is left to them, since what belongs to its step may be among them.
    """
    places, what = marks(rows, anchor.kind, anchor.order)
    places = places[what == np.uint64(anchor.mark)]
    last = int(places[-1]) if len(places) else 0
    places = places[:-1] if is_open else places
    if not len(places):
        return None
    sums, none = content(rows), np.zeros(0, np.int64)
    tail = rows[last + 1 :] if is_end else None
    head = _Stretch(0, int(places[0]) + 1, False, True, int(places[0]) + 1, tail)
    more, sure = _unmarked(rows, anchor, head) if is_first else (none, True)
    if anchor.kind != NCCL:
        found = _by_waits(rows, sums, anchor, places, more, before_n)
        return found._replace(sure=found.sure and sure)
    extra, in_front = [more], len(more)
    for at in _longer(rows, sums, anchor, places):
        high = int(places[at + 1]) + 1
        extra.append(_unmarked(rows, anchor, _Stretch(int(places[at]) + 1, high, True, True, high, None))[0])
    if tail is not None and len(tail):
        n_from = int(places[-2]) + 1 if len(places) > 1 else 0
        more, is_sure = _unmarked(rows, anchor, _Stretch(last + 1, len(rows), True, False, n_from, tail))
        extra.append(more)
        sure &= is_sure
    ends = _with_rest(rows, anchor, places, last if is_open else len(rows))
    ends = _all(ends, np.concatenate(extra))
    cuts = np.zeros(len(ends), CUT)
    cuts["at_ns"], cuts["row"] = _spaced(rows["at_ns"][ends], ends), ends
    cuts["what"] = np.diff(sums[ends], prepend=np.uint64(0))
    return Cut(_split(cuts, anchor, rows["at_ns"][0]), sure, 0, in_front)


def _all(ends: Array, extra: Array) -> Array:
    """Ends by marks and others, in order; those that stand for one that was not recorded are equal to one before."""
    again = extra[1:][extra[1:] == extra[:-1]]
    return np.sort(np.concatenate([np.unique(np.concatenate([ends, extra])), again]).astype(np.int64))


def _spaced(at_ns: Array, ends: Array) -> Array:
    """Ends at the same row spread over the time to the next one."""
    first = np.concatenate(([True], ends[1:] != ends[:-1]))
    heads = np.flatnonzero(first)
    if len(heads) == len(ends):
        return at_ns
    group = np.cumsum(first) - 1
    size = np.diff(np.append(heads, len(ends)))
    length = np.diff(np.append(at_ns[heads], at_ns[-1])) // size
    found: Array = at_ns + (np.arange(len(ends)) - heads[group]) * length[group]
    return found


def _with_rest(rows: Array, anchor: Anchor, places: Array, upto: int) -> Array:
    """The ends of marked steps: behind the mark come the rest of the operations, or those of them that are made."""
    if not anchor.after:
        return places
    issued = np.flatnonzero(rows["kind"] == NCCL)
    keys = rows["key"][issued]
    first = np.searchsorted(issued, places, side="right")
    ends = places.copy()
    size = len(anchor.after)
    padded = np.concatenate([keys, np.zeros(size, np.uint64)])
    whole = first + size <= len(issued)
    whole &= (padded[first[:, None] + np.arange(size)] == np.array(anchor.after, np.uint64)).all(axis=1)
    ends[whole] = issued[first[whole] + size - 1]
    for at in np.flatnonzero(~whole).tolist():
        next_place = int(places[at + 1]) if at + 1 < len(places) else upto
        wanted, last = list(anchor.after), int(places[at])
        for index in range(int(first[at]), len(issued)):
            if int(issued[index]) >= next_place or int(keys[index]) not in wanted:
                break
            del wanted[: wanted.index(int(keys[index])) + 1]
            last = int(issued[index])
        ends[at] = last
    return ends


def _by_waits(rows: Array, sums: Array, anchor: Anchor, places: Array, head: Array, before_n: int | None) -> Cut:
    """A wait that was short is not recorded: what lies between is then done a whole number of times."""
    ends = np.concatenate([head, places]).astype(np.int64)
    cuts = np.zeros(len(ends), CUT)
    cuts["at_ns"], cuts["row"] = _spaced(rows["at_ns"][ends], ends), ends
    n = rows["n"][places].astype(np.int64)
    first = int(n[0]) - anchor.hook_calls if before_n is None or len(head) else before_n
    calls = np.diff(n, prepend=first)
    cuts["what"] = np.diff(sums[ends], prepend=np.uint64(0))
    cuts["what"][len(head) :] += calls.astype(np.uint64) * CALLS
    cuts["what"][: len(head)] = UNMARKED
    whole = _split(cuts, anchor, rows["at_ns"][0])
    odd = calls[cuts["what"][len(head) :] != np.uint64(anchor.usual)]
    sure = not (odd >= 2 * max(1, anchor.hook_calls)).any()
    return Cut(whole, sure, int(n[-1]))


def _split(cuts: Array, anchor: Anchor, start_ns: int) -> Array:
    """Where the usual was done several times between two ends, there were so many steps of equal length."""
    usual = np.uint64(anchor.usual)
    times = np.ones(len(cuts), np.int64)
    odd = np.flatnonzero(cuts["what"] != usual)
    for many in range(2, MOST_TIMES + 1):
        if not len(odd):
            break
        times[odd[cuts["what"][odd] == np.uint64((anchor.usual * many) & (1 << 64) - 1)]] = many
    if (times == 1).all():
        return cuts
    found = np.repeat(cuts, times)
    found["what"][np.repeat(times > 1, times)] = usual
    before = np.concatenate(([start_ns], cuts["at_ns"][:-1]))
    nth = np.arange(len(found)) - np.repeat(np.cumsum(times) - times, times) + 1
    length = (cuts["at_ns"] - before) // times
    found["at_ns"] = np.where(
        nth == np.repeat(times, times), found["at_ns"], np.repeat(before, times) + nth * np.repeat(length, times)
    )
    return found


def _longer(rows: Array, sums: Array, anchor: Anchor, places: Array) -> list[int]:
    """Between which marks there may be steps without one."""
    odd = np.diff(sums[places]) != np.uint64(anchor.usual)
    lasted = np.diff(rows["at_ns"][places])
    size = np.diff(places)
    is_long = (lasted > LONGER * np.median(lasted)) | (size > LONGER * np.median(size)) if len(lasted) else odd
    found = np.flatnonzero(odd & is_long)
    return sorted(found[np.argsort(-lasted[found], kind="stable")][:MOST_STRETCHES].tolist())


def _unmarked(rows: Array, anchor: Anchor, stretch: _Stretch) -> tuple[Array, bool]:
    """Ends of the steps in a stretch; whether it is certain that there are so many.

    Of two that are equal the second one stands for a step whose end was not recorded.
    """
    votes, against = _by_operations(rows, anchor, stretch)
    nothing = np.zeros(0, np.int64)
    waits, sure = max(
        (_by_clock(rows, clock, stretch) for clock in anchor.clocks), key=_length, default=(nothing, True)
    )
    agree = {len(vote) for vote in votes}
    front = _in_front(rows, anchor, stretch, waits, votes[0]) if len(agree) == 1 and not against else 0
    if front:
        if front < 2:  # one alone has no rhythm
            return _fitting(rows, anchor, stretch, votes), False
        return np.concatenate([waits[:front], _fitting(rows, anchor, stretch, votes)]), sure and len(votes) > 1
    if len(agree) == 1 and not against and (len(votes) > 1 or len(votes[0]) in (1, len(waits)) or not len(waits)):
        votes += [waits] if len(waits) in agree else []
        sure = len(votes) > 1
    elif stretch.ends and len(waits) >= CHAIN:
        # So many steps in one rhythm are steps, also where some hold other operations than usual.
        sure &= not (len(agree) == 1 and not against)
        votes = [waits, *(vote for vote in votes if len(vote) == len(waits))]
    elif votes or stretch.ends:  # behind the last step, what only waits is an evaluation, as it is between steps
        votes += [waits] if len(waits) else []
    counts = Counter(len(ends) for ends in votes).most_common()
    if not counts:
        return nothing, not against
    many, times = counts[0]
    if (many < 2 and times < 2) or (len(counts) > 1 and times <= len(votes) - times):
        return nothing, stretch.begins
    if against >= times and len(waits) < CHAIN:
        return nothing, stretch.begins
    return _fitting(rows, anchor, stretch, [vote for vote in votes if len(vote) == many]), times > 1 or sure


def _fitting(rows: Array, anchor: Anchor, stretch: _Stretch, votes: list[Array]) -> Array:
    """The ends behind which most nearly as many operations come up to the mark as usual."""
    usual = anchor.length - len(anchor.after)
    return min(votes, key=lambda vote: abs(_operations(rows, int(vote[-1]) + 1, stretch.high) - usual))


def _in_front(rows: Array, anchor: Anchor, stretch: _Stretch, waits: Array, ends: Array) -> int:
    """How many of the waits are of steps without operations, in front of those whose operations tell their ends."""
    front = len(waits) - len(ends) if stretch.ends else 0
    part = rows[stretch.low : stretch.high]
    issued = stretch.low + np.flatnonzero((part["kind"] == NCCL) & np.isin(part["key"], list(anchor.calls)))
    if front <= 0 or not len(issued) or waits[front - 1] > issued[0]:
        return 0
    return front


def _length(found: tuple[Array, bool]) -> int:
    return len(found[0])


def _operations(rows: Array, low: int, high: int) -> int:
    return int((rows["kind"][low:high] == NCCL).sum())


def _by_operations(rows: Array, anchor: Anchor, stretch: _Stretch) -> tuple[list[Array], int]:
    """For each operation of a usual step the ends that it tells of; how many were not made a whole number of times."""
    part = rows[stretch.low : stretch.high]
    issued = np.where(part["kind"] == NCCL, part["key"], np.uint64(0))
    votes, against = [], 0
    for key, times in list(anchor.calls.items())[:64]:
        at = stretch.low + np.flatnonzero(issued == np.uint64(key))
        behind = anchor.after.count(key)
        at = at[behind:] if stretch.begins else at
        many, rest = divmod(len(at) - (times - behind if stretch.ends else 0), times)
        if many > 0 and rest == 0:
            votes.append(at[times - 1 :: times][:many])
        against += many > 0 and rest != 0
    return votes, against


def _by_clock(rows: Array, clock: Clock, stretch: _Stretch) -> tuple[Array, bool]:
    """The ends that a wait tells of: it comes at every `period`-th call of its function; whether they are certain."""
    mine = np.flatnonzero((rows["kind"] == WAITED) & (rows["key"] == np.uint64(clock.key)))
    steady = mine[mine >= stretch.n_from]
    here = mine[(mine >= stretch.low) & (mine < stretch.high)]
    if not len(steady) or not len(here):
        return here[:0], True
    # The shim numbers some records by themselves: a number may come twice, or late.
    n, places = np.unique(rows["n"][here].astype(np.int64), return_index=True)
    here, first = here[places], int(rows["n"][steady[0]])
    if (np.diff(here) <= 0).any():
        return here[:0], False
    walk = _back if stretch.ends else _forth
    runs = [(walk(here, n, (first + offset) % clock.period, clock.period), offset) for offset in clock.offsets]
    (best, sure), offset = max(runs, key=lambda run: (_length(run[0]), run[1]), default=((here[:0], True), 0))
    # If it is made behind the mark, none of these is of the marked step itself.
    return (best if not stretch.ends or _is_behind(clock, offset, stretch.tail) else best[:-1]), sure


def _is_behind(clock: Clock, offset: int, tail: Array | None) -> bool:
    """Whether a wait of each step comes behind its mark: it does behind the very last one."""
    if tail is None:
        return False
    upto = int(np.argmax(tail["kind"] == NCCL)) if (tail["kind"] == NCCL).any() else len(tail)
    n = tail["n"][:upto][tail["key"][:upto] == np.uint64(clock.key)].astype(np.int64)
    return bool(len(n)) and bool((n == n[0] + offset).any())


def _forth(here: Array, n: Array, phase: int, period: int) -> tuple[Array, bool]:
    """The rows at every period-th number, from the first one on, up to a hole."""
    chosen = n % period == phase
    rows, n = here[chosen], n[chosen]
    holes = np.flatnonzero(np.diff(n) != period)
    return (rows[: holes[0] + 1] if len(holes) else rows), not len(holes)


def _back(here: Array, n: Array, phase: int, period: int) -> tuple[Array, bool]:
    """Likewise from the last one backward. A step may hold more calls: then the rhythm goes on before them.

    One that was short is not recorded; that it was made is known by the numbers. It is certain that these are all if
    the function was not called before them.
    """
    chosen = np.flatnonzero(n % period == phase)
    if not len(chosen):
        return here[:0], True
    where = dict(zip(n.tolist(), here.tolist(), strict=True))
    length: dict[int, int] = {}  # of the rhythm that ends with a call
    for number in where:
        length[number] = length.get(number - period, 0) + 1
    numbers = list(where)
    at, index = int(n[int(chosen[-1])]), int(chosen[-1])
    found, sure = [where[at]], True
    while True:
        missing = next((many for many in range(MOST_MISSED + 1) if at - (many + 1) * period in where), -1)
        before = at - (missing + 1) * period
        if missing < 0:
            while index >= 0 and (numbers[index] >= at - period or length[numbers[index]] < 2):
                index -= 1
            if index < 0:
                break
            near = [
                number for number in numbers[max(0, index - MOST_NEAR) : index + 1] if number > numbers[index] - period
            ]
            before = max(near, key=lambda number: (min(length[number], CHAIN), number))
            sure &= at - before < 2 * period
        found += [where[before]] * (max(missing, 0) + 1)
        at = before
    return np.array(found[::-1], np.int64), sure and at < period

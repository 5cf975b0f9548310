"""What marks a step: a call that is made once in each, found in the calls of one process.

No call says "a step ends here". A call marks steps if what lies between two of it is nearly always the same. Calls of
a layer do that as well, many times in a step, and an evaluation now and then, once in many steps. So the finest mark
is taken, and left for a coarser one that has it up to `FEW` times in between, or if it comes more often than the host
waits or copies at all: hosts do that at least once a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.tape import NCCL, THROTTLED, WAITED, mixed

__all__ = ["LEAST", "Anchor", "Clock", "content", "learn", "marks", "spread"]

Array = NDArray[Any]
LEAST = 4  # steps; fewer have no rhythm
SHARE = 0.6
FEW = 8
HOST_SLACK, HOST_LEAST = 1.1, 1.5  # a step copies a batch, and waits for a value more often than not
LEAST_COVERAGE = 0.1
ORDERS = 3
MOST_CANDIDATES = 64
CALLS = np.uint64(0x9E3779B97F4A7C15)


class Clock(NamedTuple):
    """A wait that comes at the same numbers of its hook's calls in each step: every `period` calls, at `offsets`."""

    key: int
    period: int
    offsets: tuple[int, ...]


class Anchor(NamedTuple):
    """What marks the steps of a process.

    Attributes:
        kind: NCCL, WAITED or THROTTLED; order: how many calls in a row make up the mark (NCCL), or 2: the wait and the
            number of
            its hook's calls since it was made last (else); key: of the call itself.
        usual: content of a usual step; calls: its NCCL operations by key; length: their number.
        after: keys of the operations of a step that come behind its mark, in order.
        hook_calls: calls of a wait's hook in a usual step, else 0.
        sure: whether the rule that took it is more than a fallback; edges_sure: whether `after` is certain.
    """

    kind: int
    mark: int
    order: int
    key: int
    usual: int
    calls: dict[int, int]
    length: int
    after: tuple[int, ...]
    hook_calls: int
    clocks: tuple[Clock, ...]
    sure: bool
    edges_sure: bool


class _Level(NamedTuple):
    kind: int
    mark: int
    order: int
    places: Array
    usual: int
    share: float
    times: int


def spread(keys: Array) -> Array:
    """Keys as numbers whose sum tells a multiset."""
    value = mixed(mixed(np.full(len(keys), 3, np.uint64), keys), keys >> np.uint64(32))
    found: Array = value | np.uint64(1)
    return found


def content(rows: Array) -> Array:
    """Running sum over the NCCL operations: the difference of two says what lies between."""
    value = np.where(rows["kind"] == NCCL, spread(rows["key"]), np.uint64(0))
    found: Array = np.cumsum(value, dtype=np.uint64)
    return found


def marks(rows: Array, kind: int, order: int) -> tuple[Array, Array]:
    """(places, marks): which rows may be marks of that kind and order, and the number that each one is."""
    places = np.flatnonzero(rows["kind"] == kind)
    keys = rows["key"][places]
    if kind == NCCL:
        found = keys
        for back in range(1, order):
            before = np.concatenate([np.zeros(min(back, len(keys)), np.uint64), keys[:-back]])
            found = mixed(found * CALLS, before)  # not the same for calls in another order
        return places, found
    if order == 1:
        return places, keys
    return places, mixed(keys, _since_last(keys, rows["n"][places]))


def _since_last(keys: Array, n: Array) -> Array:
    """Calls of the same hook since the same wait was made last; 0 where it is the first."""
    order = np.argsort(keys, kind="stable")
    found = np.zeros(len(keys), np.int64)
    if len(keys) > 1:
        step = np.diff(n[order].astype(np.int64))
        found[order[1:]] = np.where(keys[order][1:] == keys[order][:-1], step, 0)
    return found


def learn(rows: Array, host_calls: int, *, is_first: bool, is_end: bool) -> Anchor | None:
    """The mark of these tokens' steps, None where there is no rhythm.

    Args:
        host_calls: waits and copies that the process made in that time.
        is_first: whether the rows begin with the first step.
        is_end: whether they go to the end of the last one.
    """
    sums = content(rows)
    fallback = None
    for kind in (NCCL, WAITED, THROTTLED):
        levels = list(_levels(rows, sums, kind))
        level, is_sure = _choose(rows, levels, host_calls, is_end)
        if level is None:
            continue
        if is_sure:
            return _anchor(rows, sums, level, _Edges(is_sure, is_first, is_end))
        fallback = fallback or level
    return None if fallback is None else _anchor(rows, sums, fallback, _Edges(False, is_first, is_end))


def _levels(rows: Array, sums: Array, kind: int) -> Iterator[_Level]:
    """Calls between which nearly always the same is done."""
    seen: set[tuple[int, int]] = set()
    for order in range(1, (ORDERS if kind == NCCL else 2) + 1):
        places, found = marks(rows, kind, order)
        values, counts = np.unique(found, return_counts=True)
        often = np.argsort(-counts, kind="stable")[:MOST_CANDIDATES]
        by_mark = np.argsort(found, kind="stable")
        begins = np.searchsorted(found[by_mark], values)
        for at in often[counts[often] > LEAST].tolist():
            mine = places[by_mark[begins[at] : begins[at] + counts[at]]]
            level = _level(rows, sums, kind, int(values[at]), order, mine)
            name = int(mine[0]), len(mine)  # a longer mark at the same places says nothing more
            if level is not None and name not in seen:
                seen.add(name)
                yield level


def _level(rows: Array, sums: Array, kind: int, mark: int, order: int, places: Array) -> _Level | None:
    between = np.diff(sums[places])
    if kind != NCCL:
        between = between + np.diff(rows["n"][places].astype(np.uint64)) * CALLS
    values, counts = np.unique(between, return_counts=True)
    best = int(np.argmax(counts))
    times, share = int(counts[best]), float(counts[best]) / len(between)
    if times < LEAST - 1 or share < SHARE:
        return None
    return _Level(kind, mark, order, places, int(values[best]), share, times)


def _choose(rows: Array, levels: list[_Level], host_calls: int, is_end: bool) -> tuple[_Level | None, bool]:
    """The mark of steps, and whether hosts do something as often."""
    if not levels:
        return None, False
    size = int((rows["kind"] == levels[0].kind).sum())
    here = max(levels, key=lambda level: (len(level.places), -level.order))
    while True:
        is_often = len(here.places) > host_calls * HOST_SLACK
        few = FEW if host_calls >= HOST_LEAST * len(here.places) else 2 * FEW
        coarser = [(inner, level) for level in levels if (inner := _inside(rows, here, level, size)) > 1]
        coarser = [pair for pair in coarser if is_often or pair[0] <= few]
        if not coarser:
            break
        here = min(coarser, key=lambda pair: (pair[0], -len(pair[1].places), pair[1].order))[1]
    is_sure = here.kind != NCCL or len(here.places) <= host_calls * HOST_SLACK
    return _last_of_step(rows, here, levels, is_end), is_sure


def _inside(rows: Array, fine: _Level, coarse: _Level, size: int) -> float:
    """How many times the finer mark lies between two of a coarser one, usually; 0 where that is no step."""
    inside = np.diff(np.searchsorted(fine.places, coarse.places))
    usual = float(np.median(inside))
    mine = rows["kind"][coarse.places[0] : coarse.places[-1] + 1] == coarse.kind
    return usual if int(mine.sum()) >= LEAST_COVERAGE * size else 0


def _last_of_step(rows: Array, level: _Level, levels: list[_Level], is_end: bool) -> _Level:
    """Of several marks of the same steps the one that ends them.

    At the end of a loop it is the one that was made last, else the one after which the host takes its time.
    """
    most = len(level.places)
    alike = [one for one in levels if abs(len(one.places) - most) <= max(1, most // 50) and one.share >= SHARE]
    alike = [one for one in alike if one.order == min(other.order for other in alike)]
    if is_end:
        return max(alike, key=lambda one: int(one.places[-1]))
    issued = np.flatnonzero(rows["kind"] == level.kind)
    own_ns = _own_ns(rows)[issued]

    def pause_ns(one: _Level) -> float:
        where = np.searchsorted(issued, one.places)
        where = where[where + 1 < len(issued)]
        return float(np.median(own_ns[where + 1] - own_ns[where])) if len(where) else 0.0

    return max(alike, key=pause_ns)


def _own_ns(rows: Array) -> Array:
    """When each was made, on a clock that stands while the host waits for its device."""
    found: Array = rows["at_ns"] - np.cumsum(rows["ns"])
    return found


class _Edges(NamedTuple):
    """What is known of the rows that a mark was found in; see `learn`."""

    sure: bool
    is_first: bool
    is_end: bool


def _anchor(rows: Array, sums: Array, level: _Level, edges: _Edges) -> Anchor:
    places = level.places
    between = np.diff(sums[places])
    hook_calls = np.diff(rows["n"][places].astype(np.int64))
    if level.kind != NCCL:
        between = between + hook_calls.astype(np.uint64) * CALLS
    usual = np.flatnonzero(between == np.uint64(level.usual))
    at = int(usual[len(usual) // 2])
    order = _issued(rows, int(places[at]) + 1, int(places[at + 1]) + 1)
    keys, counts = np.unique(order, return_counts=True)
    after, edges_sure = _after(rows, places, usual, order, edges) if level.kind == NCCL else (0, False)
    return Anchor(
        kind=level.kind,
        mark=level.mark,
        order=level.order,
        key=int(rows["key"][places[0]]),
        usual=level.usual,
        calls=dict(zip(keys.tolist(), counts.tolist(), strict=True)),
        length=len(order),
        after=tuple(order[:after].tolist()),
        hook_calls=int(hook_calls[at]) if level.kind != NCCL else 0,
        clocks=tuple(_clocks(rows, places, usual)),
        sure=edges.sure,
        edges_sure=edges_sure,
    )


def _issued(rows: Array, low: int, high: int) -> Array:
    """The keys of the NCCL operations among some rows, in order."""
    part = rows[low:high]
    found: Array = part["key"][part["kind"] == NCCL]
    return found


def _after(rows: Array, places: Array, usual: Array, order: Array, edges: _Edges) -> tuple[int, bool]:
    """How many of a step's operations come behind its mark, and whether that is certain.

    `order`: what comes from a mark to the next one, of two steps. What came behind the very last mark tells, or what
    came before the first one; else the host's longest pause is between steps.
    """
    tail, head = _issued(rows, int(places[-1]) + 1, len(rows)), _issued(rows, 0, int(places[0]) + 1)
    behind = _alike(tail, order)
    if edges.is_end and behind == len(tail) < len(order):
        return behind, True
    before = _alike(head[::-1], order[::-1])
    if edges.is_first and (before == len(head) or (before < len(order) and head[-1 - before] not in order)):
        return len(order) - before, True
    return _pause(rows, places, usual, len(order)), False


def _alike(one: Array, other: Array) -> int:
    """Length of the common beginning."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size


def _pause(rows: Array, places: Array, usual: Array, length: int) -> int:
    """Behind how many operations after the mark the host usually pauses."""
    issued = np.flatnonzero(rows["kind"] == NCCL)
    first = np.searchsorted(issued, places[usual])
    first = first[first + length < len(issued)]
    if not len(first):
        return 0
    own_ns = _own_ns(rows)[issued]
    pauses = np.median(np.diff(own_ns[first[:, None] + np.arange(length + 1)], axis=1), axis=0)
    return int(np.argmax(pauses))


def _clocks(rows: Array, places: Array, usual: Array) -> Iterator[Clock]:
    """Waits that come with the steps."""
    waited = np.flatnonzero(rows["kind"] == WAITED)
    keys, counts = np.unique(rows["key"][waited], return_counts=True)
    for key in keys[counts * 2 >= len(usual)].tolist():
        mine = waited[rows["key"][waited] == np.uint64(key)]
        segment = np.searchsorted(places, mine)  # places[segment - 1] < row <= places[segment]
        firsts = np.concatenate(([True], np.diff(segment) > 0))
        first, number = mine[firsts], segment[firsts]
        n = rows["n"][first].astype(np.int64)
        steps = np.diff(n)[(np.diff(number) == 1) & np.isin(number[1:] - 1, usual)]
        if len(steps) < LEAST - 1:
            continue
        values, times = np.unique(steps, return_counts=True)
        period = int(values[np.argmax(times)])
        if period < 1 or times.max() < SHARE * len(steps):
            continue
        ahead = rows["n"][mine].astype(np.int64) - n[np.cumsum(firsts) - 1]
        offsets, often = np.unique(ahead, return_counts=True)
        chosen = offsets[(often * 4 >= len(first)) & (offsets < period)]
        yield Clock(key, period, tuple(chosen.tolist()[:8]))

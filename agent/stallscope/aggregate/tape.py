"""What a process did, call after call, in the order of its time: what its steps are made of.

Only calls of which every one is recorded: NCCL operations, and waits that were long. A call's key is one number for
what must be equal in two calls that do the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.hooks import WIRE_HOOKS, Hooks
from stallscope.aggregate.limits import LIMITS, Overflow
from stallscope.aggregate.numbering import COLLECTIVE, RECV, SEND
from stallscope.aggregate.process import Process
from stallscope.aggregate.waits import LONG_NS, WaitFacts
from stallscope.wire.hook_table import BY_NAME

__all__ = ["CHANGING", "NCCL", "THROTTLED", "TOKEN", "WAITED", "Meaning", "Speller", "Tape", "copies_of",
           "mixed"]  # fmt: skip

Array = NDArray[Any]
NCCL, WAITED, THROTTLED = 0, 1, 2
CHANGING = -1
LEAST_COPIES = 8
TOKEN = np.dtype(
    [("at_ns", "<i8"), ("ns", "<i8"), ("key", "<u8"), ("sort", "<u8"), ("n", "<u4"), ("hook", "<u2"), ("kind", "u1")]
)
"""at_ns: a wait's end, an operation's entry. ns: how long the wait was. sort: the key without sizes. n: number of the
call among the process's calls of its hook (waits), or in its communicator (NCCL). kind: THROTTLED is a wait that a host
which runs ahead makes for each operation: it says little of steps."""
THROTTLES = ("cudaEventSynchronize", "cuEventSynchronize")
WORDS = ("bytes", "copy_kind")
USER_REDOP = 5


class Meaning(NamedTuple):
    """What a key stands for: the hook, the communicator's address (0: none), elements or bytes (CHANGING: not always
    the same), type, root or peer."""

    hook: int
    pointer: int
    size: int
    dtype: int
    peer: int


def mixed(value: Array, column: Array) -> Array:
    """A number that depends on both, equal for equal ones."""
    value = (value ^ column.astype(np.int64).astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    found: Array = value ^ (value >> np.uint64(29))
    return found


def copies_of(slots: list[Process | None], recs: Array, facts: WaitFacts) -> list[tuple[int, list[int]]]:
    """By process: how many copies were long, of these not inside the device, short, and of these inside it.

    The counters don't tell which copies stay on the device, and of short ones the records are a sample.
    """
    copies, inside = facts.copies(recs)
    is_long, found = recs["dur_ns"] >= LONG_NS, []
    chosen = ((copies & is_long), (copies & is_long & ~inside), (copies & ~is_long), (inside & ~is_long))
    for slot in np.unique(recs["slot"][copies]).tolist():
        process = slots[slot]
        if process is not None:
            mine = recs["slot"] == slot
            found.append((process.proc, [int((mine & which).sum()) for which in chosen]))
    return found


class Speller:
    """Turns operations and waits into tokens."""

    def __init__(self, hooks: Hooks) -> None:
        self._words = {word: np.full(WIRE_HOOKS, -1, np.int8) for word in WORDS}
        self._throttles = hooks.column(lambda h: h.name in THROTTLES)
        for number, facts in hooks.by_id.items():
            words = BY_NAME[facts.name].arguments.split()[:8] if facts.name in BY_NAME else []
            for word, column in self._words.items():
                column[number] = words.index(word) if word in words else -1

    def operations(self, rows: Array) -> tuple[Array, Array]:
        """(tokens, OPERATION rows that they come from) of what has a number in a communicator."""
        rows = rows[np.isin(rows["kind"], (COLLECTIVE, SEND, RECV))]
        found = np.zeros(len(rows), TOKEN)
        found["at_ns"], found["n"], found["hook"] = rows["ts_ns"], rows["n"], rows["api"]
        value = np.full(len(rows), 1, np.uint64)
        redop = np.minimum(rows["redop"], USER_REDOP)
        for column in (rows["pointer"], rows["api"], rows["dtype"], redop, rows["root"]):
            value = mixed(value, column)
        found["sort"], found["key"] = value, mixed(value, rows["elements"])
        return found, rows

    def waits(self, recs: Array) -> Array:
        """Tokens of waits that have ended (records of their return)."""
        found = np.zeros(len(recs), TOKEN)
        found["ns"], found["n"], found["hook"] = recs["dur_ns"].astype(np.int64), recs["n"], recs["hook"]
        found["at_ns"], found["kind"] = (
            recs["ts_ns"].astype(np.int64) + found["ns"],
            np.where(self._throttles[recs["hook"]], THROTTLED, WAITED),
        )
        size, way = (self._word(word, recs) for word in WORDS)
        found["sort"] = mixed(mixed(np.full(len(recs), 2, np.uint64), recs["hook"]), way)
        found["key"] = mixed(found["sort"], size)
        return found

    def size(self, recs: Array) -> Array:
        """Bytes of each copy, 0 of other waits."""
        return self._word("bytes", recs)

    def _word(self, word: str, recs: Array) -> Array:
        where = self._words[word][recs["hook"]]
        found: Array = np.where(where >= 0, recs["a"][np.arange(len(recs)), np.maximum(where, 0)], 0)
        return found


class Tape:
    """Tokens of one process that nobody has taken yet, at most LIMITS["step tokens"].

    Attributes:
        meaning: by key; dropped: tokens that found no room.
    """

    def __init__(self) -> None:
        self._parts: list[Array] = []
        self._size = 0
        self.meaning: dict[int, Meaning] = {}
        self.dropped = 0
        self._copies = [0, 0, 0, 0]

    def __len__(self) -> int:
        return self._size

    def copied(self, counts: list[int]) -> None:
        """Recorded copies: long ones, those of them from or to the host, short ones, those of them on the device."""
        self._copies = [old + new for old, new in zip(self._copies, counts, strict=True)]

    def host_copies(self, made: int) -> int:
        """How many of all copies were from or to the host, about."""
        many, outside, short, inside = self._copies
        share = inside / short if short >= LEAST_COPIES else 0.0
        return outside + int(max(0, made - many) * (1 - share))

    def add(self, speller: Speller, rows: Array, waits: Array, overflow: Overflow) -> None:
        """Operations (OPERATION rows) and records of waits."""
        issued, rows = speller.operations(rows)
        waited = speller.waits(waits)
        columns = (rows["pointer"], rows["elements"], rows["dtype"], rows["root"])
        self._learn(issued, columns, overflow)
        none = np.zeros(len(waited), np.int64)
        self._learn(waited, (none, speller.size(waits), none - 1, none - 1), overflow)
        fresh = np.concatenate([issued, waited])
        room = max(0, LIMITS["step tokens"] - self._size)
        if len(fresh) > room:
            overflow.turned_away["step tokens"] += len(fresh) - room
            self.dropped += len(fresh) - room
            fresh = fresh[:room]
        if len(fresh):
            self._parts.append(fresh)
            self._size += len(fresh)

    def _learn(self, tokens: Array, columns: tuple[Array, ...], overflow: Overflow) -> None:
        for name in ("key", "sort"):
            keys = tokens[name].tolist()  # a set is several times as fast as np.unique here
            for key in sorted(set(keys) - self.meaning.keys()):
                if overflow.full("kinds of calls in steps", len(self.meaning)):
                    break
                at = keys.index(key)
                meaning = Meaning(int(tokens["hook"][at]), *(int(column[at]) for column in columns))
                self.meaning[key] = meaning if name == "key" else meaning._replace(size=CHANGING)

    def take(self, until_ns: int | None) -> Array:
        """What was done up to that instant (None: all), in order; the rest stays."""
        if not self._parts:
            return np.zeros(0, TOKEN)
        tokens = np.concatenate(self._parts)
        tokens = tokens[np.argsort(tokens["at_ns"], kind="stable")]
        upto = len(tokens) if until_ns is None else int(np.searchsorted(tokens["at_ns"], until_ns, side="right"))
        rest = tokens[upto:]
        self._parts, self._size = [rest] if len(rest) else [], len(rest)
        return tokens[:upto]

"""Which operation of a communicator a call is: every rank counts for itself, here from the records of its entries."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.hooks import WIRE_HOOKS, Hooks
from stallscope.wire.hook_table import BY_NAME

__all__ = ["BEGIN", "COLLECTIVE", "END", "OPERATION", "OTHER", "RECV", "SEND", "SPLIT", "Arguments", "rows_of"]

Array = NDArray[Any]

# Kinds of rows. BEGIN, END: of a group. SPLIT: all members of the communicator in argument 0 take part.
COLLECTIVE, SEND, RECV, BEGIN, END, SPLIT, OTHER = range(7)
SPLITS = ("ncclCommSplit", "ncclCommShrink", "ncclCommGrow")
SAME = {"ncclBcast": "ncclBroadcast"}
UNCOUNTED = ("ncclAlltoAll", "ncclGather", "ncclScatter")  # sends and receives to NCCL, which counts collectives only
REDOP_NONE = ROOT_NONE = -1

OPERATION = np.dtype(
    [("ts_ns", "<i8"), ("enter_ns", "<i8"), ("pointer", "<u8"), ("stream", "<u8"), ("elements", "<u8"),
     ("index", "<i8"), ("batch", "<i8"), ("tid", "<u4"), ("n", "<u4"), ("root", "<i4"), ("redop", "<i4"),
     ("hook", "<u2"), ("api", "<u2"), ("dtype", "<i2"), ("kind", "u1"), ("flags", "u1"),
     ("queued_ns", "<i8"), ("begun_ns", "<i8"), ("ended_ns", "<i8")]
)  # fmt: skip
"""One call. enter_ns: when it was issued, 0 while its group is open; index: its number in its communicator, of
collectives or of sends or receives with that peer; batch: number of the group, else its own; api: the hook that stands
for all spellings of the function; queued_ns, begun_ns, ended_ns: when it came to the GPU's queue, when the GPU began it
and ended its part, 0 where nobody told (aggregate/device.py)."""


class Arguments:
    """Where the arguments of each NCCL function stand among the eight recorded words, -1 where it has none."""

    def __init__(self, hooks: Hooks) -> None:
        self.columns = {word: np.full(WIRE_HOOKS, -1, np.int8) for word in ("count", "dtype", "redop", "root", "peer",
                                                                           "comm", "stream")}  # fmt: skip
        self.uncounted = [h.id for h in hooks.by_id.values() if h.name.removesuffix("Config") in UNCOUNTED]
        self.kind = np.full(WIRE_HOOKS, OTHER, np.uint8)
        self.api = np.arange(WIRE_HOOKS, dtype=np.uint16)
        for number, facts in hooks.by_id.items():
            if facts.library == "NCCL" and facts.name in BY_NAME:
                self._add(number, facts.name, facts.kind, BY_NAME[facts.name].arguments.split(), hooks)

    def _add(self, number: int, name: str, kind: str, words: list[str], hooks: Hooks) -> None:
        for index, word in enumerate(words[:8]):
            if word in self.columns:
                self.columns[word][number] = index
        plain = SAME.get(name, name.removesuffix("Config") if kind == "collective" else name)
        self.api[number] = next((h.id for h in hooks.by_id.values() if h.name == plain), number)
        special = {"ncclSend": SEND, "ncclRecv": RECV, "ncclGroupStart": BEGIN, "ncclGroupEnd": END}
        special |= dict.fromkeys(SPLITS, SPLIT)
        self.kind[number] = special.get(name, COLLECTIVE if kind == "collective" else OTHER)

    def take(self, word: str, hook: Array, a: Array) -> Array:
        """That argument of each record, 0 where its function has none."""
        where = self.columns[word][hook]
        found: Array = a[np.arange(len(hook)), np.maximum(where, 0)]
        return np.where(where >= 0, found, 0)


def rows_of(recs: Array, arguments: Arguments) -> Array:
    """The entries among NCCL records as OPERATION rows; not numbered, not grouped."""
    rows = np.zeros(len(recs), OPERATION)
    hook, a = recs["hook"], recs["a"]
    rows["ts_ns"] = rows["enter_ns"] = recs["ts_ns"].astype(np.int64)
    for name, word in (("pointer", "comm"), ("stream", "stream"), ("elements", "count")):
        rows[name] = arguments.take(word, hook, a)
    rows["dtype"] = arguments.take("dtype", hook, a).astype(np.uint16).astype(np.int16)
    redop, root, peer = (arguments.columns[w][hook] for w in ("redop", "root", "peer"))
    rows["redop"] = np.where(redop >= 0, _int(arguments.take("redop", hook, a)), REDOP_NONE)
    rows["root"] = np.where(
        root >= 0, _int(arguments.take("root", hook, a)),
        np.where(peer >= 0, _int(arguments.take("peer", hook, a)), ROOT_NONE),
    )  # fmt: skip
    for name in ("tid", "n", "hook", "flags"):
        rows[name] = recs[name]
    rows["kind"], rows["api"] = arguments.kind[hook], arguments.api[hook]
    return rows


def _int(words: Array) -> Array:
    """The C int in the low half of each word."""
    return (words & np.uint64(0xFFFFFFFF)).astype(np.uint32).astype(np.int32)

"""The hooks of one capture, as columns that a batch of records indexes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.checks import BadField
from stallscope.wire.hook_table import BY_ID, BY_NAME

__all__ = ["COMM_CREATORS", "HookFacts", "Hooks"]

WIRE_HOOKS = 400
WIRE_TIMES = 320
COOKIE_SEQ = 1 << 32
STALL_KINDS = {"wait": "sync", "copy": "copy", "alloc": "alloc", "event": "event", "collective": "collective",
               "p2p": "collective", "group": "collective", "comm": "init"}  # fmt: skip
COMM_CREATORS = ("ncclCommInitRank", "ncclCommInitRankConfig", "ncclCommInitRankScalable", "ncclCommInitAll",
                 "ncclCommSplit", "ncclCommShrink", "ncclCommGrow")  # fmt: skip


class HookFacts(NamedTuple):
    """What the report needs to know of one hook.

    `time_id` is the row of outermost calls, the next one is for nested calls, -1 where calls are not timed; `comm` the
    index of the communicator among the recorded arguments, -1 without one; `seq` whether calls are numbered in it.
    """

    id: int
    library: str
    name: str
    kind: str
    time_id: int
    comm: int
    seq: bool

    @property
    def timed(self) -> bool:
        """Whether entry and return are traced."""
        return self.time_id >= 0

    @property
    def stall_kind(self) -> str | None:
        """The kind of `stalls[]` that its waits belong to."""
        return STALL_KINDS.get(self.kind) if self.timed else None


class Hooks:
    """Hook id -> facts. The capture's own list (HELLO) goes before ours: ids are stable, tables grow."""

    def __init__(self, announced: list[Any]) -> None:
        self.by_id = {number: _of_table(number) for number in BY_ID}
        timed = 0
        for row in announced:
            facts = _of_row(row)
            # A capture numbers its timed hooks in order, two rows each: its table may have had fewer than ours.
            self.by_id[facts.id] = facts._replace(time_id=timed) if row[4] else facts
            timed += 2 * bool(row[4])
        self.time_ids = {h.time_id: h for h in self.by_id.values() if h.timed}
        self.is_stall = self.column(lambda h: h.stall_kind is not None)
        self.is_creator = self.column(lambda h: h.name in COMM_CREATORS)
        self.is_numbered = self.column(lambda h: h.seq and h.comm >= 0)
        self.is_nccl = self.column(lambda h: h.library == "NCCL")
        self.is_launch = self.column(lambda h: h.kind in ("launch", "graph") and "Launch" in h.name)
        self.is_cuda = self.column(lambda h: h.library in ("CUDART", "CUDA"))

    def column(self, test: Any) -> NDArray[np.bool_]:
        """Which hooks pass a test, by hook id."""
        column = np.zeros(WIRE_HOOKS, dtype=bool)
        for number, facts in self.by_id.items():
            column[number] = test(facts)
        return column

    def get(self, number: int) -> HookFacts:
        """Facts of a hook; one that neither side names is kept under its number."""
        return self.by_id.get(number) or HookFacts(number, "unknown", f"hook {number}", "unknown", -1, -1, False)


def _of_table(number: int) -> HookFacts:
    hook = BY_ID[number]
    comm, seq = (hook.cookie >> 40 & 15) - 1, bool(hook.cookie & COOKIE_SEQ)
    return HookFacts(number, hook.library, hook.name, hook.kind, hook.time_id, comm, seq)


def _of_row(row: Any) -> HookFacts:
    """[id, library, name, kind, timed] of a HELLO; the rest comes from our table by name. Raises BadField."""
    if not isinstance(row, list) or len(row) < 5 or type(row[0]) is not int or not 0 <= row[0] < WIRE_HOOKS:
        raise BadField("hooks holds a row that is no hook")
    if not all(isinstance(word, str) for word in row[1:4]):
        raise BadField("hooks holds a hook without names")
    known = BY_NAME.get(row[2])
    facts = _of_table(known.id) if known else HookFacts(row[0], "", "", "", -1, -1, False)
    return facts._replace(id=row[0], library=row[1][:256], name=row[2][:256], kind=row[3][:256], time_id=-1)

"""What one process issued, and how far it is in each of its communicators."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.numbering import OPERATION, RECV, SEND
from stallscope.aggregate.process import Process
from stallscope.aggregate.ring import Ring
from stallscope.aggregate.tape import Tape
from stallscope.aggregate.waits import WAIT

__all__ = ["Issuer", "Place"]

WINDOW = 2048
WAITS = 1024  # newest: more than a second of the fastest loops that wait each time


@dataclass
class Place:
    """One rank in one communicator, as its process calls it.

    Attributes:
        comm: index in `Arrivals`, -1 while the communicator or its size is not known.
        base: collectives issued before our first, None while not known; how: "exact", "read", "aligned" or "unknown".
        collectives: issued since; peers: sends and receives by (kind, peer); pair_base: what to add to their
            numbers after an attach in the middle (diagnose/pairs.py).
        next_n: number that the next record should bear; missed: records that never came.
        splits: ncclCommSplit and the like so far.
        spoiled: records were lost, and nobody knows of which kind.
        late_ns: where sends and receives were made before the records begin: when those do.
    """

    pointer: int
    key: str | None = None
    comm: int = -1
    rank: int = -1
    base: int | None = None
    how: str = "unknown"
    collectives: int = 0
    peers: dict[tuple[int, int], int] = field(default_factory=dict)
    pair_base: dict[tuple[int, int], int] = field(default_factory=dict)
    next_n: int | None = None
    missed: int = 0
    splits: int = 0
    untold: int = 0
    spoiled: bool = False
    late_ns: int | None = None

    @property
    def numbered(self) -> bool:
        """Whether numbers mean the same operation as its peers'."""
        return self.base is not None and not self.spoiled

    def miss(self, rows: NDArray[Any], mixed: bool) -> NDArray[Any]:
        """Numbers have no holes: one in them is a record that was lost. How many collectives were lost before each.

        A hole before the first record is what was before an attach. Where only sends and receives follow, it was these,
        and diagnose/pairs.py finds how many of each.

        Args:
            rows: operations on this communicator, in the order of their numbers.
            mixed: whether some of them, or of those before, are no collectives.
        """
        n = rows["n"].astype(np.int64)
        is_first = not (self.collectives or self.peers or self.missed)
        first = int(n[0]) if self.next_n is None else self.next_n
        lost: NDArray[Any] = np.maximum(0, n - first - np.arange(len(n)))
        self.next_n = int(n[-1]) + 1
        self.missed += int(lost[-1])
        if not mixed or not lost[-1]:
            return lost  # all of them are collectives, as far as anybody saw
        if is_first and lost[0] == lost[-1] and np.isin(rows["kind"], (SEND, RECV)).all():
            self.late_ns = int(rows["ts_ns"].min())
        else:
            self.spoiled = True
        return np.zeros_like(lost)


class Issuer:
    """What one process issued.

    Attributes:
        log: OPERATION rows; waits: WAIT rows; tape: both in one order, for steps.
        entries: NCCL entries that came as records, nested ones too.
        tids: threads that issued, the newest last.
        early: what was told of the GPU's side before the entries came: records, and their communicators.
        untold_ns: of operations issued until then, it may be lost that the GPU began them.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self.log = Ring(OPERATION, WINDOW)
        self.waits = Ring(WAIT, WAITS)
        self.tape = Tape()
        self.places: dict[int, Place] = {}
        self.old_places: list[Place] = []
        self.entries = 0
        self.tids: dict[int, int] = {}
        self.groups: dict[int, tuple[int, int]] = {}  # tid -> (depth, batch)
        self.synced: dict[int, int] = {}
        self.settled = 0
        self.stale = False  # rows before `settled` have to be told
        self.timed_out_ns: int | None = None
        self.early: tuple[NDArray[Any], NDArray[Any]] | None = None
        self.untold_ns = 0
        self.promised = 0  # NCCL entries that the counters in the kernel had seen a while ago

    def waited_ns(self, from_ns: int, to_ns: int) -> int:
        """How long its threads waited for the device in that time, as far as waits were long and have ended."""
        waits = self.waits.newest(len(self.waits))
        inside = np.minimum(waits["end_ns"], to_ns) - np.maximum(waits["ts_ns"], from_ns)
        return int(np.maximum(inside, 0).sum())

    @property
    def missing(self) -> int:
        """NCCL entries that were made and never came as records; a lower bound while calls are made."""
        return max(0, self.promised - self.entries)

"""What the diagnosis looks at: who issued which NCCL operation, and where every rank's host is, at one moment.

Plain data, so that a model can make it as well as the state of a capture (`diagnose/look.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["DEAD", "FINISHED", "IN_API", "IN_SYNC", "UNKNOWN", "USER", "Comm", "Key", "Operation", "Rank", "Signature",
           "View"]  # fmt: skip

# Where a host is. USER: outside every CUDA and NCCL call that waits. IN_API: inside an NCCL call that has not returned.
# IN_SYNC: inside a CUDA call that waits for the device. FINISHED: it destroyed its communicators, or ended with code 0.
# UNKNOWN: nobody looked, or its records have a gap.
USER, IN_API, IN_SYNC, DEAD, FINISHED, UNKNOWN = "user", "in_api", "in_sync", "dead", "finished", "unknown"

Key = tuple[int | str, ...]
"""What makes calls of several ranks one operation; the first item is the index of its communicator:

- ``(comm, "c", i)``: the i-th collective of more than nothing on it, counted by each rank
- ``(comm, "p", src, dst, i)``: the i-th send from rank src to rank dst of it, and its receive
- ``(comm, "init", 0)``: its creation by ncclCommInitRank and the like
- ``(comm, "split", k)``: the k-th split, shrink or grow of it; all its members take part
- ``(comm, "end", 0)``: finalize, destroy, abort: nobody else has to come
"""


class Signature(NamedTuple):
    """What must agree among the ranks of one operation. `api` is "p2p" for sends and receives; redop and root are -1
    where there is none."""

    api: str
    elements: int
    dtype: int
    redop: int
    root: int


class Operation(NamedTuple):
    """One call, as one rank issued it.

    Attributes:
        rank: index into View.ranks.
        pos: place in the rank's order of issue, over all communicators.
        name: the function called, e.g. "ncclSend".
        stream: handle; operations of one stream run in order of issue, of different streams in any.
        enter_ns: when it was issued: the call's entry, in a group the entry of the ncclGroupEnd.
        returned: whether the call (in a group: the ncclGroupEnd) has returned.
        batch: operations of one group have the same number: issued together, in no order.
        done: known to be complete. False says nothing.
        started: whether it began on the GPU; None where that is not known.
        ended: this rank's GPU has ended its part, which says nothing of the other ranks. False says nothing.
    """

    rank: int
    pos: int
    key: Key
    name: str
    signature: Signature
    stream: int
    enter_ns: int
    returned: bool
    batch: int
    done: bool = False
    started: bool | None = None
    ended: bool = False


@dataclass
class Rank:
    """One rank of the job, which is one process (or one device of it).

    Attributes:
        proc: key of the process.
        state: where its host is, see above.
        since_ns: since when, as far as known.
        api: the function that it is inside, for IN_API and IN_SYNC.
        in_comm: index of the communicator of an NCCL call that it is inside.
        stream: of the wait that it is inside; None: of all streams, or not known.
        operations: what it issued, oldest first; a window that ends now.
        base: for each ``(comm, "c")`` and ``(comm, "p", src, dst)``: how many operations were issued before the window.
            They are done. A key prefix that is not there: 0.
        gap: records of it were lost inside the window: what is missing proves nothing.
    """

    proc: int
    global_rank: int | None
    state: str
    since_ns: int | None = None
    api: str | None = None
    in_comm: int | None = None
    stream: int | None = None
    operations: list[Operation] = field(default_factory=list)
    base: dict[Key, int] = field(default_factory=dict)
    gap: bool = False


@dataclass
class Comm:
    """One communicator.

    Attributes:
        members: rank in the communicator -> index into View.ranks; ranks that nobody traces are missing.
        aligned: whether operation numbers of its members mean the same operation. False after an attach in the middle
            where no way of telling was found: then numbers prove nothing.
    """

    id: str
    nranks: int | None
    members: dict[int, int]
    aligned: bool = True


@dataclass
class View:
    """The job at one moment."""

    now_ns: int
    ranks: list[Rank]
    comms: list[Comm]

"""One process that is read through its shim's segment, and what is said of the segment."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stallscope.capture.gaps import Losses
from stallscope.capture.rings import Drained
from stallscope.capture.segment import (
    GPU_EVENTS,
    GPU_NO_EVENTS,
    GPU_NO_PATH,
    GPU_OFF,
    GPU_OLD,
    GPU_RISK,
    GPU_SLOW,
    GPU_TAKEN,
    Clock,
    Comm,
    Mode,
    Segment,  # fmt: skip
)
from stallscope.capture.segments import start_ticks_of
from stallscope.capture.sums import Sums
from stallscope.capture.target import Target

__all__ = ["ODD", "PLACES", "UNTOLD", "WITNESS", "Held", "ShimSettings", "added", "gap_of",
           "is_of", "losses_of", "rank_rows", "table_row"]  # fmt: skip

IDLE_LOOKS, MOST_REST = 10, 4

# What `Segment.losses` calls them -> what a report says.
PLACES = {
    "overwritten": "the shim's ring was overwritten before it was read",
    "vital_full": "the shim's vital ring was full",
    "no_ring": "the shim had no ring for the thread",
    "busy": "called by a signal handler while the shim wrote a record",
    "stale": "never returned in sight of the shim (longjmp, exception, too deep)",
}
ODD = {
    "no_comm": "operations have no sequence number because its table of communicators was full",
    "unwrapped": "functions were handed out without the shim, which had no wrapper left for them",
    "corrupt": "times something in its segment made no sense",
}

UNTOLD = {
    "exhausted": "operations have no witness of the GPU because too many were waiting for it",
    "busy": "operations have no witness of the GPU because another thread was in the way",
    "unbound": "communicators have no witness of the GPU because there were too many",
}
WITNESS = {
    GPU_EVENTS: "what its GPU begins is told by pairs of CUDA events: that it comes to an operation, up to 0.2 s late",
}
NO_WITNESS = {
    GPU_TAKEN: "NCCL has another profiler plugin",
    GPU_OLD: "NCCL before 2.26 does not tell it",
    GPU_OFF: "STALLSCOPE_SHIM_GPU says off",
    GPU_RISK: "NCCL before 2.31 may fail with a profiler plugin (STALLSCOPE_SHIM_GPU=on takes the risk)",
    GPU_SLOW: "NCCL 2.31 would lose up to 10 % of its throughput (STALLSCOPE_SHIM_GPU=on takes it)",
    GPU_NO_PATH: "the path of libstallscope.so is too long for NCCL",
    GPU_NO_EVENTS: "CUDA events were asked for, and the shim found no driver, or could not start its thread",
}
WITNESS |= {state: f"what its GPU begins is not known: {why}" for state, why in NO_WITNESS.items()}


class ShimSettings(NamedTuple):
    """How much the shims record: `one_in` as for BPF, of launches, copies and short waits; `mode` None: as it is."""

    mode: Mode | None = None
    one_in: float = 100.0


@dataclass
class Held:
    """One process with a segment.

    Attributes:
        fd: the segment, locked unless another capture reads it (`is_passive`).
        begun_ns: when it was made.
        unread: whether records older than the mark may wait in it.
        idle, rest: looks since it had a record, and how many more are let go by without one.
        is_open: False once it was read to its end, or made no sense.
        ranks: rows of `rank_rows` that were sent.
        witness: what was said of the witness of its GPU.
    """

    target: Target
    segment: Segment
    fd: int
    file: tuple[int, int]
    is_passive: bool
    losses: Losses
    begun_ns: int
    sums: Sums = field(default_factory=Sums)
    lost_before: dict[str, int] = field(default_factory=dict)
    unread: bool = True
    idle: int = 0
    rest: int = 0
    is_open: bool = True
    ranks: list[list[Any]] = field(default_factory=list)
    witness: str | None = None

    def pace(self, batch: Drained) -> None:
        """How soon it is looked at again."""
        if batch.n_recs or batch.n_uids:
            self.idle = self.rest = 0
        else:
            self.idle += 1
            self.rest = MOST_REST if self.idle > IDLE_LOOKS else 0

    def history(self, clock: Clock | None) -> dict[str, Any] | None:
        """A GAP: calls whose records nobody read, up to where the vital ones begin; None where there are none."""
        count = self.segment.losses().get("history")
        if not count or clock is None:
            return None
        span = {"from_ns": self.begun_ns, "to_ns": max(self.begun_ns, self.segment.whole_since_ns(clock))}
        return {"source": "shim", "proc": self.target.proc, "count": count, **span, "reason": "before the attach"}

    def odd(self) -> list[str]:
        """What should not have happened."""
        losses = self.segment.losses() | self.segment.gpu_untold()
        return [f"shim: {losses[name]} {what}" for name, what in (ODD | UNTOLD).items() if losses.get(name)]

    def close(self) -> None:
        """Let the segment go; the process keeps it."""
        if self.is_open:
            self.is_open = False
            self.segment.close()
            os.close(self.fd)


def is_of(segment: Segment, target: Target) -> bool:
    """Whether the target made it: a forked child holds its parent's, too, and descriptors can be passed on."""
    header = segment.header
    own = target.facts.ns_pid or target.pid
    now = start_ticks_of(target.pid)
    return header.pid == own and now in (None, header.start_ticks)


def losses_of(segment: Segment) -> dict[str, int]:
    return {PLACES[name]: count for name, count in segment.losses().items() if name in PLACES}


def gap_of(target: Target, now_ns: int, reason: str) -> dict[str, Any]:
    """A GAP: nothing is known of the process."""
    span = {"from_ns": target.appeared_ns, "to_ns": now_ns}
    return {"source": "shim", "proc": target.proc, "count": None, **span, "reason": reason}


def table_row(comm: Comm) -> list[Any]:
    """As COMMS frames have it."""
    newest = comm.last or (0, 0, 0, 0)
    return [comm.pointer, comm.next if comm.last else 0, *newest, comm.rank, comm.nranks, comm.uid or b""]


def rank_rows(comms: list[Comm]) -> list[list[Any]]:
    """The same, with no more than which rank each of them is: records tell the rest."""
    return [[c.pointer, 0, 0, 0, 0, 0, c.rank, c.nranks, b""] for c in comms if c.rank is not None]


def added(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return dict(Counter(one) + Counter(other))

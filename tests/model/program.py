"""What the ranks of a simulated job do: communicators and, for each rank, the order in which its host issues work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from stallscope.diagnose.view import Signature

__all__ = ["LAYOUTS", "MAIN", "SIDE", "Call", "Create", "End", "Instruction", "Job", "Launch", "Layout", "Sync",
           "call", "gpipe", "prologue", "receive", "send"]  # fmt: skip

MAIN, SIDE = 0x1000, 0x2000
"""Streams. A launch on SIDE waits for what was issued on MAIN before it, as frameworks order them by an event."""

FLOAT, BFLOAT16, INT32 = 7, 9, 2
"""ncclDataType_t."""


class Call(NamedTuple):
    """One NCCL call. `peer`: rank in the communicator, -1 for collectives."""

    comm: int
    name: str
    signature: Signature
    peer: int = -1


class Launch(NamedTuple):
    """Calls of one group (mostly one call) on one stream, after what was issued on `after` so far."""

    calls: tuple[Call, ...]
    stream: int = MAIN
    after: int | None = None


class Sync(NamedTuple):
    """cudaDeviceSynchronize."""


class Create(NamedTuple):
    """Blocks the host until all members of `comm` came: its own creation (`init`), or a split of it that gives `gives`."""

    comm: int
    api: str
    gives: tuple[int, ...]


class End(NamedTuple):
    """ncclCommDestroy."""

    comm: int


Instruction = Launch | Sync | Create | End


class Layout(NamedTuple):
    """Sizes of tensor, pipeline and data parallel groups, micro batches a step, tensor-parallel layers a stage; whether
    the host waits between forward and backward; whether communicators come from ncclCommSplit."""

    tp: int
    pp: int
    dp: int
    micro_batches: int
    layers: int
    mid_sync: bool
    split: bool

    @property
    def name(self) -> str:
        """For people, e.g. "tp2-pp4-dp2-sync-split"."""
        more = ("-sync" if self.mid_sync else "") + ("-split" if self.split else "")
        return f"tp{self.tp}-pp{self.pp}-dp{self.dp}-m{self.micro_batches}{more}"


LAYOUTS = (
    Layout(2, 4, 2, 4, 2, False, False),
    Layout(2, 2, 4, 3, 3, True, True),
    Layout(1, 4, 4, 4, 1, False, True),
    Layout(4, 1, 4, 1, 4, False, False),
    Layout(2, 4, 4, 4, 2, True, True),
    Layout(1, 8, 1, 6, 1, False, False),
    Layout(8, 2, 2, 2, 3, False, True),
)


@dataclass
class Job:
    """A job.

    Attributes:
        members: for each communicator, its ranks in order; communicator 0 is all ranks that use NCCL.
        programs: for each rank of the job.
        steps: for each rank, where in its program each step begins, and at last where the steps end.
    """

    names: list[str]
    members: list[list[int]]
    programs: list[list[Instruction]]
    steps: list[list[int]] = field(default_factory=list)

    def named(self, name: str) -> int:
        """Index of a communicator."""
        return self.names.index(name)


def call(comm: int, name: str, elements: int, dtype: int = BFLOAT16, root: int = -1) -> Call:
    """A collective; reductions are sums."""
    redop = 0 if "Reduce" in name else -1
    return Call(comm, name, Signature(name, elements, dtype, redop, root))


def send(comm: int, peer: int, elements: int) -> Call:
    """To `peer`, a rank in the communicator."""
    return Call(comm, "ncclSend", Signature("p2p", elements, BFLOAT16, -1, -1), peer)


def receive(comm: int, peer: int, elements: int) -> Call:
    """From `peer`."""
    return Call(comm, "ncclRecv", Signature("p2p", elements, BFLOAT16, -1, -1), peer)


def prologue(job: Job, rank: int, children: list[int], split: bool) -> list[Instruction]:
    """Creation of the world, then of the children that the rank is in (one split or init each)."""
    out: list[Instruction] = [Create(0, "ncclCommInitRank", (0,))]
    for child in children:
        out.append(Create(0, "ncclCommSplit", (child,)) if split else Create(child, "ncclCommInitRank", (child,)))
    return out


def _communicators(layout: Layout) -> tuple[list[str], list[list[int]]]:
    """All of more than one rank. Ranks count up in tensor, pipeline, data order."""
    tp, pp, dp = layout.tp, layout.pp, layout.dp
    found = {"world": list(range(tp * pp * dp))}
    for p in range(pp):
        for d in range(dp):
            found[f"tp-p{p}-d{d}"] = [(d * pp + p) * tp + t for t in range(tp)]
    for t in range(tp):
        for d in range(dp):
            found[f"pp-t{t}-d{d}"] = [(d * pp + p) * tp + t for p in range(pp)]
        for p in range(pp):
            found[f"dp-t{t}-p{p}"] = [(d * pp + p) * tp + t for d in range(dp)]
    kept = {name: ranks for name, ranks in found.items() if len(ranks) > 1}
    return list(kept), list(kept.values())


class _Place(NamedTuple):
    """One rank's stage and its communicators; None where it would be alone."""

    stage: int
    tp: int | None
    pp: int
    dp: int | None


def _layers(layout: Layout, place: _Place) -> list[Instruction]:
    if place.tp is None:
        return []
    return [Launch((call(place.tp, "ncclAllReduce", 500),))] * layout.layers


def _forward(layout: Layout, place: _Place) -> list[Instruction]:
    out: list[Instruction] = []
    for _ in range(layout.micro_batches):
        if place.stage > 0:
            out.append(Launch((receive(place.pp, place.stage - 1, 1000),)))
        out += _layers(layout, place)
        if place.stage < layout.pp - 1:
            out.append(Launch((send(place.pp, place.stage + 1, 1000),)))
    return out


def _backward(layout: Layout, place: _Place) -> list[Instruction]:
    out: list[Instruction] = []
    for _ in range(layout.micro_batches):
        if place.stage < layout.pp - 1:
            out.append(Launch((receive(place.pp, place.stage + 1, 1000),)))
        out += _layers(layout, place)
        if place.stage > 0:
            out.append(Launch((send(place.pp, place.stage - 1, 1000),)))
    return out


def _step(layout: Layout, place: _Place) -> list[Instruction]:
    """Forward, backward, gradients on the side stream, the loss over all ranks, a wait, then a broadcast."""
    out = _forward(layout, place)
    if layout.mid_sync:
        out.append(Sync())
    out += _backward(layout, place)
    if place.dp is not None:
        out += [Launch((call(place.dp, "ncclReduceScatter", 9000 + b),), SIDE, MAIN) for b in range(2)]
    out += [Launch((call(0, "ncclAllReduce", 1, FLOAT),), MAIN, SIDE), Sync()]
    if place.dp is not None:
        out.append(Launch((call(place.dp, "ncclAllGather", 9000),)))
    return [*out, Launch((call(place.dp or 0, "ncclBroadcast", 16, INT32, 0),))]


def gpipe(layout: Layout, steps: int) -> Job:
    """Training with GPipe: all micro batches forward, then all backward. The parameters' AllGather and a Broadcast
    follow the wait at the end of the step, so a host that runs ahead issues them with the next step."""
    names, members = _communicators(layout)
    job = Job(names, members, [])
    tp, pp = layout.tp, layout.pp
    for rank in members[0]:
        t, p, d = rank % tp, rank // tp % pp, rank // (tp * pp)
        ids = {name: i for i, name in enumerate(names)}
        place = _Place(p, ids.get(f"tp-p{p}-d{d}"), ids.get(f"pp-t{t}-d{d}", -1), ids.get(f"dp-t{t}-p{p}"))
        children = [c for c in (place.tp, place.pp, place.dp) if c is not None and c >= 0]
        program = prologue(job, rank, children, layout.split)
        begins = []
        for _ in range(steps):
            begins.append(len(program))
            program += _step(layout, place)
        job.steps.append([*begins, len(program)])
        job.programs.append([*program, Sync(), *(End(c) for c in [*children, 0])])
    return job

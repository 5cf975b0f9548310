"""What a rank does in a step, in order, and what a fault makes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stallscope.sim.job.faults import CALL_FAULTS, Fault
from stallscope.sim.job.layout import DATA, PIPELINE, TENSOR, WORLD, Layout

INT32, FLOAT32 = 2, 7
SEND, RECV = "ncclSend", "ncclRecv"
ACTIVATIONS = 16384  # elements between stages of the pipeline


@dataclass(frozen=True)
class Launch:
    kernel: str
    times: int


@dataclass(frozen=True)
class Call:
    """One collective: on which kind of communicator, by which function, elements, type."""

    kind: str
    api: str
    count: int
    dtype: int = FLOAT32


@dataclass(frozen=True)
class Transfer:
    """ncclSend or ncclRecv with another stage of the pipeline."""

    api: str
    stage: int
    kind: str = PIPELINE


@dataclass(frozen=True)
class Mark:
    """Here a fault begins, on that kind of communicator."""

    kind: str


@dataclass(frozen=True)
class Flag:
    """A host in step reads a value from the device, as ``isnan(loss)`` does, and waits for all before it."""


Item = Launch | Call | Transfer | Mark | Flag
ALL_REDUCE = Call(TENSOR, "ncclAllReduce", 32768)
GRADIENTS = (Call(DATA, "ncclReduceScatter", 16384), Call(DATA, "ncclAllReduce", 65536))
NORM = Call(WORLD, "ncclAllReduce", 1)
METRIC = Call(WORLD, "ncclAllReduce", 2)


def _pass(kernel: str, times: int, start: int, end: int) -> list[Item]:
    """Forward or backward: from stage `start`, through the kernels, to stage `end`."""
    half: list[Item] = [Launch(kernel, times // 2), ALL_REDUCE]
    return [Transfer(RECV, start), *half, *half, Transfer(SEND, end)]


def schedule(layout: Layout, rank: int) -> list[Item]:
    """A healthy step, without what this layout has no communicator for."""
    stage = layout.place(rank)[2]
    items: list[Item] = _pass("forward_gemm", 8, stage - 1, stage + 1)
    items += _pass("backward_gemm", 12, stage + 1, stage - 1)
    items += [Flag(), *GRADIENTS, Launch("adam_step", 4), NORM]
    return [item for item in items if _is_possible(item, layout)]


def flat(items: list[Item]) -> list[Item]:
    """A step without an exchange of gradients and without an optimizer, as in a warm-up that nobody asked for."""
    left_out = (*GRADIENTS, NORM, Launch("adam_step", 4))
    return [item for item in items if item not in left_out]


def evaluation(layout: Layout, rank: int) -> list[Item]:
    """A forward pass, and a sum of what it gave over all."""
    stage = layout.place(rank)[2]
    items = [*_pass("forward_gemm", 8, stage - 1, stage + 1), METRIC]
    return [item for item in items if _is_possible(item, layout)]


def _is_possible(item: Item, layout: Layout) -> bool:
    if isinstance(item, Transfer):
        return 0 <= item.stage < layout.pp
    return not isinstance(item, Call) or layout.size(item.kind) > 1


def altered(items: list[Item], fault: Fault, layout: Layout, rank: int) -> list[Item]:
    """The step in which it happens, on a rank at fault."""
    if fault.kind == "send-send":
        partner = fault.partner(layout) if rank == fault.rank else fault.rank
        stage = layout.place(partner)[2]
        return [Mark(PIPELINE), Transfer(SEND, stage), Transfer(RECV, stage), *items]
    wanted = WORLD if fault.kind == "transport-stuck" else fault.comm
    if fault.kind not in (*CALL_FAULTS, "transport-stuck"):
        return items
    at = next(index for index, item in enumerate(items) if isinstance(item, Call) and item.kind == wanted)
    call = items[at]
    assert isinstance(call, Call)
    rest = items[at + 1 :]
    if fault.kind == "swap":
        moved = next(item for item in rest if isinstance(item, Call) and item.kind == fault.other)
        rest.remove(moved)
        return [*items[:at], Mark(wanted), moved, call, *rest]
    return [*items[:at], Mark(wanted), *_instead(fault, call), *rest]


def _instead(fault: Fault, call: Call) -> list[Call]:
    """What is called in its place."""
    other = "ncclReduce" if call.api == "ncclAllReduce" else "ncclAllReduce"
    more = call.count + int(fault.values["count"])
    return {
        "skip": [],
        "extra": [call, call],
        "wrong-op": [replace(call, api=other)],
        "wrong-count": [replace(call, count=more)],
        "wrong-dtype": [replace(call, dtype=INT32)],
    }.get(fault.kind, [call])

"""Jobs that loop, as frames: hosts that load, launch, exchange and wait, with the truth about their steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aggregate_kit import DONE, ENTER, Kit

from stallscope.diagnose.follow import Follower
from stallscope.diagnose.steps import StepsFound
from stallscope.output.report import build_report
from stallscope.wire.frames import Frame, Kind

LONG_NS = 200_000
MS = 1_000_000
POINTERS = {"world": 0x5000, "tp": 0x6000, "dp": 0x7000}
FLOAT32, SUM, STREAM = 7, 0, 0x77
TO_DEVICE, TO_HOST = 1, 2

Operation = tuple[str, str, int]  # function, communicator, elements
TP: Operation = ("ncclAllReduce", "tp", 32768)
SCATTER: Operation = ("ncclReduceScatter", "dp", 16384)
GRADIENTS: Operation = ("ncclAllReduce", "dp", 65536)
NORM: Operation = ("ncclAllReduce", "world", 1)
METRIC: Operation = ("ncclAllReduce", "world", 2)


class Host(Kit):
    """One trainer. Waits shorter than 0.2 ms are counted but not recorded, as with a low sampling rate."""

    def __init__(self, *, created: bool = True, proc: int = 1, **changes: Any) -> None:
        super().__init__(**changes)
        self.proc = proc
        self.calls: dict[str, int] = {}
        self.numbers = dict.fromkeys(POINTERS, 0)
        self.ticks = 0
        self.process(proc, start_ns=self.now + (1 if created else -5_000), env={"RANK": str(proc - 1)})
        for library in ("CUDART", "NCCL"):
            self.link(library, proc)
        for rank, name in enumerate(POINTERS if created else ()):
            uid = bytes([rank + 1]) * 8 + b"\x02\x00\xa3\x69\x0a\x00\x00\x07" + bytes(112)
            self.init_rank(0, proc=proc, uid=uid, pointer=POINTERS[name])
            self.now += 6 * MS

    def work(self, ns: int = MS) -> None:
        """The host does something."""
        self.now += ns

    def operation(self, what: Operation, *, lost: bool = False) -> None:
        """An NCCL call."""
        api, comm, elements = what
        words = (1, 2, elements, FLOAT32, SUM, POINTERS[comm], STREAM)
        record = self.record(api, ENTER, slot=self.proc, n=self.numbers[comm], a=words)
        self.numbers[comm] += 1
        self.count(api, self.proc, calls=1)
        if not lost:
            self.recs.append(record)

    def waits(self, api: str, ns: int, size: int = 0, direction: int = 0, *, one_in: int = 0) -> None:
        """A call that waits so long; `one_in`: so many short ones of which one is recorded, 0: none."""
        words = (1, 2, size, direction, STREAM) if api.startswith("cudaMemcpy") else (STREAM,)
        number = self.calls.get(api, 0)
        record = self.record(api, DONE, slot=self.proc, ns=ns, n=number, a=words)
        self.calls[api] = number + 1
        self.now += ns
        is_told = ns >= LONG_NS or (one_in > 0 and number % one_in == 0)
        self.count(api, self.proc, calls=1, sampled_out=not is_told)
        if is_told:
            self.recs.append(record)

    def batch(self, ns: int = 20_000) -> None:
        """Copies a batch to the device."""
        self.waits("cudaMemcpyAsync", ns, 1 << 18, TO_DEVICE)

    def item(self, ns: int = 6 * MS) -> None:
        """Reads a value back."""
        self.waits("cudaMemcpyAsync", ns, 4, TO_HOST)

    def kernels(self, number: int) -> None:
        """Launches; none of them is recorded."""
        self.count("cudaLaunchKernel", self.proc, calls=number, sampled_out=number)

    def step(self, operations: Sequence[Operation] = (SCATTER, GRADIENTS, NORM), *, before: Sequence[Operation] = (),
             wait_ns: int = 6 * MS) -> None:  # fmt: skip
        """A training step: operations before a value is read back, operations behind that."""
        self.batch()
        self.kernels(20)
        for what in before:
            self.operation(what)
            self.work(100_000)
        self.item(wait_ns)
        for what in operations:
            self.operation(what)
            self.work(100_000)
        self.kernels(4)
        self.work(2 * MS)
        self.tick()

    def tick(self) -> None:
        """Every 250 ms; with the counters."""
        if self.now < self.ticks:
            return
        self.ticks = self.now + 250 * MS
        self.counters()
        self.add(Kind.TICK, at_ns=self.now)

    def over(self, *, exits: bool = True) -> Host:
        """The end of the capture; the process has ended before, or goes on."""
        if exits:
            self.add(Kind.EXIT, proc=self.proc, at_ns=self.now, code=0, signal=None)
        self.bye()
        return self

    def follower(self) -> Follower:
        """Who followed the stream."""
        follower = Follower()
        self.flush()
        for kind, body in self.frames:
            follower.apply(Frame(kind, body))
        follower.finish(None)
        return follower

    def found(self) -> StepsFound:
        """What was found out about steps."""
        steps = self.follower().watch.steps
        assert steps is not None
        return steps

    def row(self) -> Any:
        """`steps` of the report."""
        follower = self.follower()
        return build_report(follower.state, follower.watch)["steps"]

"""Hosts that issue work, streams that run it in order, operations that start when all their ranks came.

What it knows of NCCL: calls return before their work is done; a stream runs its launches one after the other; an
operation ends after all its ranks started it, if their signatures agree; the calls of a group start together; a wait for
the device lasts until all streams of the rank are empty; creation calls block the host. Sends wait for their receives.
"""

from __future__ import annotations

import gc
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from stallscope.diagnose.view import DEAD, FINISHED, IN_API, IN_SYNC, Key, Signature

from .program import Call, Create, End, Job, Launch, Sync

__all__ = ["Disturbance", "Host", "Op", "Run", "simulate", "up_to"]

RUNNING, PAUSED = "running", "paused"
COMPUTE_NS, TRANSFER_NS = 400_000, 50_000


@dataclass
class Disturbance:
    """What goes wrong while the programs run; faults in the programs themselves are in the programs.

    Attributes:
        stops: rank -> (place in its program before which the host stops, USER or DEAD).
        stuck: (rank, place in its program): a kernel of its own before that launch, or before that wait, never ends.
        lost: operations that don't end though all their ranks started them.
        queue: launches that a stream holds; a call that finds it full blocks its host. None: any number.
    """

    stops: dict[int, tuple[int, str]] = field(default_factory=dict)
    stuck: set[tuple[int, int]] = field(default_factory=set)
    lost: set[Key] = field(default_factory=set)
    queue: int | None = None


@dataclass(slots=True)
class Batch:
    """The calls of one group: they start together, and the stream goes on when all of them are done. `ops` is emptied at
    the end of the run."""

    number: int
    pc: int
    enter_ns: int
    after: Batch | None
    unfinished: int = 0
    start_ns: int | None = None
    end_ns: int = 0
    ops: list[Op] = field(default_factory=list)


@dataclass(slots=True)
class Op:
    """One call as issued. `pc`: place in the rank's program."""

    rank: int
    pc: int
    key: Key
    call: Call
    stream: int
    enter_ns: int
    batch: Batch
    returned: bool = True
    done: bool = False

    @property
    def started(self) -> bool:
        """Whether its work began on the GPU."""
        return self.batch.start_ns is not None


@dataclass(slots=True)
class Stream:
    """Launches in order; those before `head` are done."""

    batches: list[Batch] = field(default_factory=list)
    head: int = 0
    free_ns: int = 0


@dataclass
class Host:
    """One rank.

    Attributes:
        synced: how many of its calls had been issued before the last wait that returned.
        counts: key without its number -> calls issued.
    """

    rank: int
    state: str = RUNNING
    pc: int = 0
    now_ns: int = 1_000_000
    since_ns: int = 0
    api: str | None = None
    in_comm: int | None = None
    ops: list[Op] = field(default_factory=list)
    synced: int = 0
    batches: int = 0
    died_ns: int | None = None
    streams: dict[int, Stream] = field(default_factory=dict)
    counts: dict[Key, int] = field(default_factory=lambda: defaultdict(int))
    joined: set[int] = field(default_factory=set)
    held: Batch | None = None

    def block(self, state: str, api: str | None = None, comm: int | None = None) -> None:
        """The host goes no further, for now."""
        self.state, self.since_ns, self.api, self.in_comm = state, self.now_ns, api, comm

    def resume(self, now_ns: int) -> None:
        """The call that it was in returns."""
        self.state, self.api, self.in_comm = RUNNING, None, None
        self.now_ns = max(self.now_ns, now_ns)
        self.pc += 1

    def tail(self, stream: int | None) -> Batch | None:
        """The last launch on a stream."""
        found = self.streams.get(stream) if stream is not None else None
        return found.batches[-1] if found and found.batches else None

    def drained(self) -> bool:
        """Whether all that was issued is done."""
        return all(s.head == len(s.batches) for s in self.streams.values())

    def free_ns(self) -> int:
        """When the last launch that is done ended."""
        return max((s.free_ns for s in self.streams.values()), default=0)

    def continued(self) -> Host:
        """A copy that goes on from where this one paused with all its work done."""
        assert self.state == PAUSED and self.drained()
        streams = {k: Stream(s.batches[-1:], len(s.batches[-1:]), s.free_ns) for k, s in self.streams.items()}
        return replace(self, state=RUNNING, ops=list(self.ops), streams=streams, counts=self.counts.copy(),
                       joined=set(self.joined))  # fmt: skip


@dataclass
class Run:
    """How a job ended: in a state that changes no more."""

    job: Job
    hosts: list[Host]
    now_ns: int

    @property
    def hangs(self) -> bool:
        """Whether somebody waits for ever."""
        return any(host.state in (IN_SYNC, IN_API) for host in self.hosts)


class _Simulation:
    def __init__(self, job: Job, disturbance: Disturbance, pace_ns: int, hosts: list[Host]) -> None:
        self.job, self.disturbance, self.pace_ns, self.hosts = job, disturbance, pace_ns, hosts
        self.rank_in = [{rank: i for i, rank in enumerate(members)} for members in job.members]
        self.met: dict[Key, list[Op]] = defaultdict(list)
        self.work = deque(range(len(self.hosts)))
        self.queued = [True] * len(self.hosts)

    def run(self) -> Run:
        while self.work:
            host = self.hosts[self.work.popleft()]
            self.queued[host.rank] = False
            self.issue(host)
            while self.advance(host):
                self.issue(host)
        latest = max(max(h.now_ns, h.free_ns()) for h in self.hosts)
        for host in self.hosts:
            for op in host.ops:
                op.batch.ops.clear()
        return Run(self.job, self.hosts, latest + 5_000_000_000)

    def issue(self, host: Host) -> None:
        """The host runs until something blocks it. Its GPU looks at the new work only afterwards, so a death is known
        before anything issued shortly before it can end."""
        while self.goes_on(host):
            while host.state == RUNNING:
                self.step(host)

    def goes_on(self, host: Host) -> bool:
        """Whether the host runs, or what it waits for is there."""
        if host.state == IN_SYNC and host.drained() and (host.rank, host.pc) not in self.disturbance.stuck:
            host.resume(host.free_ns())
            host.synced = len(host.ops)
        elif host.held is not None and not self.full(host, host.ops[-1].stream):
            self.enqueue(host, host.held, host.ops[-1].stream)
            host.held = None
            host.resume(host.free_ns())
        return host.state == RUNNING

    def step(self, host: Host) -> None:
        program = self.job.programs[host.rank]
        pc, state = self.disturbance.stops.get(host.rank, (-1, ""))
        if host.pc == pc:
            host.block(state)
            host.died_ns = host.now_ns if state == DEAD else None
        elif host.pc == len(program):
            host.block(FINISHED)
        else:
            self.execute(host, program[host.pc])
            host.now_ns += self.pace_ns

    def execute(self, host: Host, what: Launch | Sync | Create | End) -> None:
        if isinstance(what, Launch):
            self.launch(host, what)
        elif isinstance(what, Sync):
            host.block(IN_SYNC, "cudaDeviceSynchronize")
        elif isinstance(what, Create):
            self.create(host, what)
        else:
            self.record(host, (what.comm, "end", 0), Call(what.comm, "ncclCommDestroy", plain("end")), 0)
            host.ops[-1].done = True
            host.pc += 1

    def launch(self, host: Host, what: Launch) -> None:
        batch = self.batch(host, what.after)
        for one in what.calls:
            prefix = self.prefix(host.rank, one)
            self.record(host, (*prefix, host.counts[prefix]), one, what.stream, batch)
            host.counts[prefix] += 1
        if self.full(host, what.stream):
            host.held = batch
            for op in batch.ops:
                op.returned = False
            return host.block(IN_API, "ncclGroupEnd" if len(what.calls) > 1 else what.calls[0].name, what.calls[0].comm)
        self.enqueue(host, batch, what.stream)
        host.pc += 1

    def enqueue(self, host: Host, batch: Batch, stream: int) -> None:
        host.streams.setdefault(stream, Stream()).batches.append(batch)
        for op in batch.ops:
            op.returned = True

    def full(self, host: Host, stream: int) -> bool:
        found, limit = host.streams.get(stream), self.disturbance.queue
        return limit is not None and found is not None and len(found.batches) - found.head >= limit

    def prefix(self, rank: int, one: Call) -> Key:
        if one.peer < 0:
            return (one.comm, "c")
        me = self.rank_in[one.comm][rank]
        return (one.comm, "p", me, one.peer) if one.name == "ncclSend" else (one.comm, "p", one.peer, me)

    def batch(self, host: Host, after: int | None) -> Batch:
        host.batches += 1
        return Batch(host.batches, host.pc, host.now_ns, host.tail(after))

    def record(self, host: Host, key: Key, one: Call, stream: int, batch: Batch | None = None) -> Op:
        batch = batch or self.batch(host, None)
        op = Op(host.rank, host.pc, key, one, stream, host.now_ns, batch)
        batch.ops.append(op)
        batch.unfinished += 1
        host.ops.append(op)
        return op

    def create(self, host: Host, what: Create) -> None:
        """The k-th creation call on its communicator; all who came return when the last one comes."""
        kind = "init" if what.api == "ncclCommInitRank" else "split"
        number = host.counts[(what.comm, kind)]
        host.counts[(what.comm, kind)] += 1
        op = self.record(host, (what.comm, kind, number), Call(what.comm, what.api, plain(kind)), 0)
        op.returned = False
        host.block(IN_API, what.api, what.comm)
        if kind == "init":
            host.joined.add(what.comm)
        met = self.met[op.key]
        met.append(op)
        if len(met) < len(self.job.members[what.comm]):
            return
        for other in met:
            other.returned = other.done = True
            self.created(self.hosts[other.rank], max(one.enter_ns for one in met))

    def created(self, host: Host, now_ns: int) -> None:
        what = self.job.programs[host.rank][host.pc]
        assert isinstance(what, Create)
        host.joined.update(what.gives)
        host.resume(now_ns)
        self.wake(host.rank)

    def wake(self, rank: int) -> None:
        if not self.queued[rank]:
            self.queued[rank] = True
            self.work.append(rank)

    def advance(self, host: Host) -> bool:
        """The rank's GPU starts what it can. Returns whether a stream went on."""
        moved = False
        for stream in host.streams.values():
            while stream.head < len(stream.batches):
                batch = stream.batches[stream.head]
                if batch.start_ns is None and not self.start(host, stream, batch):
                    break
                if batch.unfinished:
                    break
                stream.free_ns = batch.end_ns
                stream.head += 1
                moved = True
        return moved

    def start(self, host: Host, stream: Stream, batch: Batch) -> bool:
        after = batch.after
        if (after is not None and after.unfinished) or (host.rank, batch.pc) in self.disturbance.stuck:
            return False
        begin = max(batch.enter_ns, stream.free_ns, after.end_ns if after else 0) + COMPUTE_NS
        if host.died_ns is not None and begin > host.died_ns:
            return False
        batch.start_ns = begin
        for op in batch.ops:
            self.meet(op)
        return True

    def meet(self, op: Op) -> None:
        """An operation started on one more rank; it ends when that was the last."""
        met = self.met[op.key]
        met.append(op)
        needed = 2 if op.key[1] == "p" else len(self.job.members[op.call.comm])
        if len(met) < needed or op.key in self.disturbance.lost or len({one.call.signature for one in met}) > 1:
            return
        end = max(one.batch.start_ns or 0 for one in met) + TRANSFER_NS
        deaths = [self.hosts[one.rank].died_ns for one in met]
        if any(death is not None and death < end for death in deaths):
            return
        for one in met:
            one.done = True
            one.batch.unfinished -= 1
            one.batch.end_ns = max(one.batch.end_ns, end)
            self.wake(one.rank)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Looking for cycles among 10^5 objects that live on anyway takes a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def plain(api: str) -> Signature:
    """Of a call that has no data."""
    return Signature(api, 0, -1, -1, -1)


def simulate(job: Job, disturbance: Disturbance | None = None, pace_ns: int = 10_000, start: Run | None = None) -> Run:
    """Run a job until nothing changes any more.

    Args:
        job: what its ranks do.
        disturbance: what goes wrong.
        pace_ns: what a call costs the host. Far below COMPUTE_NS: hosts run ahead of their GPUs; above: in step.
        start: goes on from there (`up_to`); up to there the programs must be the same.
    """
    hosts = [host.continued() for host in start.hosts] if start else [Host(rank) for rank in range(len(job.programs))]
    with _no_collection():
        return _Simulation(job, disturbance or Disturbance(), pace_ns, hosts).run()


def up_to(job: Job, places: list[int], pace_ns: int) -> Run:
    """Run a job until each rank's host is at its place in its program, and all that was issued is done.

    The same as in a run that does not stop there, unless a host dies while something issued before is under way.
    """
    return simulate(job, Disturbance(stops={rank: (pc, PAUSED) for rank, pc in enumerate(places)}), pace_ns)

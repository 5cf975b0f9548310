"""What a witness tells of the GPU's side: joined to the operations, believed only without gaps, and what it decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from aggregate_kit import DONE, START, call
from test_operations import POINTER, STREAM, Job

from stallscope.aggregate.starts import Starts
from stallscope.aggregate.state import State
from stallscope.diagnose.begun import Begun
from stallscope.diagnose.completed import Completed
from stallscope.diagnose.judge import judge
from stallscope.diagnose.look import Looker
from stallscope.diagnose.stragglers import Straggler, stragglers
from stallscope.diagnose.verdict import Verdict
from stallscope.diagnose.view import Operation
from stallscope.wire.frames import Frame, Kind
from stallscope.wire.hook_table import BY_NAME

STARTED, FINISHED, QUEUED, BY_PLUGIN = 7, 8, 9, 128
MS = 1_000_000


class Told(Job):
    """Two ranks whose NCCL has our plugin; with flags 0 pairs of events tell it."""

    flags = BY_PLUGIN

    def told(
        self, proc: int, *kinds: int, n: int | None = None, api: str = "ncclAllReduce", at: int | None = None
    ) -> None:
        """Of the newest operation, or of number `n`."""
        comm = BY_NAME[api].arguments.split().index("comm")
        words = (*[0] * comm, POINTER[proc])
        number = self.numbers[proc] - 1 if n is None else n
        for kind in kinds:
            self.recs.append(self.record(api, kind, slot=proc, tid=9, n=number, at=at, flags=self.flags, a=words))

    def gap(self, proc: int | None, to: int) -> None:
        """Records that did not fit."""
        self.add(Kind.GAP, source="shim", proc=proc, count=3, from_ns=0, to_ns=to, reason="vital ring full")


def operations(state: State, rank: int = 0) -> list[Operation]:
    return Looker(state, state.now_ns).view.ranks[rank].operations


def begun(job: Told, rank: int = 0) -> list[bool | None]:
    return [operation.started for operation in operations(job.state(), rank)]


def test_an_operation_is_queued_then_begun_then_ended() -> None:
    job = Told()
    for kinds in ((), (QUEUED,), (QUEUED, STARTED), (QUEUED, STARTED, FINISHED)):
        job.reduce(1)
        job.told(1, *kinds)
    found = operations(job.state())
    assert [op.started for op in found] == [None, False, True, True]
    assert [op.ended for op in found] == [False, False, False, True]


def test_they_are_no_calls() -> None:
    job = Told()
    job.reduce(1)
    before = job.state()
    job.told(1, QUEUED, STARTED, FINISHED)
    after = job.state()
    assert (after.events.total, after.processes.table[1].events) == (
        before.events.total,
        before.processes.table[1].events,
    )
    assert after.operations.issuers[1].missing == 0


def test_what_overtakes_the_entry_waits_for_it() -> None:
    job = Told()
    later = job.now + 1000
    job.told(1, QUEUED, STARTED, n=0, at=later)
    job.add(Kind.TICK, at_ns=later)
    job.reduce(1)
    assert begun(job) == [True]


def test_what_is_told_late_is_not_taken_for_another_communicator() -> None:
    """It had another one at that address, of whose operation 0 the end comes only now."""
    job = Told()
    job.reduce(1)
    old = job.now
    job.numbers[1] = 0
    job.init_rank(0, proc=1, pointer=POINTER[1], uid=bytes(range(9, 17)) + bytes(120))
    job.told(1, STARTED, n=0, at=old + 5)
    job.reduce(1)
    assert begun(job) == [None]


def test_operations_are_told_apart_by_their_numbers() -> None:
    job = Told()
    for _ in range(3):
        job.reduce(1)
        job.told(1, QUEUED)
    job.send(1, 1)
    job.told(1, QUEUED, api="ncclSend")
    job.reduce(1, elements=0)
    job.told(1, STARTED, n=1)
    job.told(1, STARTED, n=3, api="ncclSend")
    job.told(1, STARTED, n=77)
    assert begun(job) == [False, True, False, True]


@pytest.mark.parametrize("api", ["ncclBroadcast", "ncclReduce", "ncclSend"])
def test_one_rank_may_end_some_operations_before_others_begin_them(api: str) -> None:
    job = Told()
    words = {"ncclBroadcast": (1, 2, 8, 7, 0), "ncclReduce": (1, 2, 8, 7, 0, 0), "ncclSend": (1, 8, 7, 1)}[api]
    job.call(1, api, *words, POINTER[1], STREAM)
    job.told(1, QUEUED, STARTED, FINISHED, api=api)
    (found,) = operations(job.state())
    assert (found.ended, found.done) == (True, False)


def test_a_received_message_and_a_symmetric_collective_end_for_all() -> None:
    job = Told()
    job.send(1, 1, "ncclRecv")
    job.told(1, QUEUED, STARTED, FINISHED, api="ncclRecv")
    job.reduce(1)
    job.told(1, QUEUED, STARTED, FINISHED)
    assert [op.done for op in operations(job.state())] == [True, True]


@pytest.mark.parametrize(("proc", "expected"), [(1, None), (None, None), (2, False)])
def test_nothing_is_concluded_from_a_beginning_that_may_have_been_lost(proc: int | None, expected: bool | None) -> None:
    job = Told()
    job.reduce(1)
    job.told(1, QUEUED)
    job.gap(proc, job.now)
    job.reduce(1)
    job.told(1, QUEUED)
    job.reduce(1)
    job.told(1, QUEUED, STARTED)
    assert begun(job) == [expected, False, True]


# What it decides.


def blocked(told: dict[int, tuple[int, ...]], gap: int | None = 0, by: int = BY_PLUGIN) -> list[Verdict]:
    """Both ranks have issued five operations and wait; what was told of the last one, by process.

    Of those before it NCCL tells everything, and pairs of events that the newest has ended.
    """
    job = Told()
    job.flags = by
    before = (QUEUED, STARTED, FINISHED)
    for i in range(5):
        for proc in (1, 2):
            job.reduce(proc)
            job.told(proc, *(told[proc] if i == 4 else before if by else before[2:] if i == 3 else ()))
    since = job.now
    if gap != 0:
        job.gap(gap, job.now)
    job.now += 3_000_000_000
    rows: list[Any] = [[proc, 4000 + proc, [call("cudaStreamSynchronize", since, a=(STREAM,))]] for proc in (1, 2)]
    job.inflight(rows, final=False)
    state = job.state()
    return judge(Looker(state, state.now_ns).view)


@pytest.mark.parametrize("by", [BY_PLUGIN, 0])
def test_the_rank_whose_gpu_does_not_come_to_it_is_named(by: int) -> None:
    (verdict,) = blocked({1: (QUEUED, STARTED), 2: (QUEUED,)}, by=by)
    assert (verdict.kind, verdict.culprits, verdict.key) == ("GPU_STUCK", (1,), (0, "c", 4))
    assert (verdict.evidence, verdict.confidence) == ("gpu_start", "high")


@pytest.mark.parametrize("by", [BY_PLUGIN, 0])
def test_begun_everywhere_and_ended_nowhere_is_the_transport(by: int) -> None:
    (verdict,) = blocked({1: (QUEUED, STARTED), 2: (QUEUED, STARTED)}, by=by)
    assert (verdict.kind, verdict.culprits, verdict.key) == ("ALL_ARRIVED", (), (0, "c", 4))
    assert verdict.evidence == "gpu_start"


@pytest.mark.parametrize(
    ("told", "gap"),
    [
        ({1: (QUEUED, STARTED), 2: ()}, 0),
        ({1: (), 2: (QUEUED,)}, 0),
        ({1: (QUEUED, STARTED), 2: (QUEUED,)}, 2),
        ({1: (QUEUED, STARTED), 2: (QUEUED,)}, None),
        ({1: (), 2: ()}, 0),
    ],
    ids=["no witness there", "no witness here", "lost there", "lost anywhere", "no witness"],
)
def test_without_a_witness_on_every_rank_nobody_is_accused(told: dict[int, tuple[int, ...]], gap: int | None) -> None:
    (verdict,) = blocked(told, gap)
    assert (verdict.kind, verdict.culprits, verdict.evidence) == ("ALL_ARRIVED", (), "api")


def test_in_a_group_one_kernel_waits_for_the_first_of_its_operations() -> None:
    """Rank 0's kernel began and stands in its send; that its receive did not begin does not accuse its GPU."""
    job = Told()
    for proc, first in ((1, "ncclSend"), (2, "ncclRecv")):
        job.group(proc, "ncclGroupStart")
        for api in (first, "ncclRecv" if first == "ncclSend" else "ncclSend"):
            job.send(proc, 2 - proc, api)
            told = (QUEUED,) if (proc, api) == (1, "ncclRecv") else (QUEUED, STARTED)
            job.told(proc, *told, api=api, at=job.now + 1000)
        job.group(proc, "ncclGroupEnd")
    job.now += 3_000_000_000
    rows: list[Any] = [[proc, 4000 + proc, [call("cudaStreamSynchronize", job.now - 10)]] for proc in (1, 2)]
    job.inflight(rows, final=False)
    state = job.state()
    (verdict,) = judge(Looker(state, state.now_ns).view)[:1]
    assert (verdict.kind, verdict.culprits, verdict.evidence) == ("ALL_ARRIVED", (), "gpu_start")


# Who is slow.


def straggling(job: Told) -> list[Straggler]:
    job.add(Kind.TICK, at_ns=job.now)
    state = State()
    completed = begun = None
    for kind, body in job.frames:
        state.apply(Frame(kind, body))
        if kind == Kind.TICK:
            completed = completed or Completed(state)
            begun = begun or Begun(state, completed)
            completed.step()
            begun.step()
    assert state.dropped is None and completed and begun
    return stragglers(state, completed, begun)


def steps(job: Told, number: int, host_ns: dict[int, int], gpu_ns: dict[int, int]) -> None:
    """All-reduces 5 ms apart: when each host calls it, and when each GPU begins it."""
    for step in range(number):
        at = START + 100 * MS + step * 5 * MS
        for proc in (1, 2):
            job.reduce(proc, at=at + host_ns[proc])
        for proc in (1, 2):
            job.told(proc, QUEUED, at=at + host_ns[proc] + 1)
            job.told(proc, STARTED, at=at + gpu_ns[proc])
        job.now = at + 5 * MS
        job.add(Kind.TICK, at_ns=job.now)


def test_where_hosts_run_ahead_the_gpu_that_begins_last_is_the_slow_one() -> None:
    """Rank 0's host calls last each time, and delays nobody: rank 1's GPU does."""
    job = Told()
    steps(job, 200, host_ns={1: MS, 2: 0}, gpu_ns={1: 2 * MS, 2: 4 * MS})
    (one,) = straggling(job)
    assert (one.rank, one.proc, one.percent, one.own_ns, one.evidence) == (1, 2, 100, 2 * MS, "gpu_start")


def test_when_a_pair_of_events_was_asked_says_not_who_is_slow() -> None:
    """Up to a fifth of a second late, on each rank by another time."""
    job = Told()
    job.flags = 0
    steps(job, 200, host_ns={1: MS, 2: 0}, gpu_ns={1: 2 * MS, 2: 4 * MS})
    state = job.state()
    assert (state.operations.starts.times, straggling(job)) == ({}, [])
    assert {op.started for op in operations(state)} == {True}


def test_gpus_that_take_turns_are_no_stragglers() -> None:
    job = Told()
    for _ in range(100):
        for late in (1, 2):
            at = job.now = job.now + 5 * MS
            for proc in (1, 2):
                job.reduce(proc, at=at)
                job.told(proc, QUEUED, STARTED, at=at + (2 if proc == late else 1) * MS)
            job.add(Kind.TICK, at_ns=at + 3 * MS)
    assert straggling(job) == []


def test_a_host_that_is_elsewhere_now_and_then_makes_no_straggler_of_its_gpu() -> None:
    """20 times in 200: those are episodes."""
    job = Told()
    for step in range(200):
        at = job.now = job.now + 5 * MS
        pause = 100 * MS if step % 10 == 9 else 0
        job.reduce(1, at=at)
        job.told(1, QUEUED, STARTED, at=at + 1000)
        job.reduce(2, at=at + pause)
        job.told(2, QUEUED, STARTED, at=at + pause + 1000)
        job.now = at + pause
        job.add(Kind.TICK, at_ns=job.now + 2000)
    assert straggling(job) == []


def test_begins_that_were_not_told_leave_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts()
    starts.began(0, 2, 0, np.arange(600), np.arange(1, 601))
    assert starts.times[0].shape == (2, 512) and int(starts.upto[0][0]) == 600
    starts.began(0, 2, 0, np.array([605]), np.array([7]))
    found = starts.times[0][0, np.arange(598, 606) % 512]
    assert found.tolist() == [599, 600, 0, 0, 0, 0, 0, 7]
    starts.began(0, 2, 0, np.array([603, 3]), np.array([9, 9]))
    assert starts.times[0][0, 603 % 512] == 9 and int(starts.times[0][0, 3]) != 9
    monkeypatch.setattr(starts, "_cells", 1 << 20)
    starts.began(1, 2, 0, np.arange(1), np.arange(1))
    assert 1 not in starts.times


def test_hosts_that_are_late_by_themselves_make_no_straggler_where_gpus_begin_together() -> None:
    job = Told()
    for step in range(200):
        at = START + 100 * MS + step * 5 * MS
        for proc in (1, 2):
            job.reduce(proc, at=at + (proc - 1) * 3 * MS)
            job.told(proc, QUEUED, at=at + 3 * MS + 1)
            job.told(proc, STARTED, at=at + 4 * MS + proc)
            wait = job.record("cudaStreamSynchronize", DONE, slot=proc, ns=2 * MS, at=at, a=(STREAM,))
            job.recs.append(wait)
        job.now = at + 5 * MS
        job.add(Kind.TICK, at_ns=job.now)
    assert straggling(job) == []

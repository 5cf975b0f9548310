"""Waits for late ranks: which are episodes, whose they are, how many there were."""

from __future__ import annotations

import numpy as np
import pytest
from aggregate_kit import DONE, START
from test_operations import STREAM, Job

from stallscope.aggregate.state import State
from stallscope.diagnose.begun import Begun
from stallscope.diagnose.completed import Completed, Late
from stallscope.diagnose.episodes import Episodes
from stallscope.diagnose.stragglers import stragglers
from stallscope.wire.frames import Frame, Kind

MS = 1_000_000


class Timed(Job):
    """Steps of one all-reduce each, `lateness_ns` between first and second rank."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = START + 100 * MS

    def step(self, lateness_ns: int = 0, late: int = 2, gap_ns: int = 5 * MS) -> None:
        """Both ranks call, one of them late."""
        first = 3 - late
        self.reduce(first, at=self.clock)
        self.reduce(late, at=self.clock + lateness_ns)
        self.clock += lateness_ns + gap_ns

    def waited(self, proc: int, start_ns: int, duration_ns: int) -> None:
        """A cudaStreamSynchronize that ended."""
        self.recs.append(self.record("cudaStreamSynchronize", DONE, slot=proc, ns=duration_ns, at=start_ns,
                                     a=(STREAM,)))  # fmt: skip

    def tick(self) -> None:
        """All so far is there."""
        self.now = max(self.now, self.clock)
        self.add(Kind.TICK, at_ns=self.now)


def run(job: Timed) -> tuple[State, Completed, Episodes]:
    """Everything, with a step of the diagnosis at each tick."""
    job.tick()
    state = State()
    completed = episodes = None
    for kind, body in job.frames:
        state.apply(Frame(kind, body))
        if kind == Kind.TICK:
            completed = completed or Completed(state)
            episodes = episodes or Episodes(state, completed)
            completed.step()
            episodes.step(body["at_ns"])
    assert state.dropped is None
    assert completed and episodes
    episodes.finish()
    return state, completed, episodes


def test_eight_hundred_short_waits_and_one_long_one_are_801() -> None:
    job = Timed()
    random = np.random.default_rng(7)
    for step in range(20_000):
        job.step(int(random.exponential(300_000)), late=1 + step % 2)
        if step % 25 == 24:
            job.step(50 * MS)
        if step % 500 == 0:
            job.tick()
    job.step(20_000 * MS)
    _, completed, episodes = run(job)
    (row,) = episodes.rows()
    assert (row.place.pid, row.place.rank, row.count) == (4002, 1, 801)
    assert (row.max_ns, row.longest[0].duration_ns) == (20_000 * MS, 20_000 * MS)
    assert row.total_ns == 800 * 50 * MS + 20_000 * MS
    assert sum(completed.calls.values()) == 20_801


def test_what_is_usual_is_no_episode() -> None:
    job = Timed()
    for _ in range(200):
        job.step(30 * MS)  # the first ones count: nobody knew yet
    _, _, episodes = run(job)
    assert sum(row.count for row in episodes.rows()) <= 200
    job.tick()
    before = sum(row.count for row in run(job)[2].rows())
    for _ in range(50):
        job.step(2 * MS)
    assert sum(row.count for row in run(job)[2].rows()) == before


def test_calls_after_the_late_one_are_not_late_again() -> None:
    job = Timed()
    for at in range(3):
        job.reduce(1, at=job.clock + at)
    for at in range(3):
        job.reduce(2, at=job.clock + 60 * MS + at)
    (row,) = run(job)[2].rows()
    assert (row.count, row.max_ns, row.longest[0].seq, row.longest[0].op) == (1, 60 * MS, 0, "ncclAllReduce")


def test_a_rank_that_waited_for_the_late_one_is_not_at_fault_itself() -> None:
    job = Timed()
    job.step()
    late_ns = job.clock
    job.step(100 * MS, late=2)
    # Rank 0 then comes late for another reason that nobody knows: that one is its own.
    job.step(40 * MS, late=1)
    state, _, episodes = run(job)
    assert sorted((row.place.rank, row.count) for row in episodes.rows()) == [(0, 1), (1, 1)]
    assert state.operations.arrivals.comms == 1
    assert late_ns < job.clock


def test_a_wait_found_before_its_cause_is_charged_after_it() -> None:
    job = Timed()
    job.step()
    start = job.clock
    job.waited(1, start, 50 * MS)
    job.clock += 60 * MS
    state, completed, _ = run(job)
    (signature,) = [value for _, value in completed.calls]
    victim = Late(0, 0, 7, start, start + 50 * MS, signature)
    cause = Late(0, 1, 6, start - 2 * MS, start + 49 * MS, signature)
    episodes = Episodes(state, completed)
    completed.late = [victim]
    episodes.step(start + 60 * MS)
    completed.late = [cause]
    episodes.step(start + 300 * MS)
    assert episodes.rows() == []  # others could still come
    completed.late = []
    episodes.step(start + 600 * MS)
    (row,) = episodes.rows()
    assert (row.place.rank, row.count, row.max_ns) == (1, 1, 51 * MS)


def test_ranks_that_call_differently_are_seen() -> None:
    job = Timed()
    job.step()
    job.reduce(1, elements=8, at=job.clock)
    job.reduce(2, elements=16, at=job.clock)
    _, completed, _ = run(job)
    (odd,) = completed.odd
    assert (odd.number, len(set(odd.signatures))) == (1, 2)


@pytest.mark.parametrize("late", [1, 2])
def test_a_rank_that_is_always_last_by_much_is_a_straggler(late: int) -> None:
    job = Timed()
    for _ in range(200):
        job.step(3 * MS, late=late)
        for proc in (1, 2):
            job.waited(proc, job.clock - 2 * MS, MS)
    state, completed, _ = run(job)
    (one,) = stragglers(state, completed, Begun(state, completed))
    assert (one.rank, one.percent, one.own_ns) == (late - 1, 100, 3 * MS)


def test_a_host_that_is_ahead_of_its_gpu_delays_nobody() -> None:
    job = Timed()
    for _ in range(200):
        job.step(3 * MS)
    state, completed, _ = run(job)
    assert stragglers(state, completed, Begun(state, completed)) == []


def test_a_host_that_is_ahead_and_waits_for_its_gpu_does() -> None:
    job = Timed()
    for _ in range(200):
        start_ns = job.clock
        job.step(3 * MS)
        job.recs.append(job.record("cudaEventSynchronize", DONE, slot=2, ns=2 * MS, at=start_ns + MS // 2, a=(1,)))
    state, completed, _ = run(job)
    (one,) = stragglers(state, completed, Begun(state, completed))
    assert (one.rank, one.percent) == (1, 100)


def test_ranks_that_take_turns_are_no_stragglers() -> None:
    job = Timed()
    for at in range(400):
        job.step(3 * MS, late=1 + at % 2)
        for proc in (1, 2):
            job.waited(proc, job.clock - 2 * MS, MS)
    state, completed, _ = run(job)
    assert stragglers(state, completed, Begun(state, completed)) == []

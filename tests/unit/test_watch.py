"""Blocks over time: when they are told, what ends them, what is not said."""

from __future__ import annotations

from typing import Any

import pytest
from aggregate_kit import ENTER, START, Kit
from test_operations import POINTER, STREAM, Job

from stallscope.diagnose.follow import Follower
from stallscope.diagnose.incident import Incident
from stallscope.wire.frames import Frame, Kind
from stallscope.wire.hook_table import BY_NAME

MS, SECOND = 1_000_000, 1_000_000_000
TICK_NS = 250 * MS
STEPS = 40


class Blocked(Job):
    """Two ranks that work together for a while, then one of them waits; frames go to a follower as they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.follower = Follower()
        self.sent = 0
        self.clock = START + SECOND
        for _ in range(STEPS):
            for proc in (1, 2):
                self.reduce(proc, at=self.clock)
            self.clock += 10 * MS
        self.waiting_since = self.clock

    def wait(self) -> None:
        """Rank 0 calls, and waits for the device."""
        self.reduce(1, at=self.clock)
        self.waiting_since = self.clock

    def tick(self, *, waits: bool = True) -> None:
        """A look at the threads, and the time."""
        self.counters()
        hook, a = BY_NAME["cudaStreamSynchronize"].id, [STREAM, *[0] * 7]
        rows = [[1, 4001, [[hook, self.waiting_since, 1, 0, a]]]] if waits else []
        self.add(Kind.INFLIGHT, at_ns=self.clock, final=False, rows=rows)
        self.add(Kind.TICK, at_ns=self.clock)
        for kind, body in self.frames[self.sent :]:
            self.follower.apply(Frame(kind, body))
        self.sent = len(self.frames)
        assert self.follower.state.dropped is None

    def run(self, seconds: float, *, waits: bool = True) -> list[Incident]:
        """Ticks for so long."""
        for _ in range(int(seconds * SECOND) // TICK_NS):
            self.clock += TICK_NS
            self.tick(waits=waits)
        return self.follower.watch.incidents

    def host(self, proc: int, **more: Any) -> None:
        """A look at a host."""
        thread = [4000 + proc, "python", "S", "read", "pipe_read", "pipe:[77]", 0]
        body = {"at_ns": self.clock, "proc": proc, "calls": 5, "threads": [thread], "writing": None}
        self.add(Kind.HOST, **(body | more))


def told(incident: Incident) -> tuple[str, list[int | None], str]:
    return incident.kind, [culprit.place.global_rank for culprit in incident.culprits], incident.outcome


def test_a_block_is_told_after_two_seconds_and_one_to_make_sure() -> None:
    job = Blocked()
    job.wait()
    assert job.run(2.75) == []
    (incident,) = job.run(0.75)
    assert told(incident) == ("NOT_ARRIVED", [1], "running")
    assert (incident.op, incident.seq, incident.start_ns) == ("ncclAllReduce", STEPS, job.waiting_since)
    assert 3 * SECOND <= incident.reported_ns - incident.start_ns <= 3.5 * SECOND
    assert [place.global_rank for place in incident.victims] == [0]


def test_who_comes_ends_it_at_that_moment() -> None:
    job = Blocked()
    job.wait()
    job.run(4)
    came = job.clock + 10 * MS
    job.reduce(2, at=came)
    (incident,) = job.run(2, waits=False)
    assert (incident.outcome, incident.end_ns) == ("resolved", came)
    (episode,) = job.follower.watch.episodes
    assert (episode.place.global_rank, episode.count, episode.max_ns) == (1, 1, came - job.waiting_since)


def test_a_block_that_ends_before_it_is_told_is_an_episode_only() -> None:
    job = Blocked()
    job.wait()
    job.run(2.5)
    job.reduce(2, at=job.clock)
    assert job.run(3, waits=False) == []
    assert [episode.count for episode in job.follower.watch.episodes] == [1]


def test_who_died_is_told_so() -> None:
    job = Blocked()
    job.wait()
    job.add(Kind.EXIT, proc=2, at_ns=job.clock, code=None, signal=9)
    (incident,) = job.run(4)
    assert told(incident) == ("DIED", [1], "running")


@pytest.mark.parametrize(("code", "signal", "kind"), [(1, None, "DIED"), (None, 11, "DIED"), (None, 9, "NOT_ARRIVED")])
def test_who_ends_by_itself_after_it_was_told_has_died(code: int | None, signal: int | None, kind: str) -> None:
    """An interpreter that tidies up after an exception; a rank that hung and was killed has not died of itself."""
    job = Blocked()
    job.wait()
    job.run(4)
    job.add(Kind.EXIT, proc=2, at_ns=job.clock, code=code, signal=signal)
    (incident,) = job.run(2)
    assert told(incident) == (kind, [1], "running")


@pytest.mark.parametrize(("signal", "outcome"), [(6, "timed_out"), (15, "aborted")])
def test_the_end_of_all_that_wait_is_the_end_of_it_also_at_the_end_of_the_stream(signal: int, outcome: str) -> None:
    job = Blocked()
    job.wait()
    job.run(4)
    job.add(Kind.EXIT, proc=1, at_ns=job.clock, code=None, signal=signal)
    (incident,) = job.run(0.25, waits=False)
    assert incident.outcome == "running"
    job.follower.finish(None)
    assert (incident.outcome, incident.end_ns) == (outcome, job.clock - TICK_NS)


def test_a_job_that_gives_up_has_timed_out() -> None:
    job = Blocked()
    job.wait()
    job.run(4)
    job.recs.append(job.record("ncclCommAbort", ENTER, tid=4999, at=job.clock, a=(POINTER[1],)))
    job.count("ncclCommAbort", calls=1)
    gave_up = job.clock
    (incident,) = job.run(2, waits=False)
    assert told(incident) == ("NOT_ARRIVED", [1], "timed_out")
    assert incident.end_ns == gave_up


def test_nobody_is_blamed_for_an_absence_that_may_be_a_lost_record() -> None:
    job = Blocked()
    job.wait()
    job.count("ncclAllReduce", 2, calls=1, lost=1)
    (incident,) = job.run(5)
    assert (incident.evidence, incident.confidence) == ("host_state", "medium")


@pytest.mark.parametrize(("grown", "label"), [(1 << 20, "checkpoint"), (4096, None)])
def test_who_writes_a_file_meanwhile_writes_a_checkpoint(grown: int, label: str | None) -> None:
    job = Blocked()
    job.wait()
    job.run(1)
    job.host(2, writing=["/data/step-7.pt", grown])
    (incident,) = job.run(3)
    assert incident.label == label
    assert incident.culprits[0].waiting_in == {
        "syscall": "read",
        "file": "pipe:[77]",
        "wchan": "pipe_read",
        "state": "S",
    }
    assert "read() on pipe:[77]" in incident.summary


def test_a_job_at_work_has_no_incident() -> None:
    job = Blocked()
    for _ in range(20):
        for proc in (1, 2):
            job.reduce(proc, at=job.clock)
        job.run(0.25, waits=False)
    assert job.follower.watch.incidents == []


def test_ranks_that_start_late_are_one_incident() -> None:
    kit, follower, sent = Kit(), Follower(), 0
    for proc in range(1, 5):
        kit.process(proc, pid=4000 + proc, env={"RANK": str(proc - 1)})
        kit.link("NCCL", proc)
    kit.init_rank(0, proc=1, status=None, nranks=4)
    begun = START + SECOND
    came = {begun + 5 * SECOND: 2, begun + 6 * SECOND: 3, begun + 7 * SECOND: 4}
    rows = [[1, 4001, [[BY_NAME["ncclCommInitRank"].id, begun, 1, 0, [0x7000, 4, 0, *[0] * 5]]]]]
    for at in range(begun, begun + 10 * SECOND, TICK_NS):
        if at in came:
            kit.now = at
            kit.init_rank(came[at] - 1, proc=came[at], status=None, nranks=4)
            kit.flush()
        kit.counters()
        kit.add(Kind.INFLIGHT, at_ns=at, final=False, rows=rows)
        kit.add(Kind.TICK, at_ns=at)
        for kind, body in kit.frames[sent:]:
            follower.apply(Frame(kind, body))
        sent = len(kit.frames)
    told = [(i.kind, i.label, sorted(c.place.pid for c in i.culprits)) for i in follower.watch.incidents]
    assert told == [("NOT_ARRIVED", "warm_up", [4002, 4003, 4004])]
    summary = follower.watch.incidents[0].summary
    assert "rank 1 (pid 4002), rank 2 (pid 4003) and rank 3 (pid 4004) have not come to ncclCommInitRank on" in summary
    assert "1 rank waits for them: their hosts are in no CUDA or NCCL call that waits" in summary


def test_who_gives_up_over_a_block_is_no_new_culprit() -> None:
    """PyTorch's watchdog aborts rank 0, which waited; rank 1 comes at last, and waits for the dead one."""
    job = Blocked()
    job.wait()
    job.run(4)
    job.add(Kind.EXIT, proc=1, at_ns=job.clock, code=None, signal=6)
    job.run(0.5, waits=False)
    job.reduce(2, at=job.clock)
    job.reduce(2, at=job.clock + MS)
    job.waiting_since = job.clock + 2 * MS
    hook, a = BY_NAME["cudaStreamSynchronize"].id, [STREAM, *[0] * 7]
    for _ in range(24):
        job.clock += TICK_NS
        rows = [[2, 4002, [[hook, job.waiting_since, 1, 0, a]]]]
        job.add(Kind.INFLIGHT, at_ns=job.clock, final=False, rows=rows)
        job.add(Kind.TICK, at_ns=job.clock)
    for kind, body in job.frames[job.sent :]:
        job.follower.apply(Frame(kind, body))
    assert [told(incident) for incident in job.follower.watch.incidents] == [("NOT_ARRIVED", [1], "timed_out")]

"""Looks at trainers and workers: what the report makes of them, and when a dead worker is an incident."""

from __future__ import annotations

from typing import Any

import pytest
from aggregate_kit import START, Kit

from stallscope.aggregate.state import State
from stallscope.diagnose.watch import Watch
from stallscope.output.report import build_report
from stallscope.output.terminal import render
from stallscope.wire.frames import Frame, Kind

S = 1_000_000_000
TRAINER, SLOW, OTHER = 1, 2, 3
FORKED = ["python3", "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork"]
WAITS = {"waits_for": [SLOW, OTHER], "by_thread": False}


class Job:
    """A trainer with two workers, a tick at a time."""

    def __init__(self) -> None:
        self.kit = Kit()
        self.kit.process(TRAINER, pid=10)
        self.kit.process(SLOW, pid=12, parent=TRAINER, cmdline=FORKED)
        self.kit.process(OTHER, pid=13, parent=TRAINER, cmdline=FORKED)
        self.state = State()
        self.watch = Watch(self.state)
        self.told = 0

    def at(self, ns: int, *, wait_ns: int | None = None, waits_for: list[int] | None = None, by_thread: bool = False,
           other: str = "idle", other_ns: int = 0) -> None:  # fmt: skip
        """A CREW frame and the tick behind it; instants count from the start."""
        wait = None if wait_ns is None else START + wait_ns
        row = [TRAINER, 50, 10 * S, 3 * S, 4, 2 * S, wait, waits_for or [], by_thread, "poll", "pipe:[7]"]
        workers = [
            [SLOW, TRAINER, 40, S, 2 * S, 5 * S, 3 * S, "blocked", START, "read", "/data/a"],
            [OTHER, TRAINER, 40, S, 7 * S, 0, S // 2, other, START + other_ns, "running", None],
        ]
        self.kit.add(Kind.CREW, at_ns=START + ns, trainers=[row], workers=workers)
        self.kit.add(Kind.TICK, at_ns=START + ns)
        self._take()

    def end(self, proc: int, ns: int, **how: Any) -> None:
        self.kit.add(Kind.EXIT, proc=proc, at_ns=START + ns, **{"code": None, "signal": None, **how})
        self._take()

    def _take(self) -> None:
        self.kit.flush()
        for kind, body in self.kit.frames[self.told :]:
            self.state.apply(Frame(kind, body))
            if kind == Kind.TICK:
                self.watch.step()
        self.told = len(self.kit.frames)
        assert self.state.dropped is None

    @property
    def kinds(self) -> list[str]:
        return [incident.kind for incident in self.watch.incidents]


def test_shares_and_the_slow_worker() -> None:
    job = Job()
    job.at(11 * S)
    report = build_report(job.state, job.watch)
    (stall,) = [s for s in report["stalls"] if s["kind"] == "data"]
    assert (stall["proc"], stall["count"], stall["total_ns"], stall["max_ns"]) == (TRAINER, 4, 3 * S, 2 * S)
    assert [row["proc"] for row in report["workers"]] == [SLOW, OTHER]
    assert report["workers"][0] == {
        "proc": SLOW, "trainer": TRAINER, "looks": 40, "busy_ns": S, "busy_ns_is": "estimated", "idle_ns": 2 * S,
        "idle_ns_is": "estimated", "blocked_ns": 5 * S, "blocked_ns_is": "estimated", "starved_ns": 3 * S,
        "starved_ns_is": "estimated", "waiting_in": {"syscall": "read", "file": "/data/a"},
    }  # fmt: skip
    text = render(report, 100, tty=False)
    assert "pid 10: starved by data ~30 % of the time (~3.00 s); slowest is worker pid 12, in read() on /data/a" in text


@pytest.mark.parametrize(("how", "said"), [
    ({"code": 7}, "exit code 7"),
    ({"signal": 9, "oom": True}, "the kernel ended it for want of memory"),
    ({"signal": 15, "sender": [15, START + S, 10, "python3"]}, "SIGTERM from python3 (pid 10)"),
    ({"signal": 11, "sender": [11, START + S, None, "kernel"]}, "SIGSEGV, sent by the kernel"),
])  # fmt: skip
def test_a_dead_worker_that_is_waited_for(how: dict[str, Any], said: str) -> None:
    job = Job()
    job.at(S)
    job.end(SLOW, 2 * S, **how)
    job.at(3 * S, wait_ns=S + 5, **WAITS)
    assert job.kinds == []
    job.at(4 * S + 1, wait_ns=S + 5, **WAITS)
    job.at(5 * S, wait_ns=S + 5, **WAITS)
    (incident,) = job.watch.incidents
    assert (incident.kind, incident.start_ns, incident.reported_ns) == ("WORKER_DIED", START + 2 * S, START + 4 * S + 1)
    assert [c.place.pid for c in incident.culprits] == [12] and [v.pid for v in incident.victims] == [10]
    assert said in incident.summary and "waits for it in poll()" in incident.summary
    assert "a worker process died" in render(build_report(job.state, job.watch), 100, tty=False)
    job.at(6 * S)
    assert (incident.outcome, incident.end_ns) == ("resolved", START + 6 * S)


def test_while_another_worker_works_it_may_still_bring_the_batch() -> None:
    job = Job()
    job.end(SLOW, S, code=7)
    for ns in (2 * S, 4 * S, 9 * S):
        job.at(ns, wait_ns=S, other="busy", **WAITS)
    assert job.kinds == []
    job.at(10 * S, wait_ns=S, other_ns=9 * S + 9 * S // 10, **WAITS)  # it has just come to wait itself
    assert job.kinds == []
    job.at(11 * S, wait_ns=S, other_ns=9 * S + 9 * S // 10, **WAITS)
    assert job.kinds == ["WORKER_DIED"]


def test_a_death_that_nobody_waits_for_is_no_incident() -> None:
    job = Job()
    job.end(SLOW, S, signal=9)
    for ns in range(2, 12):
        job.at(ns * S, wait_ns=ns * S - S // 2, **WAITS)  # waits that end soon: it goes on without
    job.at(12 * S)
    assert job.kinds == []
    assert build_report(job.state, job.watch)["processes"][1]["exit"]["signal"] == 9


def test_the_trainer_ends_over_it() -> None:
    job = Job()
    job.end(SLOW, S, code=1)
    job.at(4 * S, wait_ns=S, **WAITS)
    job.end(TRAINER, 5 * S, code=1)
    job.at(6 * S, wait_ns=S, **WAITS)
    (incident,) = job.watch.incidents
    assert (incident.outcome, incident.end_ns) == ("died", START + 5 * S)


@pytest.mark.parametrize(("by_thread", "both", "kinds"), [
    (False, True, ["WORKER_DIED"]), (False, False, []), (True, True, []),
])  # fmt: skip
def test_ends_in_order(by_thread: bool, both: bool, kinds: list[str]) -> None:
    """A worker that ended with code 0 may have done its part: only a pipe that nobody holds any more is a block."""
    job = Job()
    job.end(SLOW, S, code=0)
    if both:
        job.end(OTHER, S, code=0)
    job.at(4 * S, wait_ns=S, waits_for=[SLOW, OTHER], by_thread=by_thread)
    assert job.kinds == kinds


def test_an_old_death_is_no_reason() -> None:
    job = Job()
    job.end(SLOW, S, signal=9)
    job.at(100 * S, wait_ns=90 * S, **WAITS)
    assert job.kinds == []


TRAINER_ROW = [1, 1, 1, 1, 1, 1, None, [], False, None, None]
WORKER_ROW = [2, 1, 1, 1, 1, 1, 1, "busy", 1, None, None]


@pytest.mark.parametrize("body", [
    {"trainers": [TRAINER_ROW[:5]]}, {"trainers": [[*TRAINER_ROW[:7], ["x"], False, None, None]]},
    {"trainers": [[*TRAINER_ROW[:6], "now", [], False, None, None]]}, {"trainers": [[*TRAINER_ROW[:8], 1, None, None]]},
    {"trainers": "all"}, {"workers": [[*WORKER_ROW[:7], "asleep", 1, None, None]]}, {"workers": [[-1, *WORKER_ROW[1:]]]},
    {"workers": [[*WORKER_ROW[:9], 7, None]]}, {"workers": [None]}, {"trainers": [[1 << 63, *TRAINER_ROW[1:]]]},
])  # fmt: skip
def test_frames_that_are_none(body: dict[str, Any]) -> None:
    kit = Kit()
    kit.add(Kind.CREW, at_ns=START, **body)
    state = State()
    for kind, one in kit.frames:
        state.apply(Frame(kind, one))
    assert state.dropped is not None and "CREW" in state.dropped


@pytest.mark.parametrize("sender", [7, [1, 2, 3], ["9", 1, 2, ""], [9, 1, "x", ""], [9, 1, 2, None], [9, -1, 2, ""]])
def test_senders_that_are_none(sender: Any) -> None:
    kit = Kit()
    kit.process()
    kit.add(Kind.EXIT, proc=1, at_ns=START, code=None, signal=9, sender=sender)
    state = State()
    for kind, one in kit.frames:
        state.apply(Frame(kind, one))
    assert state.dropped is not None and "EXIT" in state.dropped


def test_kills_of_others_are_notes() -> None:
    kit = Kit()
    kit.process(1, pid=10)
    shared = {"at_ns": START, "cgroup": "/job"}
    kit.add(Kind.OOM, **shared, proc=1, pid=10, name="python3", kills=1, ours=True)
    kit.add(Kind.OOM, **shared, proc=None, pid=11, name="otel", kills=1, ours=True)
    kit.add(Kind.OOM, **shared, proc=None, pid=12, name="other", kills=1, ours=False)
    kit.add(Kind.OOM, at_ns=START, proc=None, pid=None, name=None, kills=2, cgroup=None, ours=None)
    told = [note for note in kit.report()["capture"]["notes"] if "want of memory" in note]
    assert told == [
        "the kernel ended otel (pid 11) of the cgroup /job for want of memory; it is not traced",
        "the kernel ended 2 processes for want of memory",
    ]

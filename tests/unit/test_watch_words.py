"""What is said of a block, from its frames on: at the end of the job, of the thread that matters, of who waits."""

from __future__ import annotations

import numpy as np
import pytest
from aggregate_kit import DONE, ENTER, ENTERED, Kit, call

from stallscope.diagnose.follow import Follower
from stallscope.diagnose.incident import Incident
from stallscope.diagnose.look import Looker
from stallscope.diagnose.view import USER, Comm, Operation, Rank, Signature, View
from stallscope.diagnose.words import Facts, summary
from stallscope.wire.frames import Frame, Kind

TICK_NS = 250_000_000
STREAM = 0x5000


def two_ranks(second: int = 102) -> Kit:
    """Two processes with a communicator of both; after ten collectives rank 1 does not come to the next."""
    kit = Kit()
    for proc in (1, 2):
        kit.process(proc=proc, pid=101 if proc == 1 else second)
        kit.link("NCCL", proc=proc)
        kit.link("CUDART", proc=proc)
        kit.init_rank(proc - 1, proc=proc, pointer=0xA000 * proc)
    for n in range(11):
        for proc in (1, 2) if n < 10 else (1,):
            kit.recs += reduction(kit, proc, n)
            if n == 5:
                kit.recs.append(synchronize(kit, proc))
    kit.flush()
    return kit


def synchronize(kit: Kit, proc: int) -> np.ndarray:
    """A wait that has ended, for all that the process issued before."""
    return kit.record("cudaStreamSynchronize", DONE, slot=proc, tid=100 + proc, ns=300_000, a=(STREAM,))


def reduction(kit: Kit, proc: int, n: int) -> list:
    words = {"slot": proc, "tid": 100 + proc, "n": n, "a": (1, 2, 1024, 7, 0, 0xA000 * proc, STREAM)}
    enter = kit.record("ncclAllReduce", ENTER, **words)
    at = int(enter["ts_ns"][0])
    kit.count("ncclAllReduce", proc, calls=1)
    return [enter, kit.record("ncclAllReduce", DONE, at=at, ns=5, flags=ENTERED, **words)]


def ticks(kit: Kit, seconds: float, waits: bool) -> None:
    """Looks at rank 0 inside a synchronize; capture's clock goes on."""
    since = kit.now
    for _ in range(int(seconds * 1e9) // TICK_NS):
        kit.now += TICK_NS
        if waits:
            kit.inflight([[1, 101, [call("cudaStreamSynchronize", since, a=(STREAM,))]]], final=False)
        kit.add(Kind.TICK, at_ns=kit.now)


def incidents(kit: Kit) -> list[tuple[str, str]]:
    follower = Follower()
    kit.flush()
    for kind, body in kit.frames:
        follower.apply(Frame(kind, body))
    follower.finish(None)
    assert follower.state.dropped is None
    return [(incident.kind, incident.outcome) for incident in follower.watch.incidents]


def die(kit: Kit, *procs: int) -> None:
    for proc in procs:
        kit.now += 1000
        kit.add(Kind.EXIT, proc=proc, at_ns=kit.now, code=None, signal=9)


def test_a_block_is_one_incident() -> None:
    kit = two_ranks()
    ticks(kit, 5, waits=True)
    assert incidents(kit) == [("NOT_ARRIVED", "running")]


def test_when_all_have_died_nobody_waits() -> None:
    kit = two_ranks()
    ticks(kit, 5, waits=True)
    die(kit, 2, 1)
    ticks(kit, 4, waits=False)
    assert incidents(kit) == [("NOT_ARRIVED", "aborted")]


def test_a_death_that_others_wait_for_is_one() -> None:
    kit = two_ranks()
    die(kit, 2)
    ticks(kit, 5, waits=True)
    die(kit, 1)
    ticks(kit, 2, waits=False)
    assert incidents(kit) == [("DIED", "died")]


def test_a_capture_that_ends_with_the_job_says_so() -> None:
    kit = two_ranks()
    ticks(kit, 5, waits=True)
    die(kit, 2, 1)
    assert incidents(kit) == [("NOT_ARRIVED", "aborted")]


def told(kit: Kit) -> Incident:
    follower = Follower()
    kit.flush()
    for kind, body in kit.frames:
        follower.apply(Frame(kind, body))
    return follower.watch.incidents[0]


def look(kit: Kit, *threads: tuple[int, str, str | None]) -> None:
    rows = [[tid, "python", state, syscall, None, None, 0] for tid, state, syscall in threads]
    kit.add(Kind.HOST, at_ns=kit.now, proc=2, calls=9, threads=rows, writing=None)
    for tid, _, _ in threads:
        frames = [["train.py", tid, f"thread_{tid}", "python"]]
        kit.add(Kind.STACK, at_ns=kit.now, proc=2, tid=tid, by="py-spy", frames=frames, why=None)


def blocked(pid: int, *threads: tuple[int, str, str | None]) -> Incident:
    """Rank 1 does not come; its process `pid` calls NCCL in thread 102."""
    kit = two_ranks(pid)
    ticks(kit, 1, waits=True)
    look(kit, *threads)
    ticks(kit, 4, waits=True)
    return told(kit)


def test_a_stopped_process_is_said_to_be_stopped() -> None:
    assert "it is stopped by a signal (SIGSTOP)" in blocked(102, (102, "T", "kill")).summary


def test_stack_and_system_call_are_of_one_thread() -> None:
    """A main thread that joins the one that calls NCCL is not where the rank is."""
    culprit = blocked(90, (90, "S", "futex"), (102, "S", "read")).culprits[0]
    assert culprit.waiting_in and culprit.waiting_in["syscall"] == "read"
    assert culprit.stack and culprit.stack[0]["function"] == "thread_102"


def test_a_main_thread_that_works_is_where_the_rank_is() -> None:
    culprit = blocked(90, (90, "S", "read"), (102, "S", "futex")).culprits[0]
    assert culprit.waiting_in and culprit.waiting_in["syscall"] == "read"
    assert culprit.stack and culprit.stack[0]["function"] == "thread_90"


@pytest.mark.parametrize(("waiting", "behind", "said"), [
    (1, 0, "1 rank waits for it"), (3, 0, "3 ranks wait for it"), (1, 6, "1 rank waits for it, 6 more behind"),
])  # fmt: skip
def test_who_waits_where(waiting: int, behind: int, said: str) -> None:
    facts = Facts("NOT_ARRIVED", "rank 1", 7, "ncclAllReduce #9", "", None, waiting, behind)
    assert summary(facts) == f"rank 1 has not come to ncclAllReduce #9; {said}"


def test_why_there_is_no_stack_is_a_note() -> None:
    kit = two_ranks()
    for proc, frames in ((1, []), (2, []), (2, [["train.py", 1, "main", "python"]])):
        why = None if frames else "py-spy is not installed"
        kit.add(Kind.STACK, at_ns=kit.now, proc=proc, tid=100 + proc, by="py-spy", frames=frames, why=why)
    notes = [note for note in kit.report()["capture"]["notes"] if "stack" in note]
    assert notes == ["no stack of 1 blocked process: py-spy is not installed"]


@pytest.mark.parametrize(("name", "undone"), [("ncclAllReduce", [2]), ("ncclBroadcast", [1, 2])])
def test_what_one_rank_has_the_result_of_all_ranks_have_come_to(name: str, undone: list[int]) -> None:
    """Rank 1 came last to #1, so that its wait was short and left no record. A root may leave a broadcast early."""
    looker = object.__new__(Looker)
    looker.view = View(0, [Rank(1, 0, USER), Rank(2, 1, USER)], [Comm("c", 2, {0: 0, 1: 1})])
    for rank, known in ((0, 2), (1, 1)):
        for n in range(3):
            one = Operation(rank, n, (0, "c", n), name, Signature(name, 8, 7, 0, -1), STREAM, n, True, n, n < known)
            looker.view.ranks[rank].operations.append(one)
    looker._spread()
    assert [operation.key[-1] for operation in looker.view.ranks[1].operations if not operation.done] == undone

"""The smallest jobs that show what the diagnosis once got wrong."""

from __future__ import annotations

import pytest

from stallscope.diagnose.judge import judge
from stallscope.diagnose.view import USER, Key

from .program import MAIN, SIDE, Create, End, Instruction, Job, Launch, Sync, call, receive, send
from .simulator import Disturbance, simulate
from .views import CALLS, EVIDENCE, GPU, view_of

SYNC: Instruction = Sync()
SPLIT: Instruction = Create(0, "ncclCommSplit", ())
TRAIN: list[Instruction] = [Launch((call(0, "ncclAllReduce", 8),)), Launch((call(0, "ncclAllReduce", 1),)), SYNC]


def reduce(elements: int, comm: int = 0) -> Instruction:
    """An AllReduce on the main stream."""
    return Launch((call(comm, "ncclAllReduce", elements),))


def take(peer: int, elements: int = 8, comm: int = 0) -> Instruction:
    """A receive."""
    return Launch((receive(comm, peer, elements),))


def give(peer: int, elements: int = 8, comm: int = 0) -> Instruction:
    """A send."""
    return Launch((send(comm, peer, elements),))


def job(members: list[list[int]], parts: list[list[Instruction]]) -> Job:
    """Each rank creates its communicators, does its part, waits, and ends them."""
    programs: list[list[Instruction]] = []
    for rank, part in enumerate(parts):
        mine = [c for c, ranks in enumerate(members) if rank in ranks]
        begin = [Create(c, "ncclCommInitRank", (c,)) for c in mine]
        programs.append([*begin, *part, SYNC, *(End(c) for c in mine)])
    return Job([f"c{i}" for i in range(len(members))], members, programs)


def said(what: Job, evidence: str, disturbance: Disturbance | None = None) -> list[tuple[str, list[int], Key | None]]:
    """(kind, culprits, key) of the verdicts, in order."""
    return sorted((v.kind, list(v.culprits), v.key) for v in judge(view_of(simulate(what, disturbance), evidence)))


def kinds(found: list[tuple[str, list[int], Key | None]]) -> list[tuple[str, list[int]]]:
    """Without the keys."""
    return [(kind, culprits) for kind, culprits, _ in found]


def test_the_transport_is_stuck_where_the_next_operation_has_not_started() -> None:
    """Ranks 0 and 1 started an operation, and not the one behind it in the stream: it is this one that doesn't end, not
    the later one of all ranks, which nobody has started."""
    own = [[reduce(5, c), reduce(5, c), reduce(8)] for c in (1, 1, 2, 2)]
    what = job([[0, 1, 2, 3], [0, 1], [2, 3]], own)
    assert said(what, GPU, Disturbance(lost={(1, "c", 0)})) == [("ALL_ARRIVED", [], (1, "c", 0))]


@pytest.mark.parametrize("evidence", EVIDENCE)
def test_a_kernel_is_stuck_after_the_last_operation(evidence: str) -> None:
    """All that rank 0 issued is done, as rank 1 knows from its own wait or the GPU shows; rank 0 still waits for the
    device."""
    what = job([[0, 1]], [[reduce(8), SYNC, reduce(8)]] * 2)
    assert kinds(said(what, evidence, Disturbance(stuck={(0, 2)}))) == [("GPU_STUCK", [0])]


@pytest.mark.parametrize("evidence", EVIDENCE)
def test_one_call_too_many_after_which_the_others_leave(evidence: str) -> None:
    """Two of three ranks ended as they should; the one that waits has called more than ever before."""
    what = job([[0, 1, 2]], [[*TRAIN * 3, *TRAIN[:2], *TRAIN[1:]], TRAIN * 4, TRAIN * 4])
    assert kinds(said(what, evidence)) == [("EXTRA", [0])]


@pytest.mark.parametrize("bad", [0, 1, 2, 3])
@pytest.mark.parametrize("evidence", [CALLS, GPU])
def test_one_receive_of_a_step_has_another_count(bad: int, evidence: str) -> None:
    """All calls are there, one is of 9 elements: neither skipped nor one too many."""
    mine, other = [*[take(0)] * 4, *[give(0)] * 4], [*[give(1)] * 4, *[take(1)] * 4]
    end = [reduce(1), SYNC]
    wrong = list(mine)
    wrong[bad] = take(0, 9)
    what = job([[0, 1]], [[*other, *end] * 6, [*[*mine, *end] * 4, *wrong, *end, *mine, *end]])
    assert said(what, evidence) == [("MISMATCH", [1], (0, "p", 0, 1, 16 + bad))]


@pytest.mark.parametrize("evidence", EVIDENCE)
def test_a_rank_leaves_a_split_out(evidence: str) -> None:
    """Three of four are inside ncclCommSplit; the fourth waits for the first collective after it."""
    rest: list[Instruction] = [SPLIT, reduce(8), SYNC]
    what = job([[0, 1, 2, 3]], [rest[1:], rest, rest, rest])
    assert [culprits for _, culprits in kinds(said(what, evidence))] == [[0]]


@pytest.mark.parametrize("evidence", EVIDENCE)
def test_two_faults_that_do_not_hide_each_other(evidence: str) -> None:
    """Rank 0 calls with another count than rank 1; rank 3 stops, and rank 2 waits for it."""
    usual = [[reduce(5, c), reduce(8), SYNC] for c in (1, 1, 2, 2)]
    first = [*usual[0] * 4, reduce(6, 1), reduce(8), SYNC]
    what = job([[0, 1, 2, 3], [0, 1], [2, 3]], [first, *(steps * 5 for steps in usual[1:])])
    assert kinds(said(what, evidence, Disturbance(stops={3: (14, USER)}))) == [("MISMATCH", [0]), ("NOT_ARRIVED", [3])]


@pytest.mark.parametrize("more", [[], [SYNC]], ids=["issued", "not issued"])
def test_a_side_stream_waits_for_the_main_one(more: list[Instruction]) -> None:
    """Rank 0 has not started its ReduceScatter since its receive is not done, whose send rank 2 has issued, or not since
    it waits for rank 3 itself: rank 3's GPU is stuck, not rank 0's."""
    scatter: list[Instruction] = [Launch((call(0, "ncclReduceScatter", 8),), SIDE, MAIN), reduce(1)]
    parts = [[take(1, 8, 1), *scatter], scatter, [take(1, 8, 2), *more, give(0, 8, 1)], [give(0, 8, 2)]]
    what, stuck = job([[0, 1], [0, 2], [2, 3]], parts), Disturbance(stuck={(3, 1)})
    assert kinds(said(what, GPU, stuck)) == [("GPU_STUCK", [3])]

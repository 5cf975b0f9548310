"""A call before its time, or one too many: told by what it repeats and when it was made, and how sure that is; who is
right when some leave; what has ended elsewhere."""

from __future__ import annotations

import pytest

from stallscope.diagnose.judge import judge
from stallscope.diagnose.verdict import Verdict
from stallscope.diagnose.view import FINISHED, IN_SYNC, Comm, Key, Operation, Rank, Signature, View

BOTH, WORLD = 0, 1
STEP = (BOTH, BOTH, WORLD)
IN_STEP_NS, BETWEEN_NS = 10_000, 5_000_000
Call = tuple[int, int]  # communicator, ns since the call before


def rank_of(number: int, calls: list[Call], done: int) -> Rank:
    """A host that waits; the first `done` of its calls it knows to be complete."""
    counts: dict[int, int] = {}
    operations, now_ns = [], 0
    for pos, (comm, pause_ns) in enumerate(calls):
        now_ns += pause_ns
        key: Key = (comm, "c", counts.get(comm, 0))
        counts[comm] = counts.get(comm, 0) + 1
        signature = Signature("ncclAllReduce", 100, 7, 0, -1)
        operations.append(Operation(number, pos, key, "ncclAllReduce", signature, 5, now_ns, True, pos, pos < done))
    return Rank(number, number, IN_SYNC, now_ns, "cudaStreamSynchronize", operations=operations)


def steps(count: int) -> list[Call]:
    pauses = (BETWEEN_NS, IN_STEP_NS, IN_STEP_NS)
    return list(zip(STEP, pauses, strict=True)) * count


def judged(own: list[Call], done: int) -> Verdict:
    """Of two ranks, the second one does its own after four steps."""
    ranks = [rank_of(0, [*steps(4), *steps(1)[:2]], 12), rank_of(1, [*steps(4), *own], done)]
    (verdict,) = judge(View(10**10, ranks, [Comm("both", 2, {0: 0, 1: 1}), Comm("world", 2, {0: 0, 1: 1})]))
    return verdict


@pytest.mark.parametrize(
    ("pause_ns", "done", "kind"),
    [
        (BETWEEN_NS, 12, "ORDER_DEADLOCK"),
        (BETWEEN_NS // 2, 12, "ORDER_DEADLOCK"),
        (IN_STEP_NS, 12, "EXTRA"),
        (BETWEEN_NS, 9, "EXTRA"),
    ],
    ids=["after the step's wait", "a little earlier", "right after the last call", "without a wait in between"],
)
def test_a_call_that_ends_a_step_once_more(pause_ns: int, done: int, kind: str) -> None:
    """It repeats the last call of the step before it, or begins the next one before its time."""
    verdict = judged([(WORLD, pause_ns), (BOTH, IN_STEP_NS), (BOTH, IN_STEP_NS)], done)
    assert (verdict.kind, verdict.culprits, verdict.confidence) == (kind, (1,), "medium")


def test_a_step_in_another_order_after_which_the_next_one_was_seen_to_begin() -> None:
    """Nothing is left that could tell otherwise."""
    verdict = judged([(WORLD, BETWEEN_NS), *[(BOTH, IN_STEP_NS)] * 4], 12)
    assert (verdict.kind, verdict.culprits, verdict.key) == ("ORDER_DEADLOCK", (1,), (BOTH, "c", 8))
    assert verdict.confidence == "high"


def left_by(gone: tuple[int, ...]) -> Verdict:
    """Three ranks of which some finish after two calls; the others make a third one."""
    ranks = [rank_of(r, steps(1)[: 2 if r in gone else 3], 2) for r in range(3)]
    for rank in ranks:
        rank.operations = [op._replace(key=(0, "c", n)) for n, op in enumerate(rank.operations)]
    for r in gone:
        ranks[r].state = FINISHED
    (verdict,) = judge(View(10**10, ranks, [Comm("all", 3, {0: 0, 1: 1, 2: 2})]))
    return verdict


def test_most_are_right_where_some_finish() -> None:
    verdict = left_by((1, 2))
    assert (verdict.kind, verdict.culprits, verdict.key, verdict.confidence) == ("EXTRA", (0,), (0, "c", 2), "medium")
    verdict = left_by((1,))
    assert (verdict.kind, verdict.culprits, verdict.key, verdict.confidence) == ("LEFT", (1,), (0, "c", 2), "high")


def waiting_for_its_gpu(elements: int) -> list[Verdict]:
    """Rank 1 knows the first operation to be done and waits in the second, to which rank 0 has not come."""
    ranks = [rank_of(0, [(0, 10)], 0), rank_of(1, [(0, 10), (0, 10)], 1)]
    first = ranks[0].operations[0]
    ranks[0].operations = [first._replace(signature=first.signature._replace(elements=elements))]
    return judge(View(10**10, ranks, [Comm("both", 2, {0: 0, 1: 1})]))


def test_what_ended_on_one_rank_has_on_the_other() -> None:
    (verdict,) = waiting_for_its_gpu(100)
    assert (verdict.kind, verdict.culprits, verdict.evidence) == ("GPU_STUCK", (0,), "completion")


def test_who_sends_less_ends_first() -> None:
    """Called differently, the end on one rank proves nothing of the other."""
    assert "GPU_STUCK" not in [verdict.kind for verdict in waiting_for_its_gpu(101)]

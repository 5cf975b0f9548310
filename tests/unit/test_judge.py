"""Which rank blocks: jobs of many layouts with one fault each, exact verdicts."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from view_kit import Job, Layout, with_fault

from stallscope.diagnose.judge import judge, silent_mismatches
from stallscope.diagnose.verdict import Verdict
from stallscope.diagnose.view import FINISHED, View

LAYOUTS = [(1, 1, 2), (2, 1, 1), (1, 2, 1), (1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 1), (2, 2, 2), (4, 1, 2), (2, 4, 1)]
KINDS = {
    "never": "NOT_ARRIVED",
    "die": "DIED",
    "in-abort": "IN_API",
    "skip": "SKIPPED",
    "extra": "EXTRA",
    "wrong-op": "MISMATCH",
    "wrong-count": "MISMATCH",
    "swap": "ORDER_DEADLOCK",
    "gpu-stuck": "ALL_ARRIVED",
    "transport-stuck": "ALL_ARRIVED",
    "send-send": "ORDER_DEADLOCK",
}
CALLS = ("skip", "extra", "wrong-op", "wrong-count", "swap")


class Case(NamedTuple):
    layout: Layout
    kind: str
    rank: int
    comm: str
    job: Job
    view: View

    @property
    def culprits(self) -> tuple[int, ...]:
        if self.kind in ("gpu-stuck", "transport-stuck"):
            return ()
        if self.kind != "send-send":
            return (self.rank,)
        members = self.layout.comms[self.layout.of("pp", self.rank)]
        index = members.index(self.rank)
        return tuple(sorted((self.rank, members[index + 1 if index + 1 < len(members) else index - 1])))


def possible(layout: Layout, kind: str) -> bool:
    inner = layout.has("tp") or layout.has("dp")
    return {"send-send": layout.pp > 1, "swap": inner}.get(kind, True)


def case(kind: str, seed: int) -> Case:
    """A job of a layout, a step, and a way of running ahead that the seed picks."""
    rng = random.Random(f"{kind}{seed}")
    layout = Layout(*rng.choice([shape for shape in LAYOUTS if possible(Layout(*shape), kind)]))
    rank, at, ahead = rng.randrange(layout.n), rng.randint(4, 8), rng.choice([0, 0, 100])
    comm = rng.choice([k for k in ("tp", "dp", "world") if layout.has(k) and (k != "world" or kind != "swap")])
    shape = {"streams": rng.choice([1, 1, 2]), "micro": rng.choice([1, 1, 2]), "layers": rng.choice([1, 2])}
    programs = with_fault(layout, kind, rank, at, at + 6, comm=comm, ahead=ahead, **shape)
    broken = {(0, "c", at)} if kind == "transport-stuck" else set()
    job = Job(layout, programs, seed=seed, ahead=ahead, broken=lambda key: key in broken)
    view = job.view(known=rng.choice(["host", "host", "all", "none"]), window=rng.choice([2000, 2000, 250]))
    return Case(layout, kind, rank, comm, job, view)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", KINDS)
def test_one_fault_one_verdict(kind: str, seed: int) -> None:
    """The class and the rank at fault, and nothing else; of changed calls also the communicator."""
    made = case(kind, seed)
    assert not all(state == FINISHED for state in made.job.state), "the job did not hang"
    verdicts = judge(made.view)
    assert [(v.kind, v.culprits) for v in verdicts] == [(KINDS[kind], made.culprits)]
    if kind in CALLS:
        assert made.job.names[verdicts[0].comm or 0] == made.layout.of(made.comm, made.rank)


@pytest.mark.parametrize("kind", ["never", "die", "in-abort"])
def test_an_absent_rank_is_missed_first_where_its_step_begins(kind: str) -> None:
    """Of four communicators that wait for it, the first in its own order; all others are victims."""
    layout = Layout(2, 2, 2)
    view = Job(layout, with_fault(layout, kind, 1, 5, 8, comm="tp")).view()
    (verdict,) = judge(view)
    names = list(layout.comms)
    assert verdict.key == (names.index("tp0.0"), "c", 20)
    assert verdict.victims == (0, 2, 3, 4, 5, 6, 7)
    assert {names[c] for c in verdict.cascade} == {"pp0.0", "pp0.1", "dp0.0", "dp0.1", "dp1.0", "dp1.1"}


def verdicts_of(kind: str, **settings: int | str) -> list[Verdict]:
    layout = Layout(2, 1, 2)
    programs = with_fault(layout, kind, 1, 5, 8, comm="tp", **settings)
    return judge(Job(layout, programs).view())


def test_a_healthy_job_has_no_verdict() -> None:
    assert verdicts_of("none") == []


def test_why_names_both_calls() -> None:
    (verdict,) = verdicts_of("wrong-op")
    assert verdict.why == "calls ncclReduce where 1 other calls ncclAllReduce"
    assert (verdict.confidence, verdict.evidence) == ("high", "api")


def test_types_that_differ_end_and_are_told_all_the_same() -> None:
    layout = Layout(2, 1, 2)
    view = Job(layout, with_fault(layout, "wrong-dtype", 1, 5, 8, comm="dp")).view()
    assert judge(view) == []
    (verdict,) = silent_mismatches(view)
    assert (verdict.kind, verdict.culprits, verdict.key) == ("SILENT_MISMATCH", (1,), (2, "c", 10))


def test_a_gpu_that_did_not_begin_is_named_where_begins_are_known() -> None:
    layout = Layout(2, 1, 2)
    for ahead in (0, 100):
        programs = with_fault(layout, "gpu-stuck", 1, 5, 12, ahead=ahead)
        (verdict,) = judge(Job(layout, programs, ahead=ahead).view(known="all", start=True))
        assert (verdict.kind, verdict.culprits, verdict.key) == ("GPU_STUCK", (1,), (3, "c", 20))
        assert verdict.evidence == "gpu_start"


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("kind", ["gpu-stuck", "transport-stuck"])
def test_what_began_on_the_gpu_tells_a_stuck_gpu_from_a_stuck_transport(kind: str, seed: int) -> None:
    """A witness on every GPU: the rank whose GPU does not come to it, or nobody, and which operation."""
    made = case(kind, seed)
    (verdict,) = judge(made.job.view(known="gpu", start=True))
    assert (verdict.evidence, verdict.kind) == ("gpu_start", KINDS[kind] if kind == "transport-stuck" else "GPU_STUCK")
    assert verdict.culprits == (() if kind == "transport-stuck" else (made.rank,))


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"gpu-stuck", "transport-stuck"}))
def test_a_witness_changes_no_other_verdict(kind: str) -> None:
    for seed in range(12):
        made = case(kind, seed)
        verdicts = judge(made.job.view(known="gpu", start=True))
        assert [(v.kind, v.culprits) for v in verdicts] == [(KINDS[kind], made.culprits)], seed


def test_a_rank_that_may_wait_in_a_communicator_of_unknown_members_is_not_accused() -> None:
    """Its neighbour's GPU is stuck before an all-reduce of both, of which nobody can tell which operation it is."""
    layout = Layout(2, 2, 2)
    view = Job(layout, with_fault(layout, "gpu-stuck", 1, 5, 12), ahead=0).view(known="gpu", start=True)
    assert [v.culprits for v in judge(view)] == [(1,)]
    for comm in view.comms:
        if comm.id.startswith("tp"):
            comm.aligned = False
    assert all(0 not in v.culprits for v in judge(view))

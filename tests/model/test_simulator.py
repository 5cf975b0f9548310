"""The model itself: healthy jobs end, faults block, and views say what a capture could know and no more."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

from stallscope.diagnose.view import DEAD, FINISHED, IN_API, IN_SYNC, USER, View

from .faults import EARLY_STEPS, FAULTS
from .other_jobs import exchange_ring, experts, hybrid_sharded, one_forward_one_backward, with_evaluation
from .program import LAYOUTS, MAIN, Create, End, Job, Launch, Layout, Sync, call, gpipe, receive, send
from .score import AHEAD_NS, IN_STEP_NS, decidable, healthy, make_trial
from .simulator import COMPUTE_NS, Disturbance, Run, simulate, up_to
from .unseen import CASES as CASES_UNSEEN
from .views import CALLS, EVIDENCE, GPU, WAITS, view_of

CASES = [(layout, fault) for fault in FAULTS for layout in LAYOUTS if make_trial(layout, fault, 0) is not None]


def name(case: Layout | str) -> str:
    """Id of a case."""
    return case if isinstance(case, str) else case.name


def states(run: Run) -> list[str]:
    """Of the hosts."""
    return [host.state for host in run.hosts]


def check(view: View) -> None:
    """What the contract of View promises."""
    for index, rank in enumerate(view.ranks):
        counts: Counter[tuple[int | str, ...]] = Counter(rank.base)
        assert [op.pos for op in rank.operations] == sorted({op.pos for op in rank.operations})
        for op in rank.operations:
            assert op.rank == index and op.enter_ns <= view.now_ns
            if op.key[1] in ("c", "p"):
                assert op.key[-1] == counts[op.key[:-1]], "numbers go up by one from base"
                counts[op.key[:-1]] += 1
            if op.key[1] == "p":
                me = {r: i for i, r in view.comms[int(op.key[0])].members.items()}[index]
                assert me == op.key[2 if op.name == "ncclSend" else 3]
            if op.done:
                assert op.returned and op.started is not False
        assert (rank.api is not None) == (rank.state in (IN_API, IN_SYNC))
        assert (rank.since_ns or 0) <= view.now_ns
        if rank.state != IN_API:
            assert all(op.returned for op in rank.operations)
    for comm in view.comms:
        assert comm.members and len(comm.members) <= (comm.nranks or 0)


def pair(first: list[Launch | Sync], second: list[Launch | Sync]) -> Job:
    """Two ranks and one communicator."""
    begin, end = Create(0, "ncclCommInitRank", (0,)), (Sync(), End(0))
    return Job(["world"], [[0, 1]], [[begin, *first, *end], [begin, *second, *end]], [])


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
@pytest.mark.parametrize("pace_ns", [AHEAD_NS, IN_STEP_NS])
def test_a_healthy_job_ends(layout: Layout, pace_ns: int) -> None:
    """Every call is made, numbered and done."""
    run = simulate(healthy(layout), None, pace_ns)
    assert set(states(run)) == {FINISHED} and not run.hangs
    calls = [sum(len(i.calls) for i in p if isinstance(i, Launch)) for p in run.job.programs]
    assert [sum(op.key[1] in ("c", "p") for op in host.ops) for host in run.hosts] == calls
    for evidence in EVIDENCE:
        view = view_of(run, evidence)
        check(view)
        assert all(
            (op.done or op.ended)
            for rank in view.ranks
            for op in rank.operations
            if evidence != CALLS or op.key[1] != "p"
        )
        assert len(view.comms) == len(run.job.members)
        assert all(len(comm.members) == comm.nranks for comm in view.comms)


@pytest.mark.parametrize(("layout", "fault"), CASES, ids=name)
def test_a_fault_blocks(layout: Layout, fault: str) -> None:
    """Somebody waits for ever, the culprit is in the state that the fault puts it in, the view keeps its contract."""
    blocked = 0
    for seed in range(2):
        trial = make_trial(layout, fault, seed)
        assert trial is not None
        check(trial.view)
        blocked += trial.run.hangs
        rank = trial.injected.rank
        if rank is not None and trial.run.hangs:
            state = {"host_hang": {USER}, "die": {DEAD}, "missing_init": {USER}, "missing_split": {USER}}
            assert trial.run.hosts[rank].state in state.get(fault, {IN_SYNC, FINISHED})
            others = [s for r, s in enumerate(states(trial.run)) if r != rank]
            assert not {USER, DEAD} & set(others)
    assert blocked == 2


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
@pytest.mark.parametrize("pace_ns", [AHEAD_NS, IN_STEP_NS])
def test_going_on_changes_nothing(layout: Layout, pace_ns: int) -> None:
    """A run that continues after the early steps ends like one from the beginning."""
    job = healthy(layout)
    start = up_to(job, [steps[EARLY_STEPS] for steps in job.steps], pace_ns)
    for fault in ("skip", "gpu_stuck", "host_hang"):
        found = FAULTS[fault](job, random.Random(layout.name))
        assert found is not None
        whole = simulate(found.job, found.disturbance, pace_ns)
        assert view_of(whole) == view_of(simulate(found.job, found.disturbance, pace_ns, start))


def test_windows_are_cut_at_different_places() -> None:
    """They keep what is not done, and `base` counts what they leave out."""
    trial = make_trial(LAYOUTS[0], "host_hang", 1)
    assert trial is not None
    run = trial.run
    view, whole = view_of(run, GPU, [90 + 7 * host.rank for host in run.hosts]), view_of(run, GPU)
    check(view)
    assert len({rank.operations[0].pos for rank in view.ranks}) > 4
    for kept, rank in zip(view.ranks, whole.ranks, strict=True):
        left_out = rank.operations[: len(rank.operations) - len(kept.operations)]
        assert kept.operations == rank.operations[len(left_out) :]
        assert all(op.done or op.ended for op in left_out)
        assert sum(kept.base.values()) == sum(op.key[1] in ("c", "p") for op in left_out)


def test_without_the_gpu_done_needs_a_wait() -> None:
    """What was issued after the last wait that returned is not known to be done."""
    for seed in range(2, 12, 3):
        trial = make_trial(LAYOUTS[4], "host_hang", seed)
        assert trial is not None and trial.evidence == WAITS
        for host, rank in zip(trial.run.hosts, view_of(trial.run, WAITS).ranks, strict=True):
            assert all(op.started is None for op in rank.operations)
            synced = [op for op in rank.operations if op.pos < host.synced]
            assert all(op.done for op in synced)
            assert not any(op.done for op in rank.operations[host.synced :] if op.key[1] in ("c", "p"))


def test_hosts_run_ahead_or_in_step() -> None:
    """Ahead: calls are issued before the ones before them are done. In step: they are not."""
    for pace_ns, ahead in ((AHEAD_NS, True), (IN_STEP_NS, False)):
        run = simulate(gpipe(LAYOUTS[3], 1), None, pace_ns)
        ops = [op for op in run.hosts[0].ops if op.stream == MAIN]
        early = [b.enter_ns < a.batch.end_ns for a, b in pairwise(ops)]
        assert any(early) is ahead
        assert pace_ns > COMPUTE_NS or ahead


def test_sends_wait_for_their_receives() -> None:
    """Send and receive meet; two sends do not."""
    out, back = Launch((send(0, 1, 8),)), Launch((send(0, 0, 8),))
    assert states(simulate(pair([out], [Launch((receive(0, 0, 8),))]))) == [FINISHED, FINISHED]
    crossed = simulate(pair([out, Launch((receive(0, 1, 8),))], [back, Launch((receive(0, 0, 8),))]))
    assert states(crossed) == [IN_SYNC, IN_SYNC]
    assert [[op.started for op in host.ops[1:]] for host in crossed.hosts] == [[True, False]] * 2


def test_a_wait_for_nothing_returns() -> None:
    """Also when nothing was issued since the last one."""
    what = Launch((call(0, "ncclAllReduce", 8),))
    assert states(simulate(pair([what, Sync(), Sync()], [Sync(), what, Sync()]))) == [FINISHED, FINISHED]


def test_calls_of_a_group_start_together() -> None:
    """An exchange in one group, where one after the other would block."""
    run = simulate(pair([Launch((send(0, 1, 8), receive(0, 1, 8)))], [Launch((send(0, 0, 8), receive(0, 0, 8)))]))
    assert states(run) == [FINISHED, FINISHED]
    exchange = view_of(run).ranks[0].operations[1:3]
    assert [op.key for op in exchange] == [(0, "p", 0, 1, 0), (0, "p", 1, 0, 0)]
    assert len({op.batch for op in exchange}) == 1


def test_different_signatures_never_end() -> None:
    """A count that differs blocks both."""
    run = simulate(pair([Launch((call(0, "ncclAllReduce", 8),))], [Launch((call(0, "ncclAllReduce", 9),))]))
    assert states(run) == [IN_SYNC, IN_SYNC]
    assert [host.ops[1].started for host in run.hosts] == [True, True]


def test_work_of_a_dead_rank_ends_nowhere() -> None:
    """What it issued shortly before its death does not start; what was done stays done."""
    what = Launch((call(0, "ncclAllReduce", 8),))
    run = simulate(pair([what, Sync(), what, what], [what, Sync(), what, what]), Disturbance(stops={0: (4, DEAD)}))
    assert states(run) == [DEAD, IN_SYNC]
    assert [[op.done for op in host.ops[1:]] for host in run.hosts] == [[True, False], [True, False, False]]


def test_a_full_queue_blocks_the_host_in_the_call() -> None:
    """The call in progress is not the one that is stuck."""
    what = Launch((call(0, "ncclAllReduce", 8),))
    run = simulate(pair([what] * 6, [what] * 6), Disturbance(stops={1: (3, USER)}, queue=2))
    assert states(run) == [IN_API, USER]
    view = view_of(run)
    check(view)
    assert view.ranks[0].in_comm == 0 and view.ranks[0].api == "ncclAllReduce"
    assert [op.returned for op in view.ranks[0].operations[1:]] == [True, True, True, True, False]
    assert set(states(simulate(pair([what] * 6, [what] * 6), Disturbance(queue=2)))) == {FINISHED}


def test_creation_blocks_the_host() -> None:
    """Until all came; who did not come is not known to be a member, and children of a split do not exist yet."""
    for layout in (LAYOUTS[0], LAYOUTS[1]):
        job = healthy(layout)
        view = view_of(simulate(job, Disturbance(stops={3: (1 if layout.split else 0, USER)})))
        check(view)
        assert [r for r, rank in enumerate(view.ranks) if rank.state == USER] == [3]
        assert all(rank.state == IN_API for r, rank in enumerate(view.ranks) if r != 3)
        assert 3 in view.comms[0].members.values()
        assert len(view.comms) == 1


def test_the_table_of_what_can_be_told() -> None:
    """Almost everything is decidable, or the table would say little; some of it is not, and the rules find that."""
    trials = [
        make_trial(LAYOUTS[seed % 7], fault, seed) for fault in ("skip", "swap", "wrong_root") for seed in range(40)
    ]
    found = Counter(decidable(trial) for trial in trials if trial is not None and trial.run.hangs)
    assert found[True] > 20 * found[False] > 0


@pytest.mark.parametrize("what", CASES_UNSEEN)
def test_unseen_questions_can_be_asked(what: str) -> None:
    """Healthy jobs of the other layouts end; each question is a view in which somebody waits for ever."""
    questions = [CASES_UNSEEN[what](random.Random(f"{what} {seed}")) for seed in range(3)]
    asked = [question for question in questions if question is not None]
    assert asked
    for question in asked:
        assert any(rank.state in (IN_API, IN_SYNC) for rank in question.view.ranks)
        assert question.answers
        assert all(max(right, default=0) < len(question.view.ranks) for right, _ in question.answers)


@pytest.mark.parametrize("make", [experts, hybrid_sharded, one_forward_one_backward, with_evaluation, exchange_ring])
def test_other_jobs_end(make: Callable[[], Job]) -> None:
    """Without a fault."""
    run = simulate(make())
    assert set(states(run)) == {FINISHED}
    check(view_of(run))

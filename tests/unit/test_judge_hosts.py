"""What the judge says where operations can't be compared, and of ranks that are missed on the host's side."""

from __future__ import annotations

from dataclasses import replace

import pytest
from view_kit import Item, Job, Layout, step_of, with_fault

from stallscope.diagnose.judge import judge
from stallscope.diagnose.view import DEAD, FINISHED, IN_API, IN_SYNC, UNKNOWN, USER, Comm, Rank, View

LAYOUT = Layout(2, 2, 2)
COMMS = [Comm(name, len(m), dict(enumerate(m))) for name, m in LAYOUT.comms.items()]
OTHERS = (0, 1, 2, 4, 5, 6, 7)


def blind(states: dict[int, tuple[str, str | None]], comms: list[Comm] = COMMS) -> View:
    """Attached in the middle: no operations, only where hosts are. Who is not named is in cudaStreamSynchronize."""
    usual = (IN_SYNC, "cudaStreamSynchronize")
    ranks = [Rank(r, r, *states.get(r, usual)[:1], 1000 + r, states.get(r, usual)[1]) for r in range(8)]
    return View(10**10, ranks, comms)


@pytest.mark.parametrize(
    ("state", "api", "kind"),
    [
        (USER, None, "NOT_ARRIVED"),
        (DEAD, None, "DIED"),
        (FINISHED, None, "LEFT"),
        (IN_API, "ncclCommAbort", "IN_API"),
        (IN_API, "ncclCommInitRank", "IN_API"),
    ],
)
def test_the_one_rank_outside_every_wait(state: str, api: str | None, kind: str) -> None:
    found = judge(blind({3: (state, api)}))
    if state == DEAD:
        found = judge(replace_since(blind({3: (state, api)}), 3, 500))
    (verdict,) = found
    assert (verdict.kind, verdict.culprits, verdict.victims) == (kind, (3,), OTHERS)
    assert (verdict.evidence, verdict.confidence, verdict.key, verdict.since_ns) == ("host_state", "medium", None, 1000)


def replace_since(view: View, rank: int, since_ns: int) -> View:
    view.ranks[rank].since_ns = since_ns
    return view


def test_a_missing_rank_while_all_others_make_a_communicator() -> None:
    states = dict.fromkeys(OTHERS, (IN_API, "ncclCommInitRank"))
    (verdict,) = judge(blind(states | {3: (USER, None)}))
    assert (verdict.kind, verdict.culprits) == ("NOT_ARRIVED", (3,))


@pytest.mark.parametrize(
    "states",
    [
        {},
        {3: (USER, None), 5: (USER, None)},
        {3: (UNKNOWN, None)},
        {3: (UNKNOWN, None), 5: (USER, None)},
        dict.fromkeys(range(8), (IN_API, "ncclCommInitRank")),
    ],
    ids=["all wait", "two outside", "one unknown", "one outside, one unknown", "all in the same call"],
)
def test_nobody_is_named_where_it_can_not_be_told(states: dict[int, tuple[str, str | None]]) -> None:
    (verdict,) = judge(blind(states))
    assert (verdict.kind, verdict.culprits, verdict.confidence) == ("CANNOT_DECIDE", (), "low")


def test_nothing_where_nobody_waits() -> None:
    assert judge(blind(dict.fromkeys(range(8), (USER, None)))) == []
    assert judge(View(0, [], [])) == []


def test_two_jobs_are_judged_apart() -> None:
    comms = [Comm("a", 4, {i: i for i in range(4)}), Comm("b", 4, {i: 4 + i for i in range(4)})]
    found = judge(blind({2: (USER, None), 7: (USER, None)}, comms))
    assert [(v.culprits, v.victims) for v in found] == [((2,), (0, 1, 3)), ((7,), (4, 5, 6))]


# With operations, of which some prove nothing.


def never(**settings: int) -> View:
    return Job(LAYOUT, with_fault(LAYOUT, "never", 3, 5, 8, **settings)).view()


def test_a_gap_at_the_missing_rank_leaves_its_host_state() -> None:
    view = never()
    view.ranks[3].gap = True
    view.ranks[3].operations = view.ranks[3].operations[:7]
    (verdict,) = judge(view)
    assert (verdict.kind, verdict.culprits, verdict.evidence) == ("NOT_ARRIVED", (3,), "host_state")
    assert verdict.confidence == "medium"


def test_a_gap_at_another_rank_accuses_nobody_else() -> None:
    view = never()
    view.ranks[6].gap = True
    view.ranks[6].operations = view.ranks[6].operations[:3]
    (verdict,) = judge(view)
    assert (verdict.kind, verdict.culprits) == ("NOT_ARRIVED", (3,))


def test_missing_records_of_a_waiting_rank_accuse_nobody() -> None:
    """All wait; the rank with the gap looks as if it had left out half of its calls."""
    view = Job(LAYOUT, with_fault(LAYOUT, "gpu-stuck", 3, 5, 8)).view()
    view.ranks[6].gap = True
    view.ranks[6].operations = view.ranks[6].operations[::2]
    (verdict,) = judge(view)
    assert (verdict.kind, verdict.culprits) == ("CANNOT_DECIDE", ())
    assert {rank for rank, _ in verdict.where} == {0, 1, 2, 3, 4, 5, 7}


def test_numbers_that_prove_nothing() -> None:
    """Two ranks of each communicator count from different calls on: only the host state is left."""
    view = never()
    for comm in view.comms:
        comm.aligned = False
    (verdict,) = judge(view)
    assert (verdict.kind, verdict.culprits, verdict.evidence) == ("NOT_ARRIVED", (3,), "host_state")


def test_one_communicator_with_numbers_is_enough() -> None:
    view = never()
    for comm in view.comms[1:]:
        comm.aligned = False
    (verdict,) = judge(view)
    assert (verdict.kind, verdict.culprits, verdict.evidence, verdict.comm) == ("NOT_ARRIVED", (3,), "api", 0)


def test_a_member_that_nobody_traces() -> None:
    """Seven of eight wait for one that is not ours: nobody is named."""
    view = never()
    for comm in view.comms:
        comm.members = {place: rank for place, rank in comm.members.items() if rank != 3}
    view.ranks[3] = Rank(3, 3, IN_SYNC)
    (verdict,) = judge(view)
    assert (verdict.kind, verdict.culprits) == ("CANNOT_DECIDE", ())


def test_a_missing_rank_of_which_nothing_is_known() -> None:
    """An agent that fell silent is no death and no absence."""
    view = never()
    view.ranks[3].state = UNKNOWN
    (verdict,) = judge(view)
    assert (verdict.kind, verdict.culprits) == ("CANNOT_DECIDE", ())


def test_a_rank_for_which_nobody_waits() -> None:
    """All operations have all their ranks, and one host goes about something else."""
    view = Job(LAYOUT, with_fault(LAYOUT, "gpu-stuck", 3, 5, 8)).view()
    view.ranks[6].state = USER
    assert judge(view) == []


def test_a_rank_that_waits_for_its_own_gpu() -> None:
    """All it called is known to be complete; the others wait for its next call."""
    layout = Layout(1, 1, 4)
    view = Job(layout, with_fault(layout, "never", 2, 5, 8)).view()
    view.ranks[2].state, view.ranks[2].api = IN_SYNC, "cudaStreamSynchronize"
    (verdict,) = judge(view)
    assert (verdict.kind, verdict.culprits, verdict.evidence) == ("GPU_STUCK", (2,), "completion")
    assert verdict.why == "waits in cudaStreamSynchronize for its own GPU work"


def test_a_later_death_is_a_consequence() -> None:
    view = never()
    view.ranks[6].state, view.ranks[6].since_ns = DEAD, view.now_ns - 1
    assert [(v.kind, v.culprits) for v in judge(view)] == [("NOT_ARRIVED", (3,))]
    view = Job(LAYOUT, with_fault(LAYOUT, "die", 3, 5, 8)).view()
    for rank in (0, 1, 6):
        view.ranks[rank].state, view.ranks[rank].since_ns = DEAD, view.now_ns - 1
    assert [(v.kind, v.culprits) for v in judge(view)] == [("DIED", (3,))]


def test_two_roots_are_two_verdicts() -> None:
    """Both pipelines of a job without anything in common between them."""
    layout = Layout(1, 2, 2)
    programs = [[item for item in p if item.comm.startswith("pp") or not item.comm] for p in
                with_fault(layout, "never", 0, 5, 8)]  # fmt: skip
    programs[3] = [*programs[3][:20], Item("stop")]
    found = judge(Job(layout, programs).view())
    assert {(v.kind, v.culprits) for v in found} == {("NOT_ARRIVED", (0,)), ("NOT_ARRIVED", (3,))}


# The making of communicators.


def making(missing: int, name: str, what: str) -> View:
    """All make their communicators; one rank does not come to one of them."""
    programs = []
    for r in range(8):
        items = [Item("init", LAYOUT.of(kind, r), "ncclCommInitRank") for kind in ("world", "pp", "dp")]
        items.append(Item("split", "world", "ncclCommSplit"))
        at = next(i for i, item in enumerate(items) if item.what == what and item.comm == LAYOUT.of(name, r))
        programs.append([*items[:at], Item("stop")] if r == missing else [*items, *step_of(LAYOUT, r)])
    return Job(LAYOUT, programs).view()


@pytest.mark.parametrize(("name", "what"), [("world", "init"), ("pp", "init"), ("dp", "init"), ("world", "split")])
@pytest.mark.parametrize("rank", range(8))
def test_a_rank_that_does_not_come_to_the_making(rank: int, name: str, what: str) -> None:
    view = making(rank, name, what)
    for known in (True, False):
        if not known and what == "init":  # nobody knows yet who the missing member is
            comm = view.comms[list(LAYOUT.comms).index(LAYOUT.of(name, rank))]
            comm.members = {place: r for place, r in comm.members.items() if r != rank}
        (verdict,) = judge(view)
        assert (verdict.kind, verdict.culprits) == ("NOT_ARRIVED", (rank,))
        assert verdict.key is not None and verdict.key[1] in ("init", "split")
        assert rank in LAYOUT.comms[list(LAYOUT.comms)[int(verdict.key[0])]]
        assert set(verdict.victims) == set(range(8)) - {rank}


def test_communicators_made_in_a_ring() -> None:
    """Three ranks make three pairs, each in another order (NVIDIA/Megatron-LM#5240)."""
    layout = Layout(1, 1, 3)
    layout.comms = {"world": [0, 1, 2], "a": [0, 1], "b": [1, 2], "c": [0, 2]}
    orders = ("ac", "ba", "cb")
    programs = [[Item("init", name, "ncclCommInitRank") for name in order] for order in orders]
    (verdict,) = judge(Job(layout, programs).view())
    assert (verdict.kind, verdict.culprits, verdict.confidence) == ("ORDER_DEADLOCK", (0, 1, 2), "low")


def test_a_call_that_does_not_return_though_nobody_is_missing() -> None:
    """NCCL holds one host inside a collective; the others have returned from it and wait (marin#7344)."""
    layout = Layout(1, 1, 4)
    view = Job(layout, with_fault(layout, "gpu-stuck", 2, 5, 8)).view()
    rank = view.ranks[2]
    cut = next(i for i, op in enumerate(rank.operations) if op.key == (1, "c", 10))
    rank.operations = [*rank.operations[:cut], rank.operations[cut]._replace(returned=False)]
    rank.state, rank.api, rank.in_comm = IN_API, "ncclReduceScatter", 1
    (verdict,) = judge(view)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("IN_API", (2,), (0, 1, 3))


def test_left_early() -> None:
    """A rank ends one step earlier than the others."""
    layout = Layout(1, 1, 4)
    programs = with_fault(layout, "none", 0, 5, 8, comm="dp")
    programs[1] = [*programs[1][: 5 * 5], *programs[1][-2:]]
    (verdict,) = judge(Job(layout, programs).view())
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("LEFT", (1,), (0, 2, 3))


def test_input_is_not_changed_and_answers_are_the_same() -> None:
    view = never()
    before = repr(view)
    assert judge(view) == judge(view) == judge(replace(view))
    assert repr(view) == before

"""The scorer itself: it accepts the right answer, and finds each thing that can be wrong with one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from culprit_cases import ANSWERS, IN_THE_BLOCK, KINDS, LATE, MID, SHIM, SHORT, Case, is_possible
from culprit_run import Run
from culprit_score import score

SECOND = 1_000_000_000
START, OFFSET = 500 * SECOND, 1_700_000_000 * SECOND
UID, WORLD = "ab" * 128, list(range(8))
Json = dict[str, Any]


def truth(case: Case) -> Json:
    world = {"name": "world", "kind": "world", "ranks": WORLD, "unique_id": UID}
    child = {"name": "tp0", "kind": "tp", "ranks": [0, 1], "unique_id": None, "parent": "world", "parent_unique_id": UID,
             "ordinal": 1, "color": 0}  # fmt: skip
    named = [case.rank, 3] if case.kind == "send-send" else [case.rank]
    return {
        "layout": {"tp": 2, "pp": 2, "dp": 2, "ranks": 8},
        "ranks": [{"rank": rank, "pid": 100 + rank} for rank in WORLD],
        "communicators": [world, child],
        "fault": {
            "kind": case.kind, "text": f"{case.kind}:comm=tp,with=world", "rank": case.rank, "step": 20, "happened": True,
            "hangs": case.kind not in ("late", "slow", "wrong-dtype", "many-short"), "culprits": named,
            "start_ns": START + 10 * SECOND, "operation": 80, "end_ns": START + 18 * SECOND, "pauses": [[0, 1]] * 20,
            "communicator": child, "waited_on": [child],
        },
    }  # fmt: skip


def incident(case: Case) -> Json:
    answer, late = case.answer, case.kind == "late" and case.mode != MID
    waiting = {"syscall": "read", "file": "/x/batches", "wchan": None}
    named = truth(case)["fault"]["culprits"] if answer.named else []
    return {
        "class": answer.kinds[0], "label": None, "comm": "c2", "summary": "ncclCommAbort", "reported_ns": 13 * SECOND, "start_ns": 10 * SECOND, "seq": 80, "victims": [],
        "culprits": [{"pid": 100 + r, "global_rank": r, "rank": r if r < 2 else None, "stack": None, "waiting_in": waiting} for r in named],
        "evidence": (answer.evidence or ("api",))[0], "ended": late, "outcome": "resolved" if late else "running",
        "duration_ns": 8 * SECOND,
    }  # fmt: skip


def run_of(case: Case) -> Run:
    """A run with the right answer."""
    communicators = [
        {"id": "c1", "unique_id": UID, "parent": None, "nranks": 8, "members": [{"pid": 100 + r} for r in WORLD]},
        {"id": "c2", "unique_id": None, "parent": "c1", "nranks": 2, "members": [{"pid": 100}, {"pid": 101}]},
    ]
    report = {
        "capture": {"start_unix_ns": str(START + OFFSET)},
        "processes": [{"proc": rank, "pid": 100 + rank} for rank in WORLD],
        "communicators": communicators,
        "incidents": [incident(case)] if case.answer.kinds else [],
        "episodes": [{"proc": case.rank, "count": 12}, {"proc": case.rank, "count": 8}, {"proc": 7, "count": 3}],
    }
    return Run(report, truth(case), "", START + 11 * SECOND, START + 13 * SECOND, 30, OFFSET)


CASES = [case for mode in ("live", MID) for kind in KINDS if is_possible(case := Case(kind, mode))]
CASES += [Case(kind, via=SHIM) for kind in KINDS]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_right_answer_is_right(case: Case) -> None:
    found = score(case, run_of(case))
    assert not found.problems
    assert found.seconds == (None if not case.answer.kinds else 2.0 if case.mode == MID else 3.0)


def changed(case: Case, change: Callable[[Json], None]) -> list[str]:
    run = run_of(case)
    report = copy.deepcopy(run.report)
    change(report)
    return score(case, run._replace(report=report)).problems


def of_incident(**changes: Any) -> Callable[[Json], None]:
    return lambda report: report["incidents"][0].update(changes)


def another_member(report: Json) -> None:
    report["communicators"][1]["members"].append({"pid": 105})


WRONG: dict[str, Callable[[Json], None]] = {
    "instead of": of_incident(**{"class": "DIED"}),
    "culprits": of_incident(culprits=[]),
    "culprits [0]": of_incident(
        culprits=[{"pid": 100, "global_rank": 0, "rank": 0, "stack": [{}], "waiting_in": None}]
    ),
    "is global rank": of_incident(victims=[{"pid": 104, "global_rank": 5}]),
    "rank 0 in its": of_incident(
        culprits=[{"pid": 101, "global_rank": 1, "rank": 0, "stack": [{}], "waiting_in": None}]
    ),
    "is global rank 1, not None": of_incident(
        culprits=[{"pid": 101, "global_rank": None, "rank": 1, "stack": [{}], "waiting_in": None}]
    ),
    "begun +2.0 s after": of_incident(start_ns=12 * SECOND),
    "labelled": of_incident(label="checkpoint"),
    "evidence": of_incident(evidence="host_state"),
    "is not one in which": of_incident(comm="c1"),
    "is not one": another_member,
    "after 5.1 s": of_incident(reported_ns=15_100_000_000),
    "after -1.0 s": of_incident(reported_ns=9 * SECOND),
    "no incident": lambda report: report["incidents"].clear(),
    "2 incidents": lambda report: report["incidents"].append(report["incidents"][0]),
    "while it goes on": of_incident(ended=True, outcome="resolved"),
    "where the culprit's host is": of_incident(
        culprits=[{"pid": 101, "global_rank": 1, "rank": 1, "stack": None, "waiting_in": None}]
    ),
}


@pytest.mark.parametrize("complaint", WRONG)
def test_what_is_wrong_is_found(complaint: str) -> None:
    problems = changed(Case("never"), WRONG[complaint])
    assert any(complaint in problem for problem in problems), problems


def test_what_only_some_kinds_have() -> None:
    assert changed(Case("late"), of_incident(outcome="running", ended=False)) == [
        "outcome running although it resolved"
    ]
    assert changed(Case("late"), of_incident(duration_ns=4 * SECOND)) == ["lasted 8.00 s, reported as 4.00 s"]
    assert "ncclCommAbort is not named" in changed(Case("in-abort"), of_incident(summary="x"))[0]
    nothing = [{"pid": 101, "global_rank": 1, "rank": 1, "stack": [{}], "waiting_in": None}]
    assert "the file" in changed(Case("io"), of_incident(culprits=nothing))[0]
    two_less = changed(Case("many-short"), lambda report: report["episodes"][0].update(count=9))
    assert two_less == ["17 episodes of rank 1 instead of 20"]
    other = changed(Case("many-short"), lambda report: report["episodes"].reverse())
    assert other == ["rank 1 is not the one that others waited for longest"]
    some = changed(Case("many-short"), lambda report: report["incidents"].append(incident(Case("never"))))
    assert some == ["1 incidents where there is none"]
    assert changed(Case("transport-stuck"), of_incident(seq=0)) == ["operation #0 instead of #80"]
    assert changed(Case("transport-stuck"), of_incident(seq=None)) == []
    late = run_of(Case("slow"))._replace(steps_then=90)
    assert score(Case("slow"), late).problems == ["told after 280 operations"]


def test_the_unique_id_counts_where_it_is_known() -> None:
    case = Case("never")
    run = run_of(case)
    run.truth["fault"]["waited_on"] = [run.truth["communicators"][0]]
    run.report["incidents"][0]["comm"] = "c1"
    assert not score(case, run).problems
    run.report["communicators"][0]["unique_id"] = "cd" * 128
    assert score(case, run).problems


def test_every_fault_of_the_job_has_an_answer() -> None:
    from stallscope.sim.job import faults

    assert set(ANSWERS) == set(faults.KINDS) and set(IN_THE_BLOCK) <= set(ANSWERS)
    assert {case.kind for case in SHORT if case.mode == "live"} == set(ANSWERS)
    assert {case.ahead for case in SHORT} == {0, 100} and {case.mode for case in SHORT} == {"live", LATE, MID}


def test_under_run_the_end_of_the_job_is_no_mistake() -> None:
    case = Case("gpu-stuck", via=SHIM)
    assert changed(case, of_incident(ended=True, outcome="aborted")) == []
    assert changed(case, of_incident(ended=True, outcome="resolved")) == ["resolved while it goes on"]
    assert "evidence api" in changed(case, of_incident(evidence="api"))

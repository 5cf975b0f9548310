"""A fault of our own costs the part that it lies in, is told, and ends in exit code 1."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from test_watch import STEPS, Blocked

from stallscope.aggregate.faults import MAX_TOLD, Faults
from stallscope.aggregate.state import State
from stallscope.diagnose.watch import Watch
from stallscope.errors import ExitCode
from stallscope.output import report as report_module
from stallscope.output import terminal
from stallscope.output.finish import finish
from stallscope.output.rehearsal import rehearse, rehearsed_findings
from stallscope.wire.frames import Frame, Kind


@pytest.fixture(autouse=True)
def _lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faults, "strict", False)


def broken(*_args: Any, **_keywords: Any) -> Any:
    raise KeyError("no such key")


def printed(state: State, *, as_json: bool = True) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = finish(state, rehearsed_findings(), as_json=as_json, out=out, err=err)
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("maker", "section", "empty"),
    [
        ("call_rows", "calls", []),
        ("episode_rows", "episodes", []),
        ("steps_row", "steps", None),
        ("stall_rows", "stalls", []),
    ],
)
def test_a_section_fails(monkeypatch: pytest.MonkeyPatch, maker: str, section: str, empty: object) -> None:
    whole = json.loads(printed(rehearse())[1])
    monkeypatch.setattr(report_module, maker, broken)
    code, out, err = printed(rehearse())
    report = json.loads(out)
    assert code == ExitCode.FAILED
    assert report[section] == empty and whole[section] != empty
    (note,) = (note for note in report["capture"]["notes"] if "fault of stallscope" in note)
    assert note.startswith(f"the section {section}, empty for that reason, failed") and "KeyError" in note
    assert "Traceback" in err and "next: " in err
    for other in set(whole) - {section, "capture"}:
        assert report[other] == whole[other]


def test_what_is_shown_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(report: Any, page: Any) -> None:
        broken()

    monkeypatch.setattr(terminal, "waits", waits)
    _code, out, _err = printed(rehearse(), as_json=False)
    assert "showing waits failed by a fault of stallscope" in out.replace("\n", " ")
    assert "INCIDENT 1" in out


def test_the_diagnosis_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not asked again; calls are counted and reported all the same."""
    asked: list[int] = []

    def step(_watch: Watch) -> None:
        asked.append(1)
        broken()

    monkeypatch.setattr(Watch, "step", step)
    job = Blocked()
    assert job.run(1.0) == []
    assert asked == [1]
    state = job.follower.state
    out, err = io.StringIO(), io.StringIO()
    assert finish(state, job.follower.watch, as_json=True, out=out, err=err) == ExitCode.FAILED
    report = json.loads(out.getvalue())
    assert report["capture"]["notes"][0].startswith(
        "the diagnosis (incidents, episodes, steps) of what came later failed"
    )
    counts = {row["api"]: row["count"] for row in report["calls"] if row["count"] and row["proc"] == 1}
    assert counts["ncclAllReduce"] == STEPS


def test_a_frame_meets_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    state = State()
    monkeypatch.setattr(State, "_apply", broken)
    state.apply(Frame(Kind.TICK, {"at_ns": 1}))
    assert state.faults and state.dropped and "fault of stallscope" in state.dropped


def test_told_once_and_bounded() -> None:
    faults = Faults()
    for number in range(MAX_TOLD + 3):
        faults.add(f"part {number}", ValueError())
        faults.add("part 0", ValueError())
    assert len(faults.notes()) == MAX_TOLD + 1
    assert faults.notes()[-1] == "3 more faults of stallscope"


def test_an_end_is_no_fault() -> None:
    faults = Faults()
    with pytest.raises(SystemExit), faults.held("a part"):
        raise SystemExit(3)
    assert not faults


def test_tests_are_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faults, "strict", True)
    with pytest.raises(KeyError), Faults().held("a part"):
        broken()

"""Many processes on one file: from filtered links to an unfiltered one without a lost or doubled call."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from harness import ROOT, TARGETS, Program, Tracer, balance
from test_attach_counts import hooked, own
from test_attach_harmless import breakpoints, places

pytestmark = pytest.mark.usefixtures("needs_bpf")
__all__ = ["places"]
CROWD = ["/usr/bin/python3", ROOT / "tests" / "targets" / "crowd.py", TARGETS / "million"]


def trace_crowd(count: int, gap_s: float, words: list[str], limit: int) -> tuple[Any, Any]:
    """(truth, report) of a crowd under one parent."""
    with Program(
        [*CROWD, str(count), str(gap_s), *words], env={"STALLSCOPE_SIM_DRIVER": "private", "CROWD_SETTLE_S": "0.5"}
    ) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--links-per-file", str(limit), "--sample", "1/100").attached() as tracer:
            program.say()
            return program.truth(), tracer.report()


def check(truth: Any, report: Any) -> None:
    """Every call of every process once; the one before "ready" may lie before the link."""
    for child in truth["children"]:
        made, first = hooked(child["calls"]), hooked(child["before_calls"])
        assert own(report, child["pid"]) in (made, made + first), child["pid"]
    assert balance(report)[0] == balance(report)[1]


@pytest.mark.parametrize("round_", range(3))
def test_switch_under_load(round_: int) -> None:
    """Two processes call at full speed when the third makes the file shared."""
    truth, report = trace_crowd(4, 0.0, ["300000", "300", "300"], limit=2)
    check(truth, report)
    assert report["capture"]["lost"] == 0
    assert any("no longer limited" in note for note in report["capture"]["notes"])


def test_all_filtered_for_comparison() -> None:
    """The same crowd below the limit: no word of sharing."""
    truth, report = trace_crowd(4, 0.0, ["20000", "100", "300"], limit=8)
    check(truth, report)
    assert not any("no longer limited" in note for note in report["capture"]["notes"])


def test_calls_under_way_at_the_switch() -> None:
    """Waits that began under a filtered link return under the unfiltered one: no call stays open."""
    truth, report = trace_crowd(4, 0.0, ["20", "4", "300000"], limit=2)
    check(truth, report)
    assert report["in_flight"] == []
    assert report["capture"]["lost"] == 0


def test_later_processes_have_no_gap() -> None:
    """Once the file is shared, a new process is seen from its first call."""
    truth, report = trace_crowd(5, 0.3, ["2000", "50", "30000"], limit=1)
    check(truth, report)
    procs = {process["pid"]: process["proc"] for process in report["processes"]}
    late = {procs[child["pid"]] for child in truth["children"][2:]}
    assert not [g for g in report["capture"]["gaps"] if g["proc"] in late and "CUDART" in g["reason"]]


def test_breakpoints_of_strangers_go_with_the_tracer(places: Any) -> None:
    """While shared, a stranger has them; after the end nobody has."""
    with contextlib.ExitStack() as stack:
        words = [TARGETS / "million", "1", "1", "300"]
        programs = [stack.enter_context(Program(words)) for _ in range(4)]
        for program in programs:
            program.wait_for("ready")
        with Tracer([p.pid for p in programs[:3]], "--links-per-file", "2").attached() as tracer:
            assert breakpoints(programs[3].pid, places) > 100
            tracer.stop()
            tracer.process.wait(10)
        assert [breakpoints(program.pid, places) for program in programs] == [0, 0, 0, 0]

"""Calls under way at the attach, libraries that come later, children, and the end of processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, SIM_LIB, TARGETS, Program, Tracer, balance, counts
from test_attach_counts import hooked, own

pytestmark = pytest.mark.usefixtures("needs_bpf")
WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"}


def inferred(report: dict[str, Any]) -> set[str]:
    """Functions that threads were found inside."""
    return {call["api"] for call in report["in_flight"] if call["inferred"]}


@pytest.mark.parametrize("how", ["block", "spin"])
def test_already_inside_a_wait(how: str) -> None:
    """Three threads wait in three functions when the tracer comes; it leaves while they still wait."""
    with Program([TARGETS / "inwait", "3", "15000", "10"], env={"STALLSCOPE_SIM_WAIT": how}) as program:
        program.wait_for("waiting")
        with Tracer([program.pid], "--duration", "1").attached() as tracer:
            report = tracer.report()
        assert inferred(report) == WAITS
        ages = [call["age_ns"] for call in report["in_flight"]]
        assert all(1_000_000_000 <= age < 5_000_000_000 for age in ages)
        assert all(call["age_ns_is"] == "lower_bound" for call in report["in_flight"])
        assert counts(report) == {}


@pytest.mark.parametrize("how", ["block", "spin"])
@pytest.mark.parametrize("way", ["exported", "private", "inside"])
def test_next_calls_are_exact(how: str, way: str) -> None:
    """The call found inside ends; what comes after it is counted exactly, and nothing stays in flight."""
    environment = {"STALLSCOPE_SIM_WAIT": how, "STALLSCOPE_SIM_DRIVER": way}
    # Three spinning threads on two cores leave the tracer's start little time.
    wait_ms = "6000" if how == "spin" else "4000"
    with Program([TARGETS / "inwait", "3", wait_ms, "10"], env=environment) as program:
        program.wait_for("waiting")
        with Tracer([program.pid], "--backend", "object").attached() as tracer:
            truth = program.truth()
            report = tracer.report()
    assert own(report) == hooked(truth["calls"])
    assert balance(report)[0] == balance(report)[1]
    assert report["in_flight"] == []


def test_python_inside_a_wait() -> None:
    """ctypes calls through a register: no call site names the function, the unwinder must prove it."""
    with Program(["/usr/bin/python3", ROOT / "tests" / "targets" / "inwait.py", "15000", "10"]) as program:
        program.wait_for("waiting")
        with Tracer([program.pid], "--duration", "0.5", "--backend", "object").attached() as tracer:
            report = tracer.report()
        assert inferred(report)
        assert inferred(report) <= WAITS


def test_library_loaded_later() -> None:
    """Linked within 50 ms of its mapping: every call from 50 ms after the load on is counted."""
    library = SIM_LIB / "libcudart.so.12"
    with Program([TARGETS / "lateload", library, "2000", "2000", "100"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--sample", "1/1") as tracer:
            tracer.errors.wait_for("attached to PID")
            tracer.errors.wait_for("note: no CUDA in the target yet")
            program.say()
            truth = program.truth()
            report = tracer.report()
    made, seen = truth["calls"]["cudaLaunchKernel"], own(report)["cudaLaunchKernel"]
    assert made - seen <= 2000 * 0.050
    gaps = [gap for gap in report["capture"]["gaps"] if gap["source"] == "link"]
    assert gaps
    assert all(gap["to_ns"] - gap["from_ns"] < 50_000_000 for gap in gaps)
    launch = next(call for call in report["calls"] if call["api"] == "cudaLaunchKernel")
    assert launch["count_is"] == "lower_bound"


@pytest.mark.parametrize("delay_us", ["0", "30000"])
def test_fork_and_exec_are_followed(delay_us: str) -> None:
    """Children are linked within some ms of their fork; what they did before is inside a stated gap."""
    with Program([TARGETS / "forker", "3", "1000", "100"], env={"FORKER_CHILD_DELAY_US": delay_us}) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--sample", "1/1").attached() as tracer:
            program.say()
            truth = program.truth()
            report = tracer.report()
    by_pid = {process["pid"]: process for process in report["processes"]}
    assert own(report, truth["pid"]) == hooked(truth["calls"])
    parent = by_pid[truth["pid"]]["proc"]
    for child in truth["children"]:
        assert by_pid[child["pid"]]["parent"] == parent
        assert by_pid[child["pid"]]["exit"]["code"] == 0
        made, seen = hooked(child["calls"]), own(report, child["pid"])
        assert all(seen[api] <= made[api] for api in seen)
        if delay_us == "30000":
            assert seen == made
        else:
            assert any(gap["proc"] == by_pid[child["pid"]]["proc"] for gap in report["capture"]["gaps"])
    assert balance(report)[0] == balance(report)[1]


@pytest.mark.parametrize("how", ["leader", "thread"])
@pytest.mark.parametrize("prefix", [[], ["setarch", "-R"]], ids=["random", "same addresses"])
def test_exec_in_any_thread(how: str, prefix: list[str]) -> None:
    """Whichever thread execs, and wherever the libraries come to lie: counted, and driver calls are nested."""
    with Program([*prefix, TARGETS / "execer", how, "500"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--sample", "1/1").attached() as tracer:
            program.say()
            truth, report = program.truth(), tracer.report()
    assert own(report)["cudaMalloc"] == truth["calls"]["cudaMalloc"] == 500
    inner = [call for call in report["calls"] if call["library"] == "CUDA"]
    assert inner
    assert all(call["nested"] == call["count"] for call in inner)


def test_children_are_left_alone_when_asked() -> None:
    """--no-children."""
    with Program([TARGETS / "forker", "3", "1000", "100"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--no-children").attached() as tracer:
            program.say()
            truth, report = program.truth(), tracer.report()
    assert [process["pid"] for process in report["processes"] if process["traced"]] == [truth["pid"]]
    assert own(report) == hooked(truth["calls"])


def test_killed_inside_a_wait() -> None:
    """SIGKILL: the calls that never returned are events, the signal is in the report."""
    with Program([TARGETS / "million", "100", "10", "60000000"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--sample", "1/1").attached() as tracer:
            program.say()
            time.sleep(0.5)
            os.kill(program.pid, signal.SIGKILL)
            report = tracer.report()
    assert report["processes"][0]["exit"]["signal"] == signal.SIGKILL
    assert balance(report)[0] == balance(report)[1]
    assert report["in_flight"] == []


def test_in_flight_at_the_end() -> None:
    """The tracer leaves while three threads wait: they are listed with an exact age, and count as events."""
    with Program([TARGETS / "million", "100", "10", "60000000"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--sample", "1/1").attached() as tracer:
            program.say()
            time.sleep(1.3)
            tracer.stop()
            report = tracer.report()
    waiting = [call for call in report["in_flight"] if not call["inferred"]]
    assert len(waiting) == 4
    assert {call["api"] for call in waiting} <= {*WAITS, "cudaStreamSynchronize_ptsz", "cuStreamSynchronize"}
    assert all(1_000_000_000 <= call["age_ns"] < 3_000_000_000 for call in waiting)
    assert all("age_ns_is" not in call for call in waiting)
    assert balance(report)[0] == balance(report)[1]


def test_two_processes_at_once(tmp_path: Path) -> None:
    """Several PIDs: each its own counts."""
    words = [TARGETS / "million", "2000", "50", "300"]
    with Program(words) as one, Program(words) as two:
        one.wait_for("ready")
        two.wait_for("ready")
        with Tracer([one.pid, two.pid]).attached() as tracer:
            one.say()
            two.say()
            first, second = one.truth(), two.truth()
            report = tracer.report()
    assert own(report, first["pid"]) == hooked(first["calls"])
    assert own(report, second["pid"]) == hooked(second["calls"])

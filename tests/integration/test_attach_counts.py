"""Exact counts on the simulated runtime: every hook, every way to the driver, every sampling rate."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import STALLSCOPE, TARGETS, Program, Tracer, balance, counts, recorded

from stallscope.wire.hook_table import BY_NAME

pytestmark = pytest.mark.usefixtures("needs_bpf", "by_bcc")
WAYS = ("exported", "private", "inside")


@pytest.fixture
def by_bcc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As users attach: bcc compiles."""
    monkeypatch.setattr(harness, "BACKEND", [])


def hooked(truth: dict[str, int]) -> Counter[str]:
    """What probes should count: `__cudaLaunchKernel` jumps into `cudaLaunchKernel`, and so on by the hook table."""
    found: Counter[str] = Counter()
    for api, count in truth.items():
        api = api.removeprefix("__") if BY_NAME.get(api) and BY_NAME[api].mode == "SHIM" else api
        if api in BY_NAME:
            found[api] += count
    return found


def own(report: dict[str, Any], pid: int | None = None) -> Counter[str]:
    """Calls that are not part of another call."""
    found: Counter[str] = Counter()
    for call in report["calls"]:
        if (pid is None or call["pid"] == pid) and call["count"] - call["nested"]:
            found[call["api"]] += call["count"] - call["nested"]
    return found


def run_million(rounds: int, waits: int, wait_us: int, *options: str, way: str = "exported") -> tuple[Any, Any]:
    """(truth, report) of the four-thread program, attached before its counted calls."""
    words = [TARGETS / "million", str(rounds), str(waits), str(wait_us)]
    with Program(words, env={"STALLSCOPE_SIM_DRIVER": way}) as program:
        program.wait_for("ready")
        with Tracer([program.pid], *options).attached() as tracer:
            program.say()
            return program.truth(), tracer.report()


@pytest.mark.parametrize("way", WAYS)
def test_every_count_is_exact(way: str) -> None:
    """Four threads, all families, in each way the runtime may reach the driver."""
    truth, report = run_million(20_000, 200, 300, "--sample", "1/7", way=way)
    assert own(report) == hooked(truth["calls"])
    assert balance(report)[0] == balance(report)[1]
    assert report["capture"]["lost"] == 0
    notes = " ".join(report["capture"]["notes"])
    nested = sum(call["nested"] for call in report["calls"])
    if way == "exported":
        assert nested > 0
    else:
        assert nested == 0
        assert "libcuda" in notes


@pytest.mark.parametrize("sample", ["1/1", "1/1000"])
def test_a_million_launches(sample: str, tmp_path: Path) -> None:
    """All recorded at 1/1, about a thousandth at 1/1000; counts and waits the same."""
    recording = tmp_path / "million.stall"
    truth, report = run_million(250_000, 1000, 300, "--sample", sample, "-o", str(recording), way="private")
    assert own(report) == hooked(truth["calls"])
    left, made = balance(report)
    assert left == made
    assert made >= 1_000_000
    if sample == "1/1":
        assert report["capture"]["lost"] == 0
        assert report["capture"]["sampled_out"] == 0
        assert len(recorded(recording)["cudaLaunchKernel"]) == hooked(truth["calls"])["cudaLaunchKernel"]
    else:
        rows = recorded(recording)
        launches = hooked(truth["calls"])["cudaLaunchKernel"]
        assert 0.7 < len(rows["cudaLaunchKernel"]) * 1000 / launches < 1.3
    check_long_waits(truth, recording)


def check_long_waits(truth: dict[str, Any], recording: Path) -> None:
    """Waits of at least 200 us are all recorded, and their total is the program's own within 5 %."""
    rows = recorded(recording)
    for api, want in truth["long_waits"].items():
        if api not in ("cudaStreamSynchronize", "cudaEventSynchronize", "cuStreamSynchronize"):
            continue
        durations = rows[api]["dur_ns"][rows[api]["dur_ns"] >= 200_000]
        # The program's clock stands outside the probes: a wait at the very edge may be long for it and short for us.
        assert float(durations.sum()) == pytest.approx(want["total_ns"], rel=0.05)


def test_total_of_waits_in_the_report() -> None:
    """Waits of 1 ms: the report's total against the program's own clock."""
    truth, report = run_million(2000, 500, 1000, way="private")
    totals: Counter[str] = Counter()
    for stall in report["stalls"]:
        totals[stall["api"]] += stall["total_ns"]
    for api in ("cudaStreamSynchronize", "cudaEventSynchronize", "cuStreamSynchronize"):
        assert totals[api] == pytest.approx(truth["long_waits"][api]["total_ns"], rel=0.05)


def test_forced_overflow_keeps_the_equation() -> None:
    """The tracer is stopped while the target floods its ring: losses are counted, placed in time, and nothing else."""
    words = [TARGETS / "million", "150000", "100", "300"]
    with Program(words, env={"STALLSCOPE_SIM_DRIVER": "private"}) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--sample", "1/1").attached() as tracer:
            os.kill(tracer.process.pid, signal.SIGSTOP)
            program.say()
            truth = program.truth()
            os.kill(tracer.process.pid, signal.SIGCONT)
            report = tracer.report()
    assert own(report) == hooked(truth["calls"])
    left, made = balance(report)
    assert left == made
    capture = report["capture"]
    assert capture["lost"] > 100_000
    assert sum(capture["lost_by"].values()) == capture["lost"]
    gaps = [gap for gap in capture["gaps"] if gap["reason"] == "bulk ring full"]
    assert sum(gap["count"] for gap in gaps) == capture["lost_by"]["bulk ring full"]
    assert all(gap["from_ns"] < gap["to_ns"] for gap in gaps)


def test_python_ctypes_program() -> None:
    """The same through ctypes."""
    from harness import ROOT

    with Program(["/usr/bin/python3", ROOT / "tests" / "targets" / "calls.py", "50"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--sample", "1/3").attached() as tracer:
            program.say()
            truth, report = program.truth(), tracer.report()
    assert own(report) == hooked(truth["calls"])
    assert balance(report)[0] == balance(report)[1]


def test_report_of_the_recording_is_the_live_report(tmp_path: Path) -> None:
    """To the byte."""
    import subprocess

    recording = tmp_path / "live.stall"
    with Program([TARGETS / "million", "5000", "100", "300"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "-o", recording).attached() as tracer:
            program.say()
            program.truth()
            assert tracer.process.stdout is not None
            live = tracer.process.stdout.read()
            assert tracer.process.wait(30) == 0
    replay = subprocess.run([*STALLSCOPE, "report", recording, "--json"], capture_output=True, text=True, check=True)
    assert replay.stdout == live


def test_rates_are_checked() -> None:
    """0, more than 1 and nonsense are refused before anything happens."""
    import subprocess

    for rate in ("0", "2", "0%", "150%", "1/0", "x", "-1/2", "nan"):
        done = subprocess.run([*STALLSCOPE, "attach", "1", f"--sample={rate}"], capture_output=True, text=True)
        assert done.returncode == 2, rate
        assert "rate" in done.stderr


def test_sampling_does_not_alias() -> None:
    """A program whose step makes 8 calls: 1 in 8 still sees each kind of call at about its share."""
    truth, report = run_million(40_000, 0, 300, "--sample", "1/8", way="private")
    out = {c["api"]: c for c in report["calls"]}
    assert out["cudaLaunchKernel"]["count"] == hooked(truth["calls"])["cudaLaunchKernel"]
    share = report["capture"]["events"] / balance(report)[1]
    assert 0.1 < share < 0.15


def test_detached_target_runs_on(tmp_path: Path) -> None:
    """Ctrl-C in the middle: the target never notices, and its breakpoints are gone."""
    with Program([TARGETS / "million", "100000", "100", "300"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid]).attached() as tracer:
            program.say()
            time.sleep(0.1)
            tracer.stop()
            report = tracer.report()
        truth = program.truth()
    seen = own(report)
    assert balance(report)[0] == balance(report)[1]
    assert all(seen[api] <= hooked(truth["calls"])[api] for api in seen)
    assert counts(report)

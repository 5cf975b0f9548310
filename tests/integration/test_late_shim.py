"""An agent that comes late to a process with the shim: it has the newest records, and the numbers of all."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import ROOT, Tracer, balance, counts, recorded
from run_kit import Preloaded
from test_late_communicators import state_of

STEADY = ROOT / "tests" / "targets" / "steady_operations.py"
LATE_S = float(os.environ.get("STALLSCOPE_LATE_SECONDS", "600"))
LONG = pytest.mark.skipif(
    not os.environ.get("STALLSCOPE_LONG_TESTS"), reason="minutes: STALLSCOPE_LONG_TESTS=1 runs it"
)
ENTER, BEFORE = 1, "before the attach"


def attached_late(recording: Path, fast: int, seconds: float, **env: str) -> tuple[dict[str, Any], dict[str, Any], int]:
    """(truth, report, CLOCK_MONOTONIC ns of the attach); the program goes on for a second then."""
    words = [sys.executable, STEADY, str(fast), str(seconds)]
    with Preloaded(words, STALLSCOPE_SIM_DEVICES="1", **env) as program:
        program.wait_for("long since", seconds + 60)
        with Tracer([program.pid], "-o", recording).attached() as tracer:
            at_ns = time.monotonic_ns()
            time.sleep(1)
            program.say()
            return program.truth(), tracer.report(), at_ns


def check(recording: Path, truth: dict[str, Any], report: dict[str, Any], at_ns: int, window: int) -> None:
    """The newest `window` operations of before the attach and all since are records; all are counted and numbered."""
    capture, made = report["capture"], truth["operations"]
    left, calls = balance(report)
    assert left == calls, capture["notes"]
    assert capture["lost"] == 0 and capture["lost_by"] == {}
    assert counts(report)["ncclAllReduce"] == made
    (comm,) = report["communicators"]
    assert (comm["unique_id"], comm["identity"]) == (truth["uid"], "verified")
    assert [(m["rank"], m["next_seq"]) for m in comm["members"]] == [(0, made)]
    rows = recorded(recording)["ncclAllReduce"]
    entries = np.sort(rows[rows["kind"] == ENTER], order="ts_ns")
    numbers = entries["n"].tolist()
    assert numbers == list(range(numbers[0], made))
    assert int((entries["ts_ns"] < at_ns).sum()) >= window
    assert capture["filtered"][BEFORE] >= numbers[0] > 10 * window
    (gap,) = [gap for gap in capture["gaps"] if gap["reason"] == BEFORE]
    begun_ns = int(capture["start_unix_ns"]) + gap["to_ns"] - (time.time_ns() - time.monotonic_ns())
    assert begun_ns <= int(entries["ts_ns"][0]) + 100_000_000 and begun_ns < at_ns
    state = state_of(recording)
    places = [place for issuer in state.operations.issuers.values() for place in issuer.places.values()]
    assert [(place.collectives, place.spoiled) for place in places] == [(made, False)]
    assert [issuer.missing for issuer in state.operations.issuers.values()] == [0]


@pytest.mark.usefixtures("needs_bpf")
def test_rings_that_have_wrapped_many_times(tmp_path: Path) -> None:
    """In a folder rings are small: 512 records are 256 operations."""
    folder = tmp_path / "segments"
    folder.mkdir()
    truth, report, at_ns = attached_late(tmp_path / "a.stall", 20_000, 2, STALLSCOPE_SHIM=f"dir:{folder}")
    check(tmp_path / "a.stall", truth, report, at_ns, 200)


@LONG
@pytest.mark.usefixtures("needs_bpf")
def test_ten_minutes_late(tmp_path: Path) -> None:
    """With the usual rings."""
    truth, report, at_ns = attached_late(tmp_path / "a.stall", 0, LATE_S)
    assert truth["operations"] > 50 * LATE_S
    check(tmp_path / "a.stall", truth, report, at_ns, 1900)

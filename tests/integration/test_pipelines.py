"""A native pipeline under a Python iterator: threads, streams and a static runtime of its own, the driver by dlsym."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import ROOT, Program, Tracer, counts

pytestmark = pytest.mark.usefixtures("needs_bpf")
TARGET = ROOT / "tests/targets/pipeline.py"
BATCHES, PERIOD_US = 150, 40_000
COPY, SYNCHRONIZE = "cuMemcpyHtoDAsync_v2", "cuStreamSynchronize"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """(truth, report, recording)."""
    recording = tmp_path_factory.mktemp("pipeline") / "r"
    with Program([sys.executable, TARGET, BATCHES, PERIOD_US]) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "-o", recording).attached() as tracer:
            program.say()
            truth = json.loads(program.wait_for("{"))
            program.say()
            return truth, tracer.report(), recording


def of_line(report: dict[str, Any], line: int) -> dict[str | None, dict[str, Any]]:
    return {s["api"]: s for s in report["stalls"] if s["user_site"] and s["user_site"]["line"] == line}


def test_waits_in_the_driver_are_seen_once_at_their_line(traced: tuple[dict[str, Any], dict[str, Any], Path]) -> None:
    truth, report, _ = traced
    rows = of_line(report, truth["lines"]["Direct"])
    assert {api: row["count"] for api, row in rows.items()} == {COPY: truth["driver"], SYNCHRONIZE: truth["driver"]}
    assert rows[SYNCHRONIZE]["user_site"]["function"].endswith("__next__")
    assert not any(call["nested"] for call in report["calls"] if call["api"] == SYNCHRONIZE)
    assert any("stripped static runtime" in note for note in report["capture"]["notes"])


def test_producers_are_named_with_what_they_do(traced: tuple[dict[str, Any], dict[str, Any], Path]) -> None:
    truth, report, recording = traced
    threads = report["threads"]
    producers = [row for row in threads if row["python"] is False]
    assert [row["name"] for row in producers] == ["decode", "decode"]
    (main,) = [row for row in threads if row["python"]]
    assert (main["tid"], main["waits"], main["copies_to_device"]) == (truth["pid"], truth["driver"], truth["driver"])
    # All that was counted in the kernel, less what a thread may be inside of at the end.
    for name, api in (("copies_to_device", COPY), ("waits", SYNCHRONIZE)):
        assert 0 <= counts(report)[api] - sum(row[name] for row in threads) <= len(producers)
    assert all(row["copies_to_device"] > BATCHES / 4 and row["wait_ns"] > 0 for row in producers)
    words = [*harness.STALLSCOPE, "report", str(recording)]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "threads that are none of Python's and feed the device" in text and "decode" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_line_that_waits_on_a_condition_variable(traced: tuple[dict[str, Any], dict[str, Any], Path]) -> None:
    """By looks: no call is made that a probe could see."""
    truth, report, _ = traced
    (row,) = [s for s in report["stalls"] if s["kind"] == "data"]
    assert (row["cause"], row["cause_is"], row["api"], row["total_ns_is"]) == (
        "pipeline",
        "estimated",
        None,
        "estimated",
    )
    assert row["user_site"]["line"] == truth["lines"]["Batches"] and row["user_site"]["file"] == str(TARGET)
    assert row["count"] > 10 and row["looks"] > 30
    # It waits nearly always; a machine that is busy with something else lets it wait for a CPU, too.
    assert 0.5 < row["total_ns"] / row["watched_ns"] <= 1
    assert row["total_ns"] < 1.2 * truth["waited_ns"]

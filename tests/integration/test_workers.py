"""What trainers wait for: slow workers, and dead ones."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, Program, Tracer
from run_kit import Running, environment

LOADER = ROOT / "tests" / "targets" / "loader.py"


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "slow-data"
    os.mkfifo(path)
    yield path


def pids_of(line: str) -> dict[str, int]:
    found: dict[str, int] = json.loads(line.removeprefix("ready"))
    return found


def check_starvation(
    report: dict[str, Any], truth: dict[str, float], pids: dict[str, int], trainer: int, path: Path
) -> None:
    rows = {p["proc"]: p for p in report["processes"]}
    (stall,) = [s for s in report["stalls"] if s["kind"] == "data"]
    assert stall["pid"] == trainer and stall["total_ns_is"] == "estimated"
    assert abs(stall["total_ns"] / 1e9 / truth["waited_s"] - 1) < 0.1, (stall, truth)
    workers = {rows[row["proc"]]["pid"]: row for row in report["workers"]}
    assert set(workers) == set(pids.values())
    slowest = report["workers"][0]
    assert rows[slowest["proc"]]["pid"] == pids["1"]
    assert slowest["waiting_in"] == {"syscall": "read", "file": str(path)}
    assert slowest["blocked_ns"] > 2 * slowest["idle_ns"]
    others = [row for pid, row in workers.items() if pid != pids["1"]]
    assert all(row["idle_ns"] > 2 * (row["blocked_ns"] + row["busy_ns"]) for row in others), others
    assert all(row["starved_ns"] < slowest["starved_ns"] / 2 for row in others)


def test_a_slow_worker(needs_bpf: None, fifo: Path) -> None:
    with Program([sys.executable, LOADER, "3", "18", "spawn", fifo]) as program:
        pids = pids_of(program.wait_for("ready"))
        with Tracer([program.pid]) as tracer:
            tracer.attached()
            time.sleep(1)
            program.say()
            truth = json.loads(program.wait_for("{"))
            tracer.stop()
            report = tracer.report()
    check_starvation(report, truth, pids, program.pid, fifo)
    assert report["incidents"] == []


def test_workers_that_end_in_order_are_no_incident(needs_bpf: None) -> None:
    with Program([sys.executable, LOADER, "2", "6", "spawn"]) as program:
        pids_of(program.wait_for("ready"))
        with Tracer([program.pid]) as tracer:
            tracer.attached()
            program.say()
            program.wait_for("{")
            time.sleep(3)
            tracer.stop()
            report = tracer.report()
    assert report["incidents"] == []
    ends = [p["exit"] for p in report["processes"] if p["role"] == "loader_worker"]
    assert [end["code"] for end in ends] == [0, 0]


def test_run(fifo: Path) -> None:
    """Without privileges the same is seen of processes of one's own."""
    with Running([sys.executable, str(LOADER), "2", "12", "spawn", str(fifo)], "--json", env=environment()) as running:
        pids = pids_of(running.lines.wait_for("ready"))
        time.sleep(1.5)
        running.say()
        truth = json.loads(running.lines.wait_for("{"))
        assert running.process.stdin
        running.process.stdin.close()
        text = running.lines.rest()
    report = json.loads(text[text.index('{\n "schema"') :])
    trainer = next(p["pid"] for p in report["processes"] if p["role"] == "trainer")
    check_starvation(report, truth, pids, trainer, fifo)

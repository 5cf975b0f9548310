"""`stallscope attach` on a trainer that starves for data of a real DataLoader."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from torch_kit import python_command, torch_environment

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "integration"))

from harness import Program, Tracer  # noqa: E402

pytestmark = pytest.mark.usefixtures("needs_bpf")
WORKERS, BATCHES = 3, 36


def test_starved_by_one_slow_worker() -> None:
    command = [*python_command(), HERE / "loading.py", str(WORKERS), str(BATCHES)]
    with Program(command, sim=False, env=torch_environment()) as program:
        pids = json.loads(program.wait_for("ready", 120).removeprefix("ready"))
        with Tracer([program.pid]).attached() as tracer:
            time.sleep(1)
            program.say()
            truth = json.loads(program.wait_for("{"))
            tracer.stop()
            report = tracer.report()
    (stall,) = [s for s in report["stalls"] if s["kind"] == "data"]
    assert stall["pid"] == program.pid
    assert abs(stall["total_ns"] / 1e9 / truth["waited_s"] - 1) < 0.1, (stall, truth)
    people = {p["proc"]: p for p in report["processes"]}
    workers = {people[row["proc"]]["pid"]: row for row in report["workers"]}
    assert set(workers) == set(pids.values())
    slowest = report["workers"][0]
    assert people[slowest["proc"]]["pid"] == pids["1"] and people[slowest["proc"]]["role"] == "loader_worker"
    assert slowest["waiting_in"]["syscall"] == "clock_nanosleep"
    assert slowest["starved_ns"] > 3 * max(row["starved_ns"] for pid, row in workers.items() if pid != pids["1"])
    assert report["incidents"] == []

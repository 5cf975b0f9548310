"""Steps of the simulated job: what it counted itself against what is seen from below."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from harness import STALLSCOPE, Program, Tracer
from run_kit import environment, run

JOB = [sys.executable, "-m", "stallscope.sim.job"]


def traced(tmp_path: Path, *options: str | int) -> tuple[Any, list[int]]:
    """(`steps` of the report, steps of each rank by its own count)."""
    truth = tmp_path / "truth.json"
    words = [*JOB, *map(str, options), "--duration", "40", "--truth", truth]
    done = run(words, "-o", tmp_path / "steps.stall")
    assert done.code == 0, done.err
    made = [rank["steps"] for rank in json.loads(truth.read_text())["ranks"]]
    return done.report["steps"], made


def ranks_of(launcher: int) -> list[int]:
    """Pids of the job's ranks."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in children if b"--rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.parametrize(("ranks", "flat"), [(2, 0), (2, 50), (4, 50)])
def test_the_first_steps_have_another_signature(tmp_path: Path, ranks: int, flat: int) -> None:
    steps, made = traced(tmp_path, "--ranks", ranks, "--steps", 160, "--flat", flat)
    assert [part["count"] for part in steps["processes"]] == made == [160] * ranks
    assert "count_is" not in steps and steps["from_start"]
    found = [(one["first"], one["last"]) for one in steps["ranges"] if one["count"] > 1]
    assert found == ([(1, flat)] if flat else [])
    for one in steps["ranges"][: bool(flat)]:
        assert "ncclReduceScatter" in one["says"] and len(one["procs"]) == ranks and "first_is" not in one


def test_evaluations_and_checkpoints_are_no_steps(tmp_path: Path) -> None:
    options = ("--ranks", 2, "--steps", 155, "--eval-every", 25, "--checkpoint-every", 0.5, "--checkpoint-write", 0.1)
    steps, made = traced(tmp_path, *options)
    assert steps["count"] == made[0] == 155
    again = [one for one in steps["ranges"] if one["every"] == 25]
    assert [(one["first"], one["count"]) for one in again] == [(26, 6)] and "ncclAllReduce" in again[0]["says"]


def test_one_gpu(tmp_path: Path) -> None:
    steps, made = traced(tmp_path, "--ranks", 1, "--steps", 120)
    assert steps["count"] == made[0] == 120


def test_what_nothing_tells_is_not_called_exact(tmp_path: Path) -> None:
    """Hosts that run ahead wait for events only, whatever they do: their first steps are kernels and no more."""
    steps, made = traced(tmp_path, "--ranks", 2, "--steps", 400, "--flat", 150, "--ahead", 100)
    assert steps["count"] == made[0] - 150 and steps["count_is"] == "lower_bound"
    assert steps["launches_before"] == pytest.approx(150 * 20, rel=0.2)


def test_an_attach_in_the_middle(tmp_path: Path) -> None:
    truth = tmp_path / "truth.json"
    words = [*JOB, "--ranks", 2, "--steps", 1000, "--duration", "40", "--truth", truth]
    with Program(words, env=environment()) as job:
        time.sleep(1.5)
        with Tracer([job.pid, *ranks_of(job.pid)], "-o", tmp_path / "late.stall") as tracer:
            report = tracer.attached().report()
    steps = report["steps"]
    assert 20 < steps["count"] < 1000 and not steps["from_start"]
    replay = [*STALLSCOPE, "report", tmp_path / "late.stall", "--json"]
    assert json.loads(subprocess.run(replay, capture_output=True, check=True).stdout) == report


def test_an_attach_to_the_launcher_sees_every_step(tmp_path: Path) -> None:
    truth = tmp_path / "truth.json"
    words = [
        *JOB,
        "--ranks",
        2,
        "--steps",
        160,
        "--flat",
        50,
        "--duration",
        "40",
        "--hold",
        "--load-time",
        2,
        "--truth",
        truth,
    ]
    with Program(words, env=environment()) as job, Tracer([job.pid], "-o", tmp_path / "whole.stall") as tracer:
        tracer.attached()
        job.say()
        steps = tracer.report()["steps"]
    assert [part["count"] for part in steps["processes"]] == [160, 160]
    assert steps["count_is"] == "lower_bound"  # a step without NCCL may have been made before the link
    assert [(one["first"], one["last"]) for one in steps["ranges"] if one["count"] > 1] == [(1, 50)]

"""Events lost on purpose: no verdict rests on something that may only not have been seen."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from culprit_losses import Loss, cut, frames_of, slots_of, start_of
from culprit_run import RANKS, a_job, a_tracer, maybe, until

from stallscope.wire.frames import Frame

SECOND = 1_000_000_000
AT_FAULT, INNOCENT = 1, 3


class Recorded(NamedTuple):
    """A recording and the truth of its job."""

    frames: list[Frame]
    truth: dict[str, Any]

    def pid(self, rank: int) -> int:
        """Of a rank."""
        return int(self.truth["ranks"][rank]["pid"])

    def slot(self, rank: int) -> int:
        """Of a rank's records."""
        return slots_of(self.frames)[self.pid(rank)]


def record(path: Path, *options: str) -> Recorded:
    with (
        a_job("--duration=300", "--load-time=0.5", *options) as job,
        a_tracer(job, "-o", str(path)) as tracer,
    ):
        job.go()
        if options:
            fault = until(job.fault, 60, "no fault")
            maybe(lambda: tracer.lines.first("incident "), fault["start_ns"] + 7 * SECOND)
        else:
            until(lambda: job.steps() >= 150, 60, "the job did not come so far")
        tracer.report()
        truth = job.end()
    return Recorded(frames_of(path), truth)


@pytest.fixture(scope="module")
def blocked(tmp_path_factory: pytest.TempPathFactory, _bpf_refusal: str) -> Iterator[Recorded]:
    if _bpf_refusal:
        pytest.skip(_bpf_refusal)
    yield record(tmp_path_factory.mktemp("blocked") / "a.stall", f"--fault=never:rank={AT_FAULT},step=60")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory, _bpf_refusal: str) -> Iterator[Recorded]:
    if _bpf_refusal:
        pytest.skip(_bpf_refusal)
    yield record(tmp_path_factory.mktemp("healthy") / "a.stall")


def report_of(path: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "stallscope.cli.main", "report", str(path), "--json"]
    report: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)
    return report


def incidents_without(recorded: Recorded, loss: Loss, folder: Path) -> list[dict[str, Any]]:
    path = folder / "cut.stall"
    assert cut(recorded.frames, loss, path) > 0
    report = report_of(path)
    assert any(gap["reason"] == "vital ring full" for gap in report["capture"]["gaps"])
    found: list[dict[str, Any]] = report["incidents"]
    return found


def middle(recorded: Recorded) -> int:
    """An instant at which all ranks are at work."""
    return (start_of(recorded.frames) + max(f.body.get("at_ns") or 0 for f in recorded.frames)) // 2


@pytest.mark.parametrize("rank", [None, 0, INNOCENT, RANKS - 1])
@pytest.mark.parametrize("seconds", [0.3, 1.5, 1000])
def test_a_healthy_job_stays_healthy(
    needs_bpf: None, healthy: Recorded, tmp_path: Path, rank: int | None, seconds: float
) -> None:
    at = middle(healthy)
    slot = None if rank is None else healthy.slot(rank)
    assert incidents_without(healthy, Loss(at, at + int(seconds * SECOND), slot), tmp_path) == []


def test_with_all_records_it_is_named(needs_bpf: None, blocked: Recorded, tmp_path: Path) -> None:
    nothing = Loss(0, 0)
    assert cut(blocked.frames, nothing, tmp_path / "whole.stall") == 0
    (incident,) = report_of(tmp_path / "whole.stall")["incidents"]
    assert incident["class"] == "NOT_ARRIVED" and incident["evidence"] != "host_state", incident
    assert [culprit["pid"] for culprit in incident["culprits"]] == [blocked.pid(AT_FAULT)], incident


def test_who_is_not_seen_is_not_accused(needs_bpf: None, blocked: Recorded, tmp_path: Path) -> None:
    at = blocked.truth["fault"]["start_ns"] - SECOND
    found = incidents_without(blocked, Loss(at, 1 << 62, blocked.slot(INNOCENT)), tmp_path)
    accused = {culprit["pid"] for incident in found for culprit in incident["culprits"]}
    assert accused <= {blocked.pid(AT_FAULT)}, found


def test_an_absence_inside_the_gap_is_no_evidence(needs_bpf: None, blocked: Recorded, tmp_path: Path) -> None:
    at = blocked.truth["fault"]["start_ns"] - SECOND
    found = incidents_without(blocked, Loss(at, 1 << 62, blocked.slot(AT_FAULT)), tmp_path)
    for incident in found:
        assert incident["class"] in ("NOT_ARRIVED", "CANNOT_DECIDE"), incident
        assert not incident["culprits"] or incident["evidence"] == "host_state", incident


def test_a_gap_around_the_fault(needs_bpf: None, blocked: Recorded, tmp_path: Path) -> None:
    at = blocked.truth["fault"]["start_ns"]
    found = incidents_without(blocked, Loss(at - SECOND // 2, at + SECOND // 2), tmp_path)
    for incident in found:
        assert incident["class"] in ("NOT_ARRIVED", "CANNOT_DECIDE"), incident
        assert {culprit["pid"] for culprit in incident["culprits"]} <= {blocked.pid(AT_FAULT)}, incident
        assert not incident["culprits"] or incident["evidence"] == "host_state", incident

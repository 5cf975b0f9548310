"""Waits as flame graphs: each once, under its stack, with its time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from aggregate_kit import Kit

from stallscope.diagnose.waitstacks import WaitStack, wait_stacks
from stallscope.output.flame import folded, speedscope
from stallscope.wire.frames import file_header

STEP, MAIN = ("/job/a;b.py", 12, "step"), ("/job/train.py", 40, "main")


def kit() -> Kit:
    kit = Kit()
    kit.process()
    kit.process(2, pid=4300)
    for ns in (300, 700, 50):
        kit.wait(ns=ns)
    kit.wait("cudaMemcpy", 20, proc=2)
    kit.site(1, [STEP, MAIN], [300, 700])
    return kit.bye()


def stacks() -> list[WaitStack]:
    return wait_stacks(kit().state())


def test_folded() -> None:
    rest = "it waited before its Python was known, or the table of call sites was full"
    assert folded(stacks()).splitlines() == [
        "python3 (pid 4242);main (/job/train.py:40);step (/job/a,b.py:12);cudaStreamSynchronize 1000",
        f"python3 (pid 4242);(line unknown: {rest});cudaStreamSynchronize 50",
        "python3 (pid 4300);(line unknown: not looked up);cudaMemcpy 20",
    ]


def test_speedscope() -> None:
    found = json.loads(speedscope(stacks()))
    names = [frame["name"] for frame in found["shared"]["frames"]]
    first, second = found["profiles"]
    assert [names[i] for i in first["samples"][0]] == ["main", "step", "cudaStreamSynchronize"]
    assert found["shared"]["frames"][0] == {"name": "main", "file": "/job/train.py", "line": 40}
    assert (first["weights"], first["endValue"], first["unit"]) == ([1000, 50], 1050, "nanoseconds")
    assert (second["name"], second["weights"]) == ("python3 (pid 4300)", [20])


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "r"
    path.write_bytes(file_header() + b"".join(kit().encoded()))
    return path


def export(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stallscope.cli.main", "export", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_command(recording: Path, tmp_path: Path) -> None:
    printed = export(recording, "--format", "folded")
    assert (printed.returncode, printed.stdout) == (0, folded(stacks()))
    assert export(recording, "--format", "speedscope", "-o", tmp_path / "out").returncode == 0
    assert (tmp_path / "out").read_text() == speedscope(stacks())
    again = export(recording, "--format", "folded", "-o", tmp_path / "out")
    assert again.returncode != 0 and "it exists and would be overwritten" in again.stderr
    assert export(recording, "--format", "folded", "-o", tmp_path / "out", "--force").returncode == 0
    assert (tmp_path / "out").read_text() == printed.stdout


def test_lower_bounds_are_said(recording: Path) -> None:
    recording.write_bytes(recording.read_bytes()[:-20])
    cut = export(recording, "--format", "folded")
    assert "the weights are lower bounds" in cut.stderr and cut.stdout.endswith(" 20\n")


def test_bad_words(recording: Path) -> None:
    assert export(recording, "--format", "perfetto").returncode == 2
    assert export(recording).returncode == 2
    assert export(recording.parent / "none", "--format", "folded").returncode == 1

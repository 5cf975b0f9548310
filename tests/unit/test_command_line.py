"""What the command line says to arguments it can't take, and to a stdout that takes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from aggregate_kit import small

from stallscope.wire.frames import file_header

ROOT = Path(__file__).resolve().parents[2]
STALLSCOPE = f"{sys.executable} -m stallscope.cli.main"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell in which $S is the program."""
    env = {**os.environ, "S": STALLSCOPE, "PYTHONPATH": str(ROOT / "agent"), "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(["bash", "-o", "pipefail", "-c", line], env=env, capture_output=True, text=True, timeout=60)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "a.stall"
    path.write_bytes(file_header() + b"".join(small().encoded()))
    return path


@pytest.mark.parametrize(("words", "usage", "told"), [
    ("", "stallscope [-h]", "COMMAND"),
    ("frobnicate", "stallscope [-h]", "invalid choice: 'frobnicate'"),
    ("report", "stallscope report [-h]", "FILE"),
    ("report a --bogus", "stallscope report [-h]", "unknown: --bogus"),
    ("doctor abc", "stallscope doctor [-h]", "'abc' is not a process id (a number)"),
    ("doctor 99999999", "stallscope doctor [-h]", "'99999999' is not a process id (1 to 4194303)"),
    ("attach abc", "stallscope attach [-h]", "'abc' is not a process id (a number)"),
    ("attach 1 --duration x", "stallscope attach [-h]", "'x': give a positive number of seconds"),
    ("attach 1 --sample 0", "stallscope attach [-h]", "give a rate above 0"),
    ("run --mode fast -- true", "stallscope run [-h]", "invalid choice: 'fast'"),
])  # fmt: skip
def test_wrong_arguments(words: str, usage: str, told: str) -> None:
    done = shell(f"$S {words}")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"usage: {usage}") and told in done.stderr
    command = usage.removesuffix(" [-h]")
    assert f"stallscope: cannot run `{command}`: " in done.stderr
    assert done.stderr.endswith(f"\n  next: {command} --help\n")


@pytest.mark.parametrize("command", ["top", "hub"])
def test_reserved(command: str) -> None:
    done = shell(f"$S {command}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"stallscope: cannot run `stallscope {command}`: it is not built yet\n  next: ")
    assert not set(done.stderr.split()) & {"SHIM", "DEPLOY", "CALLSITES"}


@pytest.mark.parametrize("words", ["report {}", "report {} --json", "doctor", "doctor --json", "--help", "--version"])
@pytest.mark.parametrize(("stdout", "why"), [(">/dev/full", "No space left on device"), (">&-", "stdout is closed")])
def test_stdout_that_fails(recording: Path, words: str, stdout: str, why: str) -> None:
    done = shell(f"$S {words.format(recording)} {stdout}")
    assert done.returncode == 1
    assert done.stderr.startswith("stallscope: cannot print") and why in done.stderr
    assert "\n  next: " in done.stderr and done.stderr.count("\n") == 2


@pytest.mark.parametrize("words", ["report {}", "report {} --json", "doctor", "doctor --json", "--help"])
def test_nobody_reads(recording: Path, words: str) -> None:
    done = shell(f"$S {words.format(recording)} | true")
    assert done.returncode in (0, 1) and done.stderr == ""
    assert done.returncode == 0 or words.startswith("doctor")  # 1: attach can't work here


def test_closed_stdin_and_stderr(recording: Path) -> None:
    done = shell(f"$S report {recording} <&- 2>&-")
    assert done.returncode == 0 and done.stdout == shell(f"$S report {recording}").stdout


def test_a_recording_without_a_whole_frame(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    first = small().encoded()[0]
    for rest, why in ((b"", "cut off after 32 bytes"), (first[:50], "cut off after 82 bytes"), (b"\xff" * 40, "ends")):
        path.write_bytes(file_header() + rest)
        done = shell(f"$S report {path}")
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.startswith(f"stallscope: cannot report {path}: there is no whole frame in it: it ")
        assert why in done.stderr and "\n  next: record again" in done.stderr

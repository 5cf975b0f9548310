"""What a job waits for before its first step, processes by the thousand, and pids that come again."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, STALLSCOPE, Program, Tracer, counts
from run_kit import run

TARGETS = ROOT / "tests" / "targets"
JOB = [sys.executable, "-m", "stallscope.sim.job", "--ranks", "1", "--steps", "120", "--flat", "20", "--duration", "40"]
PIPE_S, FILE_S, EXACT_S = 3.0, 3.6, 0.1


class Silent:
    """A file that says nothing from when it is opened, for FILE_S or until `release`, then ends."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "kmsg\x1b[2J"  # as hostile as a name can be
        self.seconds, self._end = FILE_S, threading.Event()
        os.mkfifo(self.path)
        threading.Thread(target=self._hold, daemon=True).start()

    def _hold(self) -> None:
        fd = os.open(self.path, os.O_WRONLY)
        self._end.wait(self.seconds)
        os.close(fd)

    def release(self) -> None:
        self._end.set()


@pytest.fixture
def silent(tmp_path: Path) -> Silent:
    return Silent(tmp_path)


def took(output: str) -> tuple[float, float]:
    """How long both checks took by the launcher's own clock, s: on a busy machine all takes longer."""
    pipe_ns, file_ns = next(line for line in output.splitlines() if line.startswith("took")).split()[1:]
    return int(pipe_ns) / 1e9, int(file_ns) / 1e9


def check(report: dict[str, Any], truth: tuple[float, float]) -> None:
    """Both checks with command, file, duration (± 0.1 s); the larger one is the largest."""
    rows = {row["command"].partition(" ")[0]: row for row in report["startup"] if row["what"] == "command"}
    sleep, grep = rows["sleep"], rows["grep"]
    for row, least, most in ((sleep, PIPE_S, truth[0]), (grep, FILE_S, truth[1])):
        assert least - EXACT_S < row["duration_ns"] / 1e9 < most + EXACT_S
    assert (grep["waited_for"]["syscall"], grep["by"]) == ("read", "launch.sh")
    assert grep["waited_for"]["file"].endswith("kmsg\\x1b[2J")
    assert sleep["waited_for"]["syscall"] == "clock_nanosleep"
    assert [row["command"] for row in rows.values() if row["largest"]] == [grep["command"]]
    # A shell that waits for its child, and who reads the child's pipe, are not counted once more.
    waiting = [row for row in report["startup"] if row["what"] == "command" and row not in (sleep, grep)]
    assert {row["command"] for row in waiting} >= {"cat", "sh -c sleep 3; echo ok"}
    assert all(row["avoidable_ns"] < 0.5e9 and row["own_ns"] < 0.5e9 for row in waiting), waiting
    ats = [row["at_ns"] for row in report["startup"] if row["at_ns"] is not None]
    assert ats == sorted(ats)
    way = {row["what"]: row for row in report["startup"] if row["what"] not in ("command", "wait")}
    order = ["imports", "first_cuda_call", "first_launch", "warm_up", "first_steady_step"]
    assert all(way[one]["at_ns"] <= way[two]["at_ns"] for one, two in itertools.pairwise(order))
    assert way["imports"]["duration_ns"] > 0 and way["warm_up"]["duration_ns"] > 0


def first_sentence(recording: Path) -> str:
    """The largest item of the section, as a person reads it."""
    text = subprocess.run([*STALLSCOPE, "report", recording], capture_output=True, text=True, check=True).stdout
    section = text.partition("start-up\n")[2].partition("\n- ")[0]
    return re.sub(r"\s+", " ", section)


def test_attach_to_the_launcher(needs_bpf: None, tmp_path: Path, silent: Silent) -> None:
    recording = tmp_path / "live.stall"
    with Program(["sh", TARGETS / "launch.sh", silent.path, *JOB]) as program:
        program.wait_for("here")
        with Tracer([program.pid], "-o", recording).attached() as tracer:
            program.say()
            truth = took(program.wait_for("took"))
            report = tracer.report()
    check(report, truth)
    rows = {row["command"].partition(" ")[0]: row for row in report["startup"] if row["what"] == "command"}
    assert rows["grep"]["exit"] == {"code": 1, "signal": None} and rows["grep"]["went_on"] is True
    assert rows["sleep"]["exit"] == {"code": 0, "signal": None} and rows["sleep"]["went_on"] is None
    assert "duration_ns_is" not in rows["grep"]
    replay = subprocess.run([*STALLSCOPE, "report", recording, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(replay.stdout) == report
    said = first_sentence(recording)
    assert re.match(r"3\.\d+ s: `grep -q ready .*` \(pid \d+, by launch\.sh\) waited in read\(\) on .*/kmsg", said), (
        said
    )
    assert said.endswith("exit 1, and launch.sh went on")


def test_run(tmp_path: Path, silent: Silent) -> None:
    ran = run(["sh", TARGETS / "launch.sh", silent.path, *JOB], "-o", tmp_path / "run.stall")
    assert ran.code == 0, ran.err
    check(ran.report, took(ran.out))
    grep = next(row for row in ran.report["startup"] if row.get("command", "").startswith("grep"))
    # Its parent alone knows how it ended, unless this kernel tells everybody (6.15).
    assert grep["exit"] in (None, {"code": 1, "signal": None}) and grep["duration_ns_is"] == "estimated"
    assert any("within a second" in note for note in ran.report["capture"]["notes"])


def test_late_attach(needs_bpf: None, silent: Silent) -> None:
    """In the middle of a check: its start is known from /proc, what was before is not."""
    silent.seconds = 60.0
    with Program(["sh", TARGETS / "launch.sh", silent.path, "true"], env={"CHECK_S": "0.1"}) as program:
        program.wait_for("here")
        program.say()
        program.wait_for("searching")
        time.sleep(2)
        with Tracer([program.pid]).attached() as tracer:
            time.sleep(0.5)
            silent.release()
            truth = took(program.wait_for("took"))
            report = tracer.report(4)  # without a word of CUDA
    (grep,) = (row for row in report["startup"] if row.get("command", "").startswith("grep"))
    assert grep["at_ns"] < 0 and grep["largest"] and grep["exit"] == {"code": 1, "signal": None}
    assert grep["duration_ns"] / 1e9 == pytest.approx(truth[1], abs=0.1) and grep["duration_ns_is"] == "estimated"
    assert grep["waited_for"]["duration_ns"] < grep["duration_ns"]
    assert any(note.startswith("start-up: ") and "before the capture" in note for note in report["capture"]["notes"])


def test_two_thousand_processes(needs_bpf: None) -> None:
    """Each is in the report, or one that found no slot, which is a gap by its pid; all of them end well."""
    with Program([sys.executable, TARGETS / "forks.py", "storm", "2000", "4"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid]).attached() as tracer:
            program.say()
            assert program.truth()["count"] == 2000
            report = tracer.report()
    children = [p for p in report["processes"] if p["traced"] and p["pid"] != program.pid]
    notes = "\n".join(report["capture"]["notes"])
    assert not report["capture"]["lost_by"] and "processes began to use it within a second" in notes
    refused = re.search(r"^(\d+) forked processes are not traced because no process slot was free", notes, re.MULTILINE)
    turned_away = int(refused[1]) if refused else 0
    assert len(children) + turned_away == 2000
    pids = {re.match(r"pid (\d+) ", gap["reason"]) for gap in report["capture"]["gaps"] if "slot" in gap["reason"]}
    told = re.search(r"^gaps: (\d+) turned away", notes, re.MULTILINE)
    assert len(pids) + (int(told[1]) if told else 0) >= turned_away
    assert {p["exit"] and (p["exit"]["code"], p["exit"]["signal"]) for p in children} == {(0, None)}
    assert report["capture"]["cost"]["processes"]["capture"]["rss_bytes"] < 64 << 20
    assert len(report["startup"]) < 100


def test_a_pid_that_comes_again(needs_bpf: None) -> None:
    with Program([sys.executable, TARGETS / "forks.py", "again", "5", "7"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid]).attached() as tracer:
            program.say()
            pid = program.truth()["pid"]
            report = tracer.report()
    rows = sorted((p for p in report["processes"] if p["pid"] == pid), key=lambda p: p["start_ns"])
    assert [p["exit"]["code"] for p in rows] == [3, 4] and rows[0]["proc"] != rows[1]["proc"]
    made = {c["proc"]: c["count"] for c in report["calls"] if c["api"] == "cudaDeviceSynchronize"}
    assert [made[p["proc"]] for p in rows] == [5, 7]


def test_the_trainer_is_pid_1_of_its_namespace(needs_bpf: None) -> None:
    """Seen from its fork on: by its number here, and by its own."""
    inner = f"exec unshare --pid --fork --mount-proc {sys.executable} {TARGETS / 'calls.py'} 3"
    with Program(["sh", "-c", f"echo here; read -r _; {inner}"]) as program:
        program.wait_for("here")
        with Tracer([program.pid]).attached() as tracer:
            program.say()
            program.wait_for("ready")
            time.sleep(1)  # linked by now
            program.say()
            truth, report = program.truth(), tracer.report()
    (trainer,) = (p for p in report["processes"] if p["role"] == "trainer")
    assert trainer["ns_pid"] == truth["pid"] == 1 != trainer["pid"]
    parent = next(p for p in report["processes"] if p["proc"] == trainer["parent"])
    assert (parent["name"], parent["role"]) == ("unshare", "launcher")
    assert counts(report, trainer["pid"])["cudaDeviceSynchronize"] == truth["calls"]["cudaDeviceSynchronize"]

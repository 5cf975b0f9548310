"""The whole job: who is whose child, what each was told and lost, under `run` and under `attach`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, STALLSCOPE, Program, Tracer
from run_kit import Running, environment

FAMILY = ROOT / "tests" / "targets" / "family.py"
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
GIVEN = {
    "TRACEPARENT": TRACE, "OTEL_RESOURCE_ATTRIBUTES": "service.name=train,team.token=hunter2", "RANK": "3",
    "WORLD_SIZE": "8", "OTEL_EXPORTER_OTLP_ENDPOINT": "https://me:hunter2@collector:4317", "NCCL_DEBUG": "WARN",
    "OTEL_EXPORTER_OTLP_HEADERS": "x=hunter2", "AWS_SECRET_ACCESS_KEY": "hunter2",
}  # fmt: skip
TOLD = {
    "TRACEPARENT": TRACE, "OTEL_RESOURCE_ATTRIBUTES": "service.name=train,team.token=[cut]", "RANK": "3",
    "WORLD_SIZE": "8", "OTEL_EXPORTER_OTLP_ENDPOINT": "https://[cut]@collector:4317", "NCCL_DEBUG": "WARN",
}  # fmt: skip


_started: list[int] = []


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    """The family of a program that was killed goes on without it."""
    yield
    for pid in _started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _started.clear()


class Ready:
    """What the target said of itself, and its rows of a report."""

    def __init__(self, line: str) -> None:
        said = json.loads(line.removeprefix("ready"))
        self.trainer: int = said["trainer"]
        self.workers: list[int] = said["workers"]
        self.chain: list[int] = said["chain"]
        self.title: int = said["title"]
        _started.extend([*self.workers, *self.chain, self.title])

    def check(self, report: dict[str, Any]) -> None:
        rows = {p["pid"]: p for p in report["processes"]}
        trainer = rows[self.trainer]
        self._check_context(trainer, trainer["proc"], False)
        assert (trainer["role"], trainer["global_rank"]) == ("trainer", 3)
        for pid in self.workers:
            assert (rows[pid]["role"], rows[pid]["global_rank"]) == ("loader_worker", 3)
            assert rows[pid]["parent"] == trainer["proc"]
            self._check_context(rows[pid], rows[pid]["proc"], True)  # it had them at its exec
        for pid, parent in zip(self.chain, [self.trainer, *self.chain], strict=False):
            assert (rows[pid]["role"], rows[pid]["global_rank"]) == ("helper", 3)
            assert rows[pid]["parent"] == rows[parent]["proc"]
            self._check_context(rows[pid], trainer["proc"], True)
        assert {
            name: row["lost"] for name, row in rows[self.title]["trace_context"].items() if name in TOLD
        } == dict.fromkeys(TOLD)
        assert "hunter2" not in json.dumps(report)

    def _check_context(self, row: dict[str, Any], source: int, lost: bool) -> None:
        found = {name: value for name, value in row["trace_context"].items() if name in TOLD}
        assert found == {name: {"value": value, "from": source, "lost": lost} for name, value in TOLD.items()}, row[
            "pid"
        ]


def test_attach(needs_bpf: None, tmp_path: Path) -> None:
    """Also ancestors, which are not traced, and the recording tells the same."""
    recording = tmp_path / "live.stall"
    with Program([sys.executable, FAMILY], env=GIVEN) as program:
        ready = Ready(program.wait_for("ready"))
        with Tracer([program.pid], "-o", recording) as tracer:
            tracer.attached()
            program.say()
            time.sleep(2)
            tracer.stop()
            report = tracer.report()
    ready.check(report)
    ancestors = [p for p in report["processes"] if not p["traced"]]
    assert ancestors and all(p["libraries"] == [] for p in ancestors)
    trainer = report["processes"][0]
    assert trainer["pid"] == program.pid and trainer["parent"] in {p["proc"] for p in ancestors}
    assert b"hunter2" not in recording.read_bytes()
    replay = subprocess.run([*STALLSCOPE, "report", recording, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(replay.stdout) == report
    text = subprocess.run([*STALLSCOPE, "report", recording], capture_output=True, text=True, check=True).stdout
    assert "loader worker, trace lost by itself" in text and ": trainer rank 3, trace 4bf92f35" in text


def test_attach_before_they_begin(needs_bpf: None) -> None:
    """Forks and execs are seen as they happen."""
    waits = "import sys, runpy; print('here', flush=True); sys.stdin.readline(); runpy.run_path(sys.argv[1], run_name='__main__')"
    with Program([sys.executable, "-c", waits, FAMILY], env=GIVEN) as program:
        program.wait_for("here")
        with Tracer([program.pid]) as tracer:
            tracer.attached()
            program.say()
            ready = Ready(program.wait_for("ready"))
            program.say()
            time.sleep(2)
            tracer.stop()
            ready.check(tracer.report())


def test_run() -> None:
    with Running([sys.executable, FAMILY], "--json", env=environment(**GIVEN)) as running:
        ready = Ready(running.lines.wait_for("ready"))
        running.say()
        time.sleep(2)
        assert running.process.stdin
        running.process.stdin.close()
        text = running.lines.rest()
        ready.check(json.loads(text[text.index('{\n "schema"') :]))


def test_the_whole_job(needs_bpf: None, tmp_path: Path) -> None:
    """One rank is given: --job finds the other ranks and their launcher, and the time-out is told."""
    words = [sys.executable, "-m", "stallscope.sim.job", "--ranks", "2", "--steps", "0", "--duration", "60"]
    with Program(words, env={"NCCL_TIMEOUT": "1800"}) as program:
        ranks: list[int] = []
        while len(ranks) < 2:
            time.sleep(0.1)
            ranks = [int(w) for w in Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()]
        time.sleep(2)
        with Tracer([ranks[1]], "--job", "--duration", "3") as tracer:
            report = tracer.report()
    assert {p["pid"] for p in report["processes"] if p["traced"]} == {program.pid, *ranks}
    roles = {p["pid"]: (p["role"], p["global_rank"]) for p in report["processes"]}
    assert [roles[pid] for pid in (program.pid, *ranks)] == [("launcher", None), ("trainer", 0), ("trainer", 1)]
    assert report["capture"]["targets"] == [ranks[1]]
    assert "time-out of the job: 30 min (NCCL_TIMEOUT)" in report["capture"]["notes"]


@pytest.mark.parametrize("gone", ["before", "after"])
def test_a_launcher_that_ends(needs_bpf: None, gone: str) -> None:
    """The child is somebody else's then; its parent stays who started it, as far as that was seen."""
    read, write = os.pipe()
    starts = "import os, subprocess, sys; print(subprocess.Popen([sys.executable, sys.argv[1]]).pid, flush=True); os.read(int(sys.argv[2]), 1)"
    process = subprocess.Popen(
        [sys.executable, "-c", starts, str(FAMILY), str(read)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        pass_fds=[read], env=environment(**GIVEN),
    )  # fmt: skip
    assert process.stdout and process.stdin
    try:
        pid = int(process.stdout.readline())
        ready = Ready(process.stdout.readline())
        if gone == "before":
            os.close(write)
            process.wait(20)
        with Tracer([pid]) as tracer:
            tracer.attached()
            if gone == "after":
                os.close(write)
                process.wait(20)
            process.stdin.write("go\n")
            process.stdin.flush()
            time.sleep(2.5)
            tracer.stop()
            report = tracer.report()
    finally:
        process.stdin.close()
        process.kill()
    ready.check(report)
    rows = {p["pid"]: p for p in report["processes"]}
    if gone == "after":
        launcher = rows[process.pid]
        assert launcher["role"] == "launcher" and launcher["exit"] is not None and not launcher["traced"]
        assert rows[pid]["parent"] == launcher["proc"]
    else:
        assert process.pid not in rows

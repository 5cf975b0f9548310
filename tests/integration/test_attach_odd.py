"""Programs that do unusual things: exec from a side thread, a main thread that has ended, longjmp, signal handlers."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import ROOT, TARGETS, Program, Tracer, balance
from test_attach_counts import own

pytestmark = pytest.mark.usefixtures("needs_bpf")
API = "cudaStreamSynchronize"


@pytest.mark.parametrize("backend", ["bcc", "object"])
def test_exec_from_a_thread_that_is_not_the_main_one(backend: str) -> None:
    """The links die with the old main thread: the new image is linked again, and the time between is a gap."""
    with Program([TARGETS / "odd", "nonleader-exec", "1000"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--sample", "1/1", "--backend", backend).attached() as tracer:
            program.say()
            truth, report = program.truth(), tracer.report()
    # 1000 before the exec, 1000 after it; the one that loads the library may fall into the gap.
    assert own(report)[API] - 1000 in (truth["calls"][API], truth["calls"][API] + 1)
    assert balance(report)[0] == balance(report)[1]
    assert any(gap["source"] == "link" for gap in report["capture"]["gaps"])


@pytest.mark.parametrize("mode", ["leaderless", "leaderless-load"])
def test_main_thread_has_ended(mode: str) -> None:
    """Attached to a process whose main thread is a zombie: its other threads are seen."""
    with Program([TARGETS / "odd", mode, "1000"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--sample", "1/1").attached() as tracer:
            program.say()
            truth, report = program.truth(), tracer.report()
    assert own(report)[API] in (truth["calls"][API], truth["calls"][API] + 1)
    assert balance(report)[0] == balance(report)[1]


def test_a_wait_left_by_longjmp_is_not_in_flight() -> None:
    """It never returns in sight, and the thread is somewhere else: not waiting, but an event all the same."""
    with Program([TARGETS / "odd", "longjmp"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--sample", "1/1").attached() as tracer:
            program.say()
            time.sleep(1.5)
            tracer.stop()
            report = tracer.report()
    assert report["in_flight"] == []
    assert balance(report)[0] == balance(report)[1]


def test_calls_in_signal_handlers() -> None:
    """Handlers that wait while the thread they interrupt is inside a wait: nested, each counted."""
    with Program([TARGETS / "odd", "signals", "200000"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--sample", "1/10").attached() as tracer:
            program.say()
            truth, report = program.truth(), tracer.report()
    made = sum(call["count"] for call in report["calls"] if call["api"] == API)
    assert made == truth["calls"][API]
    assert balance(report)[0] == balance(report)[1]


def test_tracer_inside_a_pid_namespace(tmp_path: Path) -> None:
    """The tracer sees the numbers of its own namespace, and so does BPF."""
    script = tmp_path / "inside.sh"
    script.write_text(
        f"""exec 3<>{tmp_path}/fifo
{TARGETS}/million 5000 100 300 <&3 >{tmp_path}/truth &
pid=$!
sleep 0.5
{sys.executable} -m stallscope.cli.main attach $pid --json --sample 1/1 >{tmp_path}/report 2>{tmp_path}/errors &
tracer=$!
for i in $(seq 100); do grep -q 'attached to' {tmp_path}/errors && break; sleep 0.1; done
echo go >&3
wait $tracer
"""
    )
    subprocess.run(["mkfifo", tmp_path / "fifo"], check=True)
    command = ["unshare", "--pid", "--fork", "--mount-proc", "sh", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, (done.stderr, (tmp_path / "errors").read_text())
    import json

    from test_attach_counts import hooked

    truth = json.loads((tmp_path / "truth").read_text().splitlines()[-1])
    report = json.loads((tmp_path / "report").read_text())
    assert truth["pid"] < 100
    assert own(report, truth["pid"]) == hooked(truth["calls"])
    assert balance(report)[0] == balance(report)[1]

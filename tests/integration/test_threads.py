"""Stacks of all Python threads of a process in which something waits, after 2 s and 10 s."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
from harness import ROOT, Program, Tracer
from run_kit import run

THREADS = ROOT / "tests" / "targets" / "threads.py"
LINES = {text.strip(): number for number, text in enumerate(THREADS.read_text().splitlines(), 1)}
WAITS, GETS, RESTS = "runtime.library.cudaStreamSynchronize(stream)", "return self._items.get()", "time.sleep(1)"


def check(report: dict[str, Any], pid: int, ages_s: list[float]) -> None:
    """At each age: the thread that waits, three that read, one that sleeps, each at its line."""
    rounds: dict[int, list[dict[str, Any]]] = {}
    for row in report["blocked_threads"]:
        assert row["pid"] == pid and row["threads_left_out"] == 0 and row["stack_unknown"] is None
        rounds.setdefault(row["age_ns"], []).append(row)
    assert [pytest.approx(age / 1e9, abs=1.0) for age in sorted(rounds)] == ages_s
    for rows in rounds.values():
        own = [[f["line"] for f in row["stack"] if f["file"] == str(THREADS)] for row in rows]
        assert [row["waits"] for row in rows] == [True, False, False, False, False]
        assert rows[0]["tid"] == pid and own[0][0] == LINES[WAITS]
        assert sorted(lines[0] for lines in own[1:]) == sorted([LINES[GETS]] * 3 + [LINES[RESTS]])


def test_attach(needs_bpf: None) -> None:
    with Program([sys.executable, THREADS, "11.5"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid]).attached() as tracer:
            program.say()
            report = tracer.report()
    check(report, program.pid, [2.0, 10.0])


def test_attach_in_the_middle(needs_bpf: None) -> None:
    """The wait that began before the attach is as old as the attach, at least."""
    with Program([sys.executable, THREADS, "6"]) as program:
        program.wait_for("ready")
        program.say()
        time.sleep(1)
        with Tracer([program.pid]).attached() as tracer:
            time.sleep(2.8)
            tracer.stop()
            report = tracer.report()
    check(report, program.pid, [2.0])


def test_run() -> None:
    ran = run([sys.executable, str(THREADS), "3"])
    (pid,) = {p["pid"] for p in ran.report["processes"]}
    check(ran.report, pid, [2.0])

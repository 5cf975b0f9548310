"""Why each call waits: a program that makes every kind of implicit wait, on lines that it knows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import ROOT, Program, Tracer

pytestmark = pytest.mark.usefixtures("needs_bpf")
TARGET = ROOT / "tests/targets/implicit.py"
STEPS, SETTLED_S = 12, 1.5
COPY, STREAM = "cudaMemcpyAsync", "cudaStreamSynchronize"
TO_HOST, TO_DEVICE = "device_to_host", "host_to_device"
# function -> api -> (cause, direction, memory)
CAUSES: dict[str, dict[str, tuple[str | None, str | None, str | None]]] = {
    "item": {COPY: ("item", TO_HOST, "pinned"), STREAM: ("item", TO_HOST, "pinned")},
    "cpu": {COPY: ("item", TO_HOST, "pageable"), STREAM: ("item", TO_HOST, "pageable")},
    "cuda": {COPY: ("pageable", TO_DEVICE, "pageable"), STREAM: ("pageable", TO_DEVICE, "pageable")},
    "cuda_pinned": {COPY: ("copy", TO_DEVICE, "pinned"), STREAM: ("copy", TO_DEVICE, "pinned")},
    "unpinned": {COPY: ("pageable", TO_DEVICE, "pageable")},
    "pinned_copy": {COPY: (None, TO_DEVICE, "pinned")},
    "synchronize": {"cudaDeviceSynchronize": ("explicit", None, None)},
    "asked_for": {COPY: (None, TO_HOST, "pinned"), STREAM: ("explicit", None, None)},
    "elsewhere": {COPY: (None, TO_HOST, "pinned"), STREAM: ("explicit", None, None)},
    "for_event": {"cudaEventSynchronize": ("event", None, None)},
    "blocking_copy": {"cudaMemcpy": ("copy", TO_HOST, "pageable")},
    "allocate_and_free": {"cudaMalloc": ("alloc", None, None), "cudaFree": ("free", None, None)},
}


def name_of(stall: dict[str, Any]) -> str | None:
    return stall["site"]["function"].rpartition(".")[2] if stall["site"] else None


def found(report: dict[str, Any]) -> dict[str, dict[str, tuple[str | None, str | None, str | None]]]:
    rows: dict[str, dict[str, Any]] = {name: {} for name in CAUSES}
    for stall in report["stalls"]:
        name = name_of(stall)
        if name in rows:
            assert stall["api"] not in rows[name], "one cause a line and function"
            copy = stall["copy"] or {"direction": None, "memory": None}
            rows[name][stall["api"]] = (stall["cause"], copy["direction"], copy["memory"])
    return rows


def counted(report: dict[str, Any]) -> Counter[tuple[str, str]]:
    rows = ((name_of(s), s["api"], s["count"]) for s in report["stalls"])
    return Counter({(name, api): count for name, api, count in rows if name in CAUSES})


def end(program: Program, tracer: Tracer) -> tuple[dict[str, Any], dict[str, Any]]:
    """(truth, report); it lives until its lines have been read."""
    truth = json.loads(program.wait_for("{"))
    time.sleep(SETTLED_S)
    program.say()
    return truth, tracer.report()


@pytest.mark.parametrize("sample", ["1/1", "1/64"])
def test_each_wait_has_its_cause(sample: str, tmp_path: Path) -> None:
    """Exact counts, however few calls are recorded."""
    with Program([sys.executable, TARGET, STEPS, 300]) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--sample", sample, "-o", tmp_path / "r").attached() as tracer:
            program.say()
            program.wait_for("loaded")
            time.sleep(SETTLED_S)  # until the runtime is linked and its Python known
            program.say()
            program.wait_for("set up")
            program.say()
            truth, report = end(program, tracer)
    assert found(report) == CAUSES
    assert counted(report) == {(n, api): count for n, rows in truth["sites"].items() for api, count in rows}
    dry(report, truth)
    text = subprocess.run(
        [*harness.STALLSCOPE, "report", str(tmp_path / "r")], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"implicit.py:\d+ Steps.item +cudaStreamSynchronize .* item *$", text, re.MULTILINE), text
    assert "nothing was queued any more after: implicit.py:" in text and max(map(len, text.splitlines())) <= 80


def dry(report: dict[str, Any], truth: dict[str, Any]) -> None:
    """What the program did between each wait and its next launch; after waits that leave the stream empty."""
    rows = {(name_of(s), s["api"]): s for s in report["stalls"]}
    assert rows["synchronize", "cudaDeviceSynchronize"]["dry_ns_is"] == "lower_bound"
    for name, api in (("item", STREAM), ("synchronize", "cudaDeviceSynchronize"), ("blocking_copy", "cudaMemcpy")):
        row = rows[name, api]
        assert row["dry_count"] == STEPS, row
        assert 0.9 * truth["gap_ns"][name] < row["dry_ns"] < 2 * truth["gap_ns"][name] + 300_000_000, row
    for name, api in (("for_event", "cudaEventSynchronize"), ("unpinned", COPY), ("pinned_copy", COPY)):
        assert rows[name, api]["dry_ns"] is None


def test_memory_that_was_pinned_before_is_not_called_pageable() -> None:
    with Program([sys.executable, TARGET, STEPS, 300]) as program:
        program.wait_for("ready")
        for line in ("loaded", "set up"):
            program.say()
            program.wait_for(line)
        with Tracer([program.pid]).attached() as tracer:
            program.say()
            _, report = end(program, tracer)
    rows = found(report)
    assert {stall["copy"]["memory"] for stall in report["stalls"] if stall["copy"]} == {None}
    assert rows["item"][STREAM][0] == "item" and rows["asked_for"][STREAM][0] == "explicit"
    assert rows["pinned_copy"][COPY][0] is None
    for guess in (s for s in report["stalls"] if name_of(s) in ("unpinned", "cuda")):
        assert (guess["cause"], guess["cause_is"]) == ("pageable", "estimated"), "its copies take as long as the kernel"

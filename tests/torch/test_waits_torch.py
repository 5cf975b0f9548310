"""What makes a training loop of real PyTorch wait, and on which of its lines: exact, however few calls are recorded."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch_kit import python_command, torch_environment

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "integration"))

from harness import Program, Tracer  # noqa: E402

pytestmark = pytest.mark.usefixtures("needs_bpf")
STEPS = 40
COPY, STREAM = "cudaMemcpyAsync", "cudaStreamSynchronize"
TO_HOST, TO_DEVICE = "device_to_host", "host_to_device"
ITEM = {(COPY, "item", TO_HOST), (STREAM, "item", TO_HOST)}
# Memory that is not pinned is known as such only where the attach came before the first call.
PAGEABLE = {(COPY, "pageable", TO_DEVICE), (STREAM, "pageable", TO_DEVICE)}
CAUSES: dict[str, set[tuple[str, str | None, str | None]]] = {
    "item": ITEM,
    "cpu": ITEM,
    "tolist": ITEM,
    "nonzero": ITEM,
    "synchronize": {("cudaDeviceSynchronize", "explicit", None)},
    "stream_synchronize": {(STREAM, "explicit", None)},
    "event_synchronize": {("cudaEventSynchronize", "event", None)},
    "unpinned": {(COPY, "pageable", TO_DEVICE)},
    "unpinned_blocking": PAGEABLE,
    "pinned": {(COPY, None, TO_DEVICE)},
    "pinned_blocking": {(COPY, "copy", TO_DEVICE), (STREAM, "copy", TO_DEVICE)},
}


def lines_of() -> dict[str, int]:
    """function -> the line of waits.py that waits in it: the last one of its body."""
    lines, found, name = (HERE / "waits.py").read_text().splitlines(), {}, ""
    for number, line in enumerate(lines, 1):
        if line.startswith("def "):
            name = line[4 : line.index("(")]
        if line.startswith("    ") and name in CAUSES:
            found[name] = number
        elif line and not line.startswith((" ", "def ")):
            name = ""
    return found


def trace(*options: str) -> tuple[dict[str, int], dict[str, Any]]:
    environment = torch_environment(STALLSCOPE_SIM_KERNEL_NS="200000")
    with Program([*python_command(), HERE / "waits.py", STEPS], sim=False, env=environment) as program:
        program.wait_for("ready", 120)
        with Tracer([program.pid], *options).attached() as tracer:
            program.say()
            truth = json.loads(program.wait_for("{"))
            program.say()
            return truth, tracer.report()


@pytest.mark.parametrize("sample", ["1/1", "1/64"])
def test_cause_and_line_of_each_wait(sample: str) -> None:
    truth, report = trace("--sample", sample)
    found: dict[str, set[tuple[str, str | None, str | None]]] = {name: set() for name in CAUSES}
    counts: Counter[tuple[str, str]] = Counter()
    lines = lines_of()
    for stall in report["stalls"]:
        site = stall["user_site"] or {}
        name = site.get("function")
        if name in CAUSES:
            assert site["line"] == lines[name] and site["file"] == str(HERE / "waits.py")
            found[name].add((stall["api"], stall["cause"], (stall["copy"] or {}).get("direction")))
            counts[name, stall["api"]] += stall["count"]
    assert found == CAUSES
    assert counts == {(name, api): truth[name] for name, rows in CAUSES.items() for api, _, _ in rows}
    assert truth == dict.fromkeys(CAUSES, STEPS)


def test_the_thread_that_pins() -> None:
    _, report = trace()
    pins = [stall for stall in report["stalls"] if stall["cause"] == "pin_memory"]
    assert {stall["api"] for stall in pins} == {"cudaHostAlloc"} and all(stall["kind"] == "alloc" for stall in pins)
    stack = [frame["function"] for stall in pins for call in stall["longest"] for frame in call["stack"]]
    assert "_pin_memory_loop" in stack
    asked = [s for s in report["stalls"] if s["api"] == "cudaHostAlloc" and s["cause"] == "alloc"]
    assert sum(s["count"] for s in asked) == 1 and asked[0]["user_site"]["function"] == "main"


def test_memory_of_copies_as_far_as_it_is_known() -> None:
    _, report = trace()
    memory = {
        (s["user_site"] or {}).get("function"): s["copy"]["memory"] for s in report["stalls"] if s["copy"] is not None
    }
    assert memory["pinned"] == memory["pinned_blocking"] == "pinned"
    assert memory["unpinned"] is None and memory["unpinned_blocking"] is None

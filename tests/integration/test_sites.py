"""Call sites of a Python program that knows its own: file, function, line and count of every wait."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import TARGETS, Program, Tracer
from pythons import EVERY, KNOWN, OTHERS, TARGET, command, minor

pytestmark = pytest.mark.usefixtures("needs_bpf")
WAITS = 19  # of a round, in each of five threads


def run(python: str, *words: Any, options: tuple[str, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """(truth, report)."""
    with Program([*command(python), TARGET, *words]) as program:
        program.wait_for("ready")
        with Tracer([program.pid], *options).attached() as tracer:
            program.say()
            return program.truth(), tracer.report()


def sites(report: dict[str, Any]) -> Counter[str]:
    """ "function:line" -> count of waits whose site is known, in this file or in <churn>."""
    found: Counter[str] = Counter()
    for stall in report["stalls"]:
        if stall["site"]:
            assert stall["site"]["file"] in (str(TARGET), "<churn>"), stall["site"]
            # The first call of a forked child may fall between the links of driver and runtime: then it is the driver's.
            assert stall["site_unknown"] is None and stall["api"] in ("cudaStreamSynchronize", "cuStreamSynchronize")
            found[f"{stall['site']['function']}:{stall['site']['line']}"] += stall["count"]
    return found


@pytest.mark.parametrize("python", KNOWN)
@pytest.mark.parametrize(("rounds", "wait_us"), [(160 if EVERY else 40, 300), (2, 30_000)])
def test_every_wait_at_its_line(python: str, rounds: int, wait_us: int) -> None:
    """In 17 shapes of code, by five threads; recorded one in a hundred, counted all."""
    truth, report = run(python, rounds, wait_us)
    assert sites(report) == truth["sites"] and sum(truth["sites"].values()) == 5 * WAITS * rounds
    total = sum(stall["total_ns"] for stall in report["stalls"])
    assert sum(c["total_ns"] for c in report["calls"] if c["api"] == "cudaStreamSynchronize") == total
    assert all(stall["max_ns"] >= stall["longest"][0]["duration_ns"] for stall in report["stalls"])


@pytest.mark.parametrize("python", KNOWN)
def test_the_callers_too_and_on_the_screen(python: str, tmp_path: Path) -> None:
    _, report = run(python, 20, options=("-o", str(tmp_path / "r")))
    inner = next(s for s in report["stalls"] if s["site"]["function"].rpartition(".")[2] == "innermost")
    stack = [frame for frame in inner["longest"][0]["stack"] if frame["kind"] == "python"]
    names = [frame["function"].rpartition(".")[2] for frame in stack]
    assert names[:4] == ["innermost", "inner", "outer", "one_round"] and names[4] in ("main", "thread")
    deep = [s for s in report["stalls"] if s["site"]["function"] == "recursion"]
    stacks = [call["stack"] for s in deep for call in s["longest"]]
    assert max(sum(frame["kind"] == "python" for frame in stack) for stack in stacks) == 32
    words = [*harness.STALLSCOPE, "report", str(tmp_path / "r")]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert re.search(r"waitsites.py:\d+ batches +cudaStreamSynchronize +200 ", text), text
    words = [*harness.STALLSCOPE, "export", str(tmp_path / "r"), "--format", "folded", "-o", str(tmp_path / "f")]
    subprocess.run(words, check=True)
    weights = [int(line.rpartition(" ")[2]) for line in (tmp_path / "f").read_text().splitlines()]
    assert sum(weights) == sum(stall["total_ns"] for stall in report["stalls"])


@pytest.mark.parametrize("python", KNOWN)
def test_code_that_is_gone_is_unknown_and_never_another_line(python: str) -> None:
    """Each piece waits once and is freed; the next one often takes its place, with another line."""
    truth, report = run(python, 1, 100, 400 if not EVERY else 1500)
    found = sites(report)
    assert all(count <= truth["sites"].get(place, 0) for place, count in found.items())
    unknown = [s for s in report["stalls"] if s["site"] is None]
    assert unknown and all("code object was gone" in s["site_unknown"] for s in unknown)
    assert sum(found.values()) + sum(s["count"] for s in unknown) == sum(truth["sites"].values())


@pytest.mark.parametrize("python", KNOWN)
def test_a_forked_child_from_its_first_wait(python: str) -> None:
    """Its parent's configuration is copied by the kernel, before user space knows of it."""
    truth, report = run(python, 40, 300, 0, "fork")
    child = [s for s in report["stalls"] if s["pid"] == truth["pid"]]
    found = sites({"stalls": child})
    assert found.keys() <= truth["sites"].keys()
    # A page can be away for a moment while the kernel moves it: such a wait is unknown, never another line's.
    unknown = [s for s in child if not s["site"]]
    assert all(s["site_unknown"] for s in unknown) and sum(s["count"] for s in unknown) <= 0.01 * sum(found.values())
    # The links of a child take their time, in which no call is seen; of those that are, each has its site.
    made = harness.counts(report, truth["pid"])["cudaStreamSynchronize"]
    assert sum(found.values()) + sum(s["count"] for s in unknown) == made > 3000


def between(stack: list[dict[str, Any]], inner: str, outer: str) -> list[str]:
    """Names of the native frames between two Python functions that follow each other."""
    names = [frame["function"] if frame["kind"] == "python" else None for frame in stack]
    begin, end = names.index(inner), names.index(outer)
    assert all(name is None for name in names[begin + 1 : end]), names
    return [frame["function"] for frame in stack[begin + 1 : end]]


@pytest.mark.parametrize("python", KNOWN)
@pytest.mark.parametrize("how", ["tables", "pointers", "bare"])
def test_a_c_extension_between_two_python_lines(python: str, how: str) -> None:
    """Its frames are shown where it can be unwound; where it can't, the innermost one, and that more are missing."""
    folder = TARGETS / "border" / how
    with Program([*command(python), TARGET.with_name("bordersites.py"), folder, 50]) as program:
        program.wait_for("ready")
        with Tracer([program.pid]).attached() as tracer:
            program.say()
            truth, report = program.truth(), tracer.report()
    found: Counter[str] = Counter()
    for stall in report["stalls"]:
        found[f"{stall['site']['function']}:{stall['site']['line']}"] += stall["count"]
    assert found == truth["sites"] and sum(found.values()) == 4 * 50
    stacks = [call["stack"] for stall in report["stalls"] for call in stall["longest"]]
    assert len(stacks) >= 4  # an instruction that the interpreter specialises may become another one of its line
    if minor(python) >= 14:  # its evaluator has no name of its own: frames of C behind the first one are not known
        natives = [frame["function"] for stack in stacks for frame in stack if frame["kind"] == "native"]
        assert natives.count("[truncated]") == len(stacks) and not {"border_inner", "border_outer"} & set(natives)
        return
    whole = ["border_inner", "border_outer"] if how != "bare" else ["border_inner", "[truncated]"]
    for stack in stacks:
        functions = [frame["function"] for frame in stack if frame["kind"] == "python"]
        # The foreign function is called by ctypes, whose names are in no table.
        assert stack[0]["kind"] == "native" and {frame["kind"] for frame in stack[-2:]} == {"python"}
        assert all(frame["line"] is None for frame in stack if frame["kind"] == "native")
        caller = functions[1] if functions[0] == "called_back" else "outer"
        assert between(stack, functions[0], caller) == whole, stack
        (file,) = {frame["file"] for frame in stack if (frame["function"] or "").startswith("border_")}
        assert file.endswith(str(folder / "border.abi3.so"))  # below the root of a chroot, as seen from here
        # What is further out than the missing frames is not known.
        if functions[:2] == ["called_back", "twice"]:
            assert between(stack, "twice", "outer") == (whole if how != "bare" else [])


@pytest.mark.parametrize("python", KNOWN)
def test_another_interpreter_in_the_same_thread(python: str) -> None:
    """Its waits are its own or unknown, never its caller's; those of the first one too are exact, or unknown."""
    with Program([*command(python), TARGET.with_name("subinterpreter.py"), 5]) as program:
        program.wait_for("ready")
        with Tracer([program.pid]).attached() as tracer:
            program.say()
            truth, report = program.truth(), tracer.report()
    found: Counter[str] = Counter()
    for stall in report["stalls"]:
        if stall["site"]:
            found[f"{stall['site']['function']}:{stall['site']['line']}"] += stall["count"]
        else:
            assert stall["site_unknown"]
    assert found.pop("other:5", 0) <= truth["others"]
    assert all(truth["sites"].get(place, 0) >= count for place, count in found.items()), found
    assert sum(stall["count"] for stall in report["stalls"]) == truth["others"] + sum(truth["sites"].values())
    if minor(python) >= 12:
        assert found == truth["sites"]


def test_a_wait_that_lasts_shows_its_stack() -> None:
    with Program([sys.executable, TARGET, 1, 60_000_000]) as program:
        program.wait_for("ready")
        with Tracer([program.pid]).attached() as tracer:
            program.say()
            time.sleep(1.5)
            tracer.stop()
            report = tracer.report()
    waiting = [row for row in report["in_flight"] if row["api"] == "cudaStreamSynchronize"]
    assert len(waiting) == 5
    for row in waiting:
        functions = [frame["function"] for frame in row["stack"] if frame["kind"] == "python"]
        assert functions[:2] == ["Loader.__next__", "one_round"], row


def test_a_program_without_python() -> None:
    with Program([TARGETS / "million", "10", "20", "300"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid]).attached() as tracer:
            program.say()
            program.truth()
            report = tracer.report()
    assert report["stalls"]
    assert {(s["site"], s["site_unknown"]) for s in report["stalls"]} == {(None, "there is no Python in the process")}


@pytest.mark.skipif(not EVERY, reason="make test-pythons")
@pytest.mark.parametrize("python", OTHERS)
def test_other_versions_are_unknown(python: str) -> None:
    """This program itself needs 3.9 to know its own sites."""
    if minor(python) < 8:
        pytest.skip("the target needs 3.8")
    _, report = run(python, 5)
    assert {(s["site"], s["site_unknown"]) for s in report["stalls"]} == {(None, "its version is not known")}
    assert any("no Python call sites: its version is not known" in note for note in report["capture"]["notes"])

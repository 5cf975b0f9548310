"""Call sites by the shim: the program that knows its own, under `stallscope run`, without privileges."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, STALLSCOPE, TARGETS, Tracer, counts
from pythons import EVERY, KNOWN, TARGET, command
from run_kit import Preloaded, Ran, Running, environment, run
from test_block import INJECT, frames, line_of, of
from test_sites import WAITS, sites

from stallscope.capture.segment import BadSegment, Segment
from stallscope.capture.segments import candidates
from stallscope.wire.frames import Kind

SHORT = "it was shorter than 1.05 ms, which the shim does not look up"
GONE = "its code object was gone, or could not be read"
DEADLINE_S = 60.0


def is_walked(pid: int) -> bool:
    """Whether the process's shim has been told how to walk its frames."""
    found = False
    for fd in candidates(pid):
        try:
            with Segment(fd) as segment:
                found |= segment.header.pid == pid and segment.sites().is_walked
        except BadSegment:
            pass
        os.close(fd)
    return found


def wait_until_walked(running: Running) -> None:
    """The command of `run` has made its first call, and its Python is known."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        own = running.process.pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        if any(is_walked(int(child)) for child in children):
            return
        time.sleep(0.01)
    raise AssertionError(f"no Python is known after {DEADLINE_S} s")


def told(running: Running) -> tuple[dict[str, Any], dict[str, Any]]:
    """(truth, report) at the end."""
    truth = json.loads(running.lines.wait_for('{"target"'))
    report = json.loads(running.lines.rest().partition('{"target"')[2].partition("\n")[2])
    assert running.process.wait(DEADLINE_S) == 0
    return truth, report


def ran(
    python: str, *words: Any, again: int = 0, options: tuple[str, ...] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same after "ready", so that the Python is known before the first wait; `again`: so often more."""
    with Running(
        [*command(python), str(TARGET), *map(str, words)], "--json", *options, env=environment(STALLSCOPE_LINGER="1")
    ) as running:
        for _ in range(again + 1):
            running.lines.wait_for("ready")
            wait_until_walked(running)
            running.say()
        running.lines.wait_for("ready")
        time.sleep(0.5)  # on a busy machine what it waited for last is read later than it would end
        running.say()
        return told(running)


def unknown(report: dict[str, Any]) -> Counter[str]:
    """Reason -> waits without a site."""
    found: Counter[str] = Counter()
    for stall in report["stalls"]:
        if stall["site"] is None and stall["api"] == "cudaStreamSynchronize":
            found[stall["site_unknown"]] += stall["count"]
    return found


def check_every_long_wait(truth: dict[str, Any], report: dict[str, Any]) -> Counter[str]:
    """Each is at its line; the others are told to have been short. The first."""
    found, rest = sites(report), unknown(report)
    assert set(rest) <= {SHORT}, rest  # by the histogram: none of those was a long one
    assert found <= Counter(truth["sites"])
    assert sum(found.values()) + sum(rest.values()) == sum(truth["sites"].values())
    total = sum(s["total_ns"] for s in report["stalls"] if s["api"] == "cudaStreamSynchronize")
    assert sum(c["total_ns"] for c in report["calls"] if c["api"] == "cudaStreamSynchronize") == total
    return found


@pytest.mark.parametrize("python", KNOWN)
def test_every_long_wait_at_its_line(python: str) -> None:
    """In 17 shapes of code. Nothing else holds the GIL or the stream: all of them are long."""
    truth, report = ran(python, 1, 100_000, 0, "alone")
    assert check_every_long_wait(truth, report) == truth["sites"] and sum(truth["sites"].values()) == WAITS


@pytest.mark.parametrize("python", KNOWN)
def test_five_threads(python: str) -> None:
    """Some of their waits are short, because another one held the GIL meanwhile."""
    rounds = 32 if EVERY else 2
    truth, report = ran(python, rounds, 30_000)
    found = check_every_long_wait(truth, report)
    assert found.keys() == truth["sites"].keys() and sum(found.values()) > 0.5 * 5 * WAITS * rounds


@pytest.mark.parametrize("python", KNOWN)
def test_short_waits_are_counted_and_not_looked_up(python: str) -> None:
    truth, report = ran(python, 160 if EVERY else 20, 300)
    found = check_every_long_wait(truth, report)
    assert sum(found.values()) < 0.5 * sum(truth["sites"].values())


@pytest.mark.parametrize("python", KNOWN)
def test_the_callers_too(python: str, tmp_path: Path) -> None:
    _, report = ran(python, 1, 30_000, 0, "alone", options=("-o", str(tmp_path / "r")))
    inner = next(s for s in report["stalls"] if s["site"] and s["site"]["function"].rpartition(".")[2] == "innermost")
    names = [frame["function"].rpartition(".")[2] for frame in inner["longest"][0]["stack"]]
    assert names[:5] == ["innermost", "inner", "outer", "one_round", "main"]
    deep = [s for s in report["stalls"] if s["site"] and s["site"]["function"] == "recursion"]
    assert max(len(call["stack"]) for s in deep for call in s["longest"]) == 32
    words = [*STALLSCOPE, "export", str(tmp_path / "r"), "--format", "folded", "-o", str(tmp_path / "f")]
    subprocess.run(words, check=True)
    weights = [int(line.rpartition(" ")[2]) for line in (tmp_path / "f").read_text().splitlines()]
    assert sum(weights) == sum(stall["total_ns"] for stall in report["stalls"])


@pytest.mark.parametrize("python", KNOWN)
def test_code_that_is_gone_is_unknown_and_never_another_line(python: str) -> None:
    """The stack is taken when the wait is over: nearly every piece of code is freed before it is read."""
    truth, report = ran(python, 1, 5_000, 400 if EVERY else 200)
    found, rest = sites(report), unknown(report)
    assert all(count <= truth["sites"].get(place, 0) for place, count in found.items())
    assert rest[GONE] and rest.keys() <= {GONE, SHORT}
    assert sum(found.values()) + sum(rest.values()) == sum(truth["sites"].values())


@pytest.mark.parametrize("python", KNOWN)
def test_a_forked_child_from_its_first_wait(python: str) -> None:
    """It takes over what its parent was told, before anybody knows of it."""
    truth, report = ran(python, 1, 30_000, 0, "fork")
    child = {
        **report,
        **{key: [row for row in report[key] if row["pid"] == truth["pid"]] for key in ("stalls", "calls")},
    }
    assert sum(check_every_long_wait(truth, child).values()) > 0.5 * sum(truth["sites"].values())
    # Threads of the child do not take each other's places in its segment.
    assert counts(report, truth["pid"])["cudaStreamSynchronize"] == 5 * WAITS
    assert report["capture"]["lost"] == 0 and not any("does not close" in note for note in report["capture"]["notes"])


@pytest.mark.parametrize("python", KNOWN)
def test_after_an_exec(python: str) -> None:
    if len(command(python)) > 1:
        pytest.skip("the socket of `run` is outside of its root, and a second segment is not looked for")
    truth, report = ran(python, 1, 30_000, 0, "exec", again=1)
    assert sum(check_every_long_wait(truth, report).values()) > 0.5 * sum(truth["sites"].values())


def test_an_attach_to_a_process_with_the_shim(needs_bpf: None) -> None:
    """From then on; and a second one is told what happened since the first."""
    with Preloaded([sys.executable, TARGET, 10, 30_000]) as program:
        program.wait_for("ready")
        with Tracer([program.pid]).attached() as tracer:
            while not is_walked(program.pid):
                time.sleep(0.01)
            program.say()
            time.sleep(1.0)
            tracer.stop()
            first = tracer.report()
        with Tracer([program.pid]).attached() as tracer:
            truth, second = program.truth(), tracer.report()
    halves = [sites(first), sites(second)]
    assert all(sum(half.values()) for half in halves)
    assert halves[0] + halves[1] <= Counter(truth["sites"])


def test_a_wait_that_lasts_shows_its_stack() -> None:
    """`run` ends with the shell, while the five threads wait on."""
    command = f"exec 3<&0; {sys.executable} {TARGET} 1 60000000 <&3 >/dev/null 2>&1 & echo $!; sleep 4"
    done = run(["sh", "-c", command], said="go\n")
    os.kill(int(next(line for line in done.out.splitlines() if line.isdigit())), 9)
    waiting = [row for row in done.report["in_flight"] if row["api"] == "cudaStreamSynchronize"]
    assert len(waiting) == 5
    for row in waiting:
        assert [frame["function"] for frame in row["stack"][:2]] == ["Loader.__next__", "one_round"], row


def test_a_program_without_python() -> None:
    report = run([TARGETS / "million", "10", "20", "3000"]).report
    assert {(s["site"], s["site_unknown"]) for s in report["stalls"]} == {(None, "there is no Python in the process")}


PRETENDER = """
#include <unistd.h>
extern int cudaDeviceSynchronize(void);
unsigned long Py_Version = 0x030f0000;
char _PyRuntime[4096], PyCode_Type[8], PyBytes_Type[8], PyUnicode_Type[8];
int main(void) { for (int i = 0; i < 20; i++) { cudaDeviceSynchronize(); usleep(10000); } }
"""


def test_an_unknown_version_is_noted(tmp_path: Path) -> None:
    """A program that names the variables of a Python that nobody knows."""
    (tmp_path / "p.c").write_text(PRETENDER)
    library = ROOT / "build/sim/lib"
    words = [
        "gcc",
        "-rdynamic",
        str(tmp_path / "p.c"),
        "-o",
        str(tmp_path / "python3.15"),
        f"{library}/libcudart.so.12",
    ]
    subprocess.run(words, check=True)
    report = run([tmp_path / "python3.15"]).report
    why = "stacks of CPython 3.15 are not known"
    assert {(s["site"], s["site_unknown"]) for s in report["stalls"]} == {(None, why)}
    assert any(f"no Python call sites: {why}" in note for note in report["capture"]["notes"])


FIRST = """
import ctypes, runpy, struct, sys
{}
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SANDBOXED = """
allow = ctypes.create_string_buffer(struct.pack("<HBBI", 6, 0, 0, 0x7FFF0000))
program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", 1, ctypes.addressof(allow)))
libc = ctypes.CDLL(None)
assert not libc.prctl(38, 1, 0, 0, 0) and not libc.prctl(22, 2, program, 0, 0)
"""
PROTECTED = "assert not ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)"


def test_a_program_that_has_locked_itself_up_is_let_be() -> None:
    """The walk is a system call, which its seccomp filter may answer by killing it."""
    done = run([sys.executable, "-c", FIRST.format(SANDBOXED), str(TARGET), "1", "30000"])
    why = "it has a seccomp filter of its own, and the shim makes no system call there"
    assert done.code == 0 and unknown(done.report).keys() == {why}
    assert any(f"no Python call sites: {why}" in note for note in done.report["capture"]["notes"])


def test_a_program_whose_memory_may_not_be_read(needs_root: None) -> None:
    """Not dumpable, and its caller has no privileges."""
    python = [os.path.realpath(sys.executable), "-c", FIRST.format(PROTECTED), str(TARGET), "1", "30000"]
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    words = [*nobody, *STALLSCOPE, "run", "--json", "--", *python]
    out = subprocess.run(words, input="go\n", capture_output=True, text=True, env=environment(), check=True).stdout
    report = Ran(0, out, "").report
    why = "its memory may not be read (kernel.yama.ptrace_scope, or a program that protects itself)"
    assert unknown(report) == {why: 5 * WAITS}
    assert any(f"no Python call sites: {why}" in note for note in report["capture"]["notes"])


def test_who_holds_up_the_others_shows_where(tmp_path: Path) -> None:
    """A rank outside of every call: its Python stack is read while the others wait for it."""
    words = [sys.executable, "-I", "-m", "stallscope.sim.job", "--load-time=0.5", "--ranks=2", "--dp=2",
             "--fault=never:rank=1,step=10", "--duration=6", f"--truth={tmp_path / 'truth'}"]  # fmt: skip
    report = run([*words], "-o", tmp_path / "r").report
    rank = json.loads((tmp_path / "truth").read_text())["ranks"][1]["pid"]
    stacks = [b for b in of(frames(tmp_path / "r"), Kind.STACK) if b["tid"] == rank]
    assert stacks and all((b["by"], b["why"]) == ("memory", None) for b in stacks)
    innermost = [next(frame for frame in b["frames"] if frame[3] == "python") for b in stacks]
    assert all(frame[:2] == [str(INJECT), line_of("time.sleep(seconds)")] for frame in innermost)
    culprits = [c for incident in report["incidents"] for c in incident["culprits"]]
    inner = [next(frame for frame in c["stack"] if frame["kind"] == "python") for c in culprits]
    assert {c["pid"] for c in culprits} == {rank} and all(frame["file"] == str(INJECT) for frame in inner)

"""Programs that do what probes could disturb end as they do without a tracer: same output, same exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import STALLSCOPE, TARGETS, Program, Tracer, balance

pytestmark = pytest.mark.usefixtures("needs_bpf")
CASES = [
    ("rough", "backtrace"),
    ("rough", "cancel"),
    ("rough", "longjmp"),
    ("rough", "altstack"),
    ("rough", "seccomp"),
    ("throwing", "around"),
    ("throwing", "inside"),
]
ROUNDS = "200"
# Both programs import pthread_cancel for one of their modes, so that none would have return probes.
RETURNS = ("--returns", "always")
WAYS = [("bcc", "multi"), ("object", "multi"), ("object", "perf"), ("object", "perf-nocookie")]


def alone(words: list[Any], env: dict[str, str] | None = None) -> tuple[str, int]:
    """(output, exit code) without a tracer."""
    with Program(words, env=env) as program:
        program.wait_for("ready")
        program.say()
        return program.lines.rest(), program.process.wait(60)


def traced(words: list[Any], *options: str) -> tuple[str, int, Any]:
    """(output, exit code, report) with one."""
    with Program(words) as program:
        program.wait_for("ready")
        with Tracer([program.pid], *options).attached() as tracer:
            program.say()
            output, code = program.lines.rest(), program.process.wait(60)
            return output, code, tracer.report()


@pytest.mark.parametrize(("backend", "links"), WAYS, ids=["-".join(w) for w in WAYS])
@pytest.mark.parametrize(("name", "mode"), CASES, ids=["-".join(c) for c in CASES])
def test_same_output_and_exit_code(
    name: str, mode: str, backend: str, links: str, request: pytest.FixtureRequest
) -> None:
    for fixture, wanted in (("needs_bcc", backend == "bcc"), ("needs_root", links != "multi")):
        if wanted:
            request.getfixturevalue(fixture)
    words = [TARGETS / name, mode, ROUNDS]
    without = alone(words)
    output, code, report = traced(words, "--backend", backend, "--links", links, "--sample", "1/3", *RETURNS)
    assert (output, code) == without
    assert code == 7
    assert balance(report)[0] == balance(report)[1] > 0


def test_the_filter_is_strict() -> None:
    """The check above can fail: a system call that the program does not need kills it."""
    _, code = alone([TARGETS / "rough", "seccomp", "1"], {"ROUGH_FORBIDDEN": "1"})
    assert code == -signal.SIGSYS


def test_left_waits_are_counted() -> None:
    """A wait that a handler jumped out of is a lost call with a reason, not a call without an end."""
    output, _, report = traced([TARGETS / "rough", "longjmp", ROUNDS], *RETURNS)
    assert f"{int(ROUNDS) // 10} left a wait" in output
    (reason, count), *others = report["capture"]["lost_by"].items()
    assert ("longjmp" in reason, count, others) == (True, 2 * int(ROUNDS) // 10, [])
    assert report["in_flight"] == []


CANCELLED = int(ROUNDS) // 10
ALL_DESTROYED = f"ready\ncancel: {CANCELLED} cancelled\ndestroyed: {CANCELLED}\n"


def waits_counted(report: dict[str, Any]) -> None:
    """Each call of `throwing cancel` and none twice, without times; and the note that says why."""
    calls = {call["api"]: call for call in report["calls"]}
    for api in ("cudaLaunchKernel", "cudaStreamSynchronize"):
        assert (calls[api]["count"], calls[api]["nested"], calls[api]["total_ns"]) == (CANCELLED, 0, None)
    assert calls["cuStreamSynchronize"]["count"] == calls["cuStreamSynchronize"]["nested"] == CANCELLED
    assert balance(report)[0] == balance(report)[1] == 4 * CANCELLED
    assert report["in_flight"] == report["stalls"] == []
    notes = [note for note in report["capture"]["notes"] if "can cancel threads" in note]
    assert len(notes) == 2 and all(f"{TARGETS / 'throwing'} imports pthread_cancel" in note for note in notes)


@pytest.mark.parametrize(
    "options",
    [*(("--backend", b, "--links", way) for b, way in WAYS), ("--links-per-file", "0")],
    ids=[*("-".join(w) for w in WAYS), "unfiltered"],
)
def test_cancelled_cpp_threads_run_their_destructors(options: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    """No return probes in a program that can cancel threads."""
    for fixture, wanted in (("needs_bcc", "bcc" in options), ("needs_root", "bcc" not in options)):
        if wanted:
            request.getfixturevalue(fixture)
    words = [TARGETS / "throwing", "cancel", ROUNDS]
    assert alone(words) == (ALL_DESTROYED, 7)
    output, code, report = traced(words, *options)
    assert (output, code) == (ALL_DESTROYED, 7)
    waits_counted(report)


def test_cancelled_cpp_threads_where_returns_were_asked_for() -> None:
    """Cancelled in a return-probed call a thread ends as ever, but unwinding stops there (docs/limits.md)."""
    output, code, report = traced([TARGETS / "throwing", "cancel", ROUNDS], *RETURNS)
    *rest, destroyed = output.splitlines()
    assert (rest, code) == (ALL_DESTROYED.splitlines()[:2], 7)
    assert int(destroyed.removeprefix("destroyed: ")) < CANCELLED
    calls = {call["api"]: call for call in report["calls"]}
    assert calls["cudaStreamSynchronize"]["count"] == CANCELLED
    assert not any("counted, not timed" in note for note in report["capture"]["notes"])


def test_no_returns_anywhere_where_asked_for() -> None:
    output, code, report = traced([TARGETS / "rough", "longjmp", ROUNDS], "--returns", "never")
    assert (output, code) == alone([TARGETS / "rough", "longjmp", ROUNDS])
    assert balance(report)[0] == balance(report)[1] > 0
    assert {call["total_ns"] for call in report["calls"]} == {None}
    assert report["capture"]["lost"] == 0
    assert any("counted, not timed: --returns never" in note for note in report["capture"]["notes"])


EXECS = """
import ctypes, os, sys
ctypes.CDLL("libcudart.so.12").cudaGetDeviceCount(ctypes.byref(ctypes.c_int()))
print("ready", flush=True)
sys.stdin.readline()
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_a_program_that_becomes_one_that_cancels() -> None:
    """The libraries of both are the same files, and had return probes."""
    with Program([sys.executable, "-u", "-c", EXECS, TARGETS / "throwing", "cancel", ROUNDS]) as program:
        program.wait_for("ready")
        with Tracer([program.pid]).attached() as tracer:
            program.say()
            program.wait_for("ready")
            time.sleep(1)
            program.say()
            output, code = program.lines.rest(), program.process.wait(60)
            report = tracer.report()
    assert (output, code) == ("ready\n" + ALL_DESTROYED, 7)
    waits_counted(report)


def test_doctor_says_so() -> None:
    """What would be linked, and what not known."""
    with Program([TARGETS / "throwing", "cancel", ROUNDS]) as program:
        program.wait_for("ready")
        command = [*STALLSCOPE, "doctor", "--json", str(program.pid)]
        answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["target"]
        with Tracer([program.pid]).attached() as tracer:
            program.say()
            notes = tracer.report()["capture"]["notes"]
    assert {file["library"] for file in answer["would_probe"]} == {"CUDART", "CUDA"}
    for file in answer["would_probe"]:
        assert file["timed"] == 0
        assert f"{file['path']}: {file['functions']} functions of {file['library']} probed" in notes
    assert any(text.startswith("times, errors") and "pthread_cancel" in text for text in answer["would_stay_unseen"])
    assert answer["remarks"] == []


def test_doctor_tells_of_libraries_that_cancel_their_own(tmp_path: Path, needs_tool: Callable[[str], str]) -> None:
    """As gRPC and FFmpeg do, in a Python process: it keeps its return probes."""
    (tmp_path / "a.c").write_text("#include <pthread.h>\nint f(pthread_t t) { return pthread_cancel(t); }")
    library = tmp_path / "libown.so"
    subprocess.run([needs_tool("cc"), "-shared", "-fPIC", "-o", library, tmp_path / "a.c"], check=True)
    script = EXECS.replace("print", "ctypes.CDLL(sys.argv[1]); print").rpartition("os.execv")[0]
    with Program([sys.executable, "-u", "-c", script, library]) as program:
        program.wait_for("ready")
        command = [*STALLSCOPE, "doctor", "--json", str(program.pid)]
        answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["target"]
    assert [text.split(" can cancel threads")[0] for text in answer["remarks"]] == [str(library)]
    assert all(file["timed"] for file in answer["would_probe"] if file["library"] == "CUDART")


def test_entries_only_where_a_filter_would_kill() -> None:
    """As on 6.12, where the return probes of a process with a filter are dangerous: counted, not timed.

    Not run on such a kernel: the decision is made for its number, the links are this kernel's.
    """
    output, code, report = traced([TARGETS / "rough", "seccomp", ROUNDS], "--as-on-kernel", "6.12.9-amd64")
    calls = {call["api"]: call for call in report["calls"]}
    assert (code, output.splitlines()[-1]) == (7, f"seccomp: {int(ROUNDS) * 40} calls")
    for api in ("cudaMalloc", "cudaStreamSynchronize", "cudaFree", "cudaLaunchKernel"):
        assert calls[api]["count"] == int(ROUNDS) * 10
        assert calls[api]["nested"] == 0
        assert calls[api]["total_ns"] is calls[api]["max_ns"] is calls[api]["p50_ns"] is None
    assert calls["cuStreamSynchronize"]["nested"] == calls["cuStreamSynchronize"]["count"] == int(ROUNDS) * 10
    assert balance(report)[0] == balance(report)[1]
    assert report["stalls"] == []
    notes = [note for note in report["capture"]["notes"] if "counted, not timed" in note]
    assert len(notes) == 2 and all("mode filter" in note and "6.12.9-amd64" in note for note in notes)


def test_timed_there_without_a_filter() -> None:
    """On the same kernels a process without a filter is traced in full."""
    _, _, report = traced([TARGETS / "throwing", "around", ROUNDS], "--as-on-kernel", "6.12.9-amd64", *RETURNS)
    calls = {call["api"]: call for call in report["calls"]}
    assert calls["cudaStreamSynchronize"]["total_ns"] > 0
    assert not any("counted, not timed" in note for note in report["capture"]["notes"])


def test_this_kernel_is_not_in_the_range() -> None:
    """The strict filter above was passed by return probes, not avoided."""
    from stallscope.capture.seccomp import returns_ask_seccomp

    if returns_ask_seccomp(os.uname().release):
        pytest.skip("this kernel is one of those")
    _, _, report = traced([TARGETS / "rough", "seccomp", "10"], *RETURNS)
    calls = {call["api"]: call for call in report["calls"]}
    assert calls["cudaStreamSynchronize"]["total_ns"] > 0

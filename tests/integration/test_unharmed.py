"""Programs that do what probes could disturb end as they do without a tracer: same output, same exit code."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from harness import TARGETS, Program, Tracer, balance

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
    output, code, report = traced(words, "--backend", backend, "--links", links, "--sample", "1/3")
    assert (output, code) == without
    assert code == 7
    assert balance(report)[0] == balance(report)[1] > 0


def test_the_filter_is_strict() -> None:
    """The check above can fail: a system call that the program does not need kills it."""
    _, code = alone([TARGETS / "rough", "seccomp", "1"], {"ROUGH_FORBIDDEN": "1"})
    assert code == -signal.SIGSYS


def test_left_waits_are_counted() -> None:
    """A wait that a handler jumped out of is a lost call with a reason, not a call without an end."""
    output, _, report = traced([TARGETS / "rough", "longjmp", ROUNDS])
    assert f"{int(ROUNDS) // 10} left a wait" in output
    (reason, count), *others = report["capture"]["lost_by"].items()
    assert ("longjmp" in reason, count, others) == (True, 2 * int(ROUNDS) // 10, [])
    assert report["in_flight"] == []


def test_cancelled_cpp_threads_end() -> None:
    """Cancelled in a return-probed call a thread ends as ever, but unwinding stops there (docs/limits.md)."""
    words = [TARGETS / "throwing", "cancel", ROUNDS]
    (before, code), (after, same_code, _) = alone(words), traced(words)
    assert before.splitlines()[:2] == after.splitlines()[:2]
    assert code == same_code == 7


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
    _, _, report = traced([TARGETS / "throwing", "around", ROUNDS], "--as-on-kernel", "6.12.9-amd64")
    calls = {call["api"]: call for call in report["calls"]}
    assert calls["cudaStreamSynchronize"]["total_ns"] > 0
    assert not any("counted, not timed" in note for note in report["capture"]["notes"])


def test_this_kernel_is_not_in_the_range() -> None:
    """The strict filter above was passed by return probes, not avoided."""
    from stallscope.capture.seccomp import returns_ask_seccomp

    if returns_ask_seccomp(os.uname().release):
        pytest.skip("this kernel is one of those")
    _, _, report = traced([TARGETS / "rough", "seccomp", "10"])
    calls = {call["api"]: call for call in report["calls"]}
    assert calls["cudaStreamSynchronize"]["total_ns"] > 0

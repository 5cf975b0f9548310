"""A runtime inside a program or inside a library of another name: seen by its symbols, or the reason why not is told."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import SIM_LIB, TARGETS, Program, Tracer, balance, counts
from test_attach_counts import hooked, own
from test_places import EXPORTED, INSIDE, PLACES, check, do, trace

pytestmark = pytest.mark.usefixtures("needs_bpf")
DRIVER = {"LD_PRELOAD": str(SIM_LIB / "libcuda.so.1")}
STATIC_RUNTIME = SIM_LIB / "libcudart_static.a"


def trace_program(program: Path, env: dict[str, str], code: int = 0) -> tuple[Any, Any]:
    """(truth, report) of forker with one child, which executes itself anew."""
    with Program([program, "1", "40", "100"], env=env) as running:
        running.wait_for("ready")
        with Tracer([running.pid], "--sample", "1/1").attached() as tracer:
            running.say()
            return running.truth(), tracer.report(code)


def stripped(program: Path, folder: Path) -> Path:
    """A copy without .symtab."""
    subprocess.run(["strip", "-o", folder / "app", program], check=True)
    return folder / "app"


@pytest.mark.parametrize("way", ["exported", "private", "inside"])
def test_static_program(way: str) -> None:
    """Its .symtab tells: every call of the runtime, and its driver calls are part of them."""
    truth, report = trace_program(TARGETS / "forker_static", {**DRIVER, "STALLSCOPE_SIM_DRIVER": way})
    assert own(report, truth["pid"]) == hooked(truth["calls"])
    assert balance(report)[0] == balance(report)[1]
    assert not any("stripped" in note for note in report["capture"]["notes"])
    nested = sum(call["nested"] for call in report["calls"])
    assert (nested > 0) == (way == "exported")


def test_stripped_static_program(tmp_path: Path) -> None:
    """Only its driver calls are seen, once each, and the report says so and names the program."""
    program = stripped(TARGETS / "forker_static", tmp_path)
    truth, report = trace_program(program, {**DRIVER, **EXPORTED})
    assert counts(report, truth["pid"]) == {
        "cuLaunchKernel": truth["calls"]["cudaLaunchKernel"],
        "cuStreamSynchronize": truth["calls"]["cudaStreamSynchronize"],
    }
    wanted = f"stripped static runtime in {program}: only driver calls seen"
    assert any(note.endswith(wanted) for note in report["capture"]["notes"])


def test_stripped_static_program_without_a_driver(tmp_path: Path) -> None:
    """Nothing can be seen: exit 4, and the note tells the cause."""
    program = stripped(TARGETS / "forker_static", tmp_path)
    _, report = trace_program(program, INSIDE, code=4)
    wanted = f"stripped static runtime in {program}: no libcuda was loaded, so none of its calls are seen"
    assert any(note.endswith(wanted) for note in report["capture"]["notes"])


def test_a_stripped_program_without_a_runtime_is_not_accused() -> None:
    """Python is stripped, loads libcuda (as Triton and JAX do) and has no runtime inside."""
    with Program(PLACES) as program:
        program.wait_for("ready")
        do(program, [["load", "d", str(SIM_LIB / "libcuda.so.1"), "local"]])
        with Tracer([program.pid], "--sample", "1/1").attached() as tracer:
            do(program, [["any", "d", "cuCtxSynchronize", 2]])
            program.say('["end"]')
            program.truth()
            report = tracer.report()
    assert counts(report) == {"cuCtxSynchronize": 2}
    assert not any("stripped" in note for note in report["capture"]["notes"])


def shared(cc: str, out: Path, text: str, *flags: str | Path) -> str:
    source = out.with_suffix(".c")
    source.write_text(text)
    subprocess.run([cc, "-O1", "-shared", "-fPIC", "-o", out, source, *map(str, flags)], check=True)
    return str(out)


WHOLE = ("-Wl,--whole-archive", STATIC_RUNTIME, "-Wl,--no-whole-archive", "-ldl", "-lrt", "-lpthread")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_framework_with_the_runtime_inside(tmp_path: Path, needs_tool: Callable[[str], str], when: str) -> None:
    """No file bears the runtime's name, so this one is asked, and a note says where it was found."""
    path = shared(needs_tool("cc"), tmp_path / "libframework.so", "int x;", *WHOLE)
    load = [["load", "f", path, "local"], ["sleep", 0.5]]
    before, after = (load, []) if when == "before" else ([], load)
    truth, report = trace(before, [*after, ["call", "f", 6]], {**DRIVER, **EXPORTED})
    notes = check(truth, report)
    assert f"{path} has CUDART inside, under another name: probed there" in notes
    assert any(call["nested"] for call in report["calls"])


def test_a_stripped_library_with_the_runtime_inside(tmp_path: Path, needs_tool: Callable[[str], str]) -> None:
    """Hidden and stripped: only the note."""
    text = "extern int cudaGetErrorName(int); int uses(void) { return cudaGetErrorName(1); }"
    path = shared(needs_tool("cc"), tmp_path / "libhidden.so", text, "-s", "-Wl,--exclude-libs,ALL", *WHOLE)
    with Program(PLACES, env=DRIVER) as program:
        program.wait_for("ready")
        do(program, [["load", "h", path, "local"]])
        with Tracer([program.pid]).attached() as tracer:
            program.say('["end"]')
            program.truth()
            report = tracer.report(4)
    assert any(f"stripped static runtime in {path}" in note for note in report["capture"]["notes"])


def test_named_libraries_make_the_search_needless(tmp_path: Path, needs_tool: Callable[[str], str]) -> None:
    """With libcudart mapped by its name, the other copy is left alone and not mentioned."""
    path = shared(needs_tool("cc"), tmp_path / "libframework.so", "int x;", *WHOLE)
    before = [["load", "r", str(SIM_LIB / "libcudart.so.12"), "local"], ["load", "f", path, "local"]]
    truth, report = trace(before, [["call", "r", 6]], INSIDE)
    assert "framework" not in check(truth, report)


FORWARDER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
typedef struct { unsigned x, y, z; } dim3;
int cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t m, void *s) {
  int (*next)(const void *, dim3, dim3, void **, size_t, void *) = dlsym(dlopen(PATH, RTLD_NOW), "cudaLaunchKernel");
  return next(f, g, b, a, m, s);
}
"""


def test_a_forwarder_is_no_runtime(tmp_path: Path, needs_tool: Callable[[str], str]) -> None:
    """A library that stands before the runtime (a quota, another tracer) defines the name: each call once."""
    real = str(SIM_LIB / "libcudart.so.12")
    path = shared(needs_tool("cc"), tmp_path / "libquota.so", FORWARDER, f'-DPATH="{real}"', "-ldl")
    after = [["load", "r", real, "local"], ["sleep", 0.5], ["call", "q", 6]]
    truth, report = trace([["load", "q", path, "local"]], after, INSIDE)
    assert "libquota" not in check(truth, report)


NCCL = """
int ncclAllReduce(void *a, void *b, unsigned long n, int t, int o, void *c, void *s) { return c ? 0 : 4; }
int pncclAllReduce(void *a, void *b, unsigned long n, int t, int o, void *c, void *s)
  __attribute__((alias("ncclAllReduce")));
const char *ncclGetErrorString(int e) { return "no"; }
"""


def test_a_framework_with_nccl_inside(tmp_path: Path, needs_tool: Callable[[str], str]) -> None:
    """As old PyTorch builds have it; the p name is the same function."""
    path = shared(needs_tool("cc"), tmp_path / "libtorch_cuda.so", NCCL)
    with Program(PLACES) as program:
        program.wait_for("ready")
        do(program, [["load", "t", path, "local"]])
        with Tracer([program.pid], "--sample", "1/1").attached() as tracer:
            do(program, [["any", "t", "ncclAllReduce", 3], ["any", "t", "pncclAllReduce", 2]])
            program.say('["end"]')
            program.truth()
            report = tracer.report()
    assert counts(report) == {"ncclAllReduce": 5}
    assert any("has NCCL inside" in note for note in report["capture"]["notes"])

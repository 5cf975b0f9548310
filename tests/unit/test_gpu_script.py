"""The machinery of `make test-gpu`, proven where no GPU is: exact counts, verdicts, exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "tests" / "gpu"
SIM = ROOT / "build" / "sim" / "lib"
sys.path.insert(0, str(GPU))

from gpufind import conductor, steps, verdict  # noqa: E402
from gpufind.counters import Counters, Place, difference, open_counter  # noqa: E402
from gpufind.elf import exports, first_instruction, instruction_classes  # noqa: E402
from gpufind.hooks import base_name, hooked_names, library_of  # noqa: E402
from gpufind.report import markdown  # noqa: E402

# Probes are taken away at 0.1 s each: only those on what the raw steps call.
_CALLED = (
    "cu(CtxSynchronize|StreamSynchronize|EventSynchronize|EventRecord|LaunchKernel)|cuMem(Alloc|Free)(_v2)?|"
    "cuMemcpy(HtoD|DtoH)(Async)?_v2|cuda(Malloc|Free|(Device|Stream|Event)Synchronize|EventRecord|LaunchKernel)|"
    "cudaMemcpy(Async)?"
)


def _unavailable(reason: str) -> None:
    if os.environ.get("STALLSCOPE_ROOT_TESTS") == "1":
        pytest.fail(f"STALLSCOPE_ROOT_TESTS=1, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture
def needs_counting() -> None:
    """Counting uprobes can be opened, and the simulated stack is built."""
    if os.environ.get("STALLSCOPE_ROOT_TESTS") == "0":
        pytest.skip("STALLSCOPE_ROOT_TESTS=0")
    if not (SIM / "libcudart.so.12").exists():
        _unavailable(f"{SIM}/libcudart.so.12 is not built")
    try:
        os.close(open_counter(str(SIM / "libcuda.so.1"), 0x1000, max(os.sched_getaffinity(0))))
    except OSError as error:
        _unavailable(f"counting uprobes are refused: {error}")


def _dry(out: Path, way: str = "exported", runtime: Path = SIM / "libcudart.so.12") -> dict[str, Any]:
    command = [
        sys.executable,
        str(GPU / "findings.py"),
        "--dry",
        "--steps",
        "raw_driver,raw_runtime",
        "--match",
        _CALLED,
    ]
    command += ["--out", str(out), "--libcuda", str(SIM / "libcuda.so.1"), "--libcudart", str(runtime)]
    env = {**os.environ, "STALLSCOPE_SIM_DRIVER": way, "OUT": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((out / "gpu-findings.json").read_text())
    return found


def _lines(data: dict[str, Any], step: str) -> list[verdict.Line]:
    return [line for line in verdict.lines(data["results"], set(data["counted"])) if line.step == step]


@pytest.mark.usefixtures("needs_counting")
@pytest.mark.parametrize(("way", "state"), [("exported", "all"), ("private", "none"), ("inside", "none")])
def test_counts_are_exact_and_tell_the_ways_apart(tmp_path: Path, way: str, state: str) -> None:
    """Each call is counted once; whether the driver's exports fire is seen from outside."""
    data = _dry(tmp_path, way)
    control, runtime = _lines(data, "raw_driver"), _lines(data, "raw_runtime")
    assert (
        [line.driver for line in control] == [line.calls for line in control] == [20, 1000, 100, 100, 100, 100, 100, 1]
    )
    assert [line.runtime for line in runtime] == [line.calls for line in runtime]
    assert {line.state for line in runtime} == {state}
    if state == "all":
        assert [line.driver for line in runtime] == [line.calls for line in runtime]
    page = (tmp_path / "gpu-findings.md").read_text()
    assert "The control is exact: 8 functions" in page


@pytest.mark.usefixtures("needs_counting")
def test_real_runtime_is_counted(tmp_path: Path, real_cudart: Path) -> None:
    """NVIDIA's libcudart: each call fails without a driver, and each is counted."""
    runtime = _lines(_dry(tmp_path, runtime=real_cudart), "raw_runtime")
    assert [line.runtime for line in runtime] == [line.calls for line in runtime]
    assert {(line.state, line.why) for line in runtime} == {("unknown", "the calls failed (code 35)")}


@pytest.mark.usefixtures("needs_counting")
def test_a_step_that_fails_crashes_or_hangs_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was counted before stays."""
    monkeypatch.setattr(conductor, "_LEAST_SECONDS", 0.1)
    run = conductor.Conductor({"libcudart": str(tmp_path / "none.so")}, time.monotonic() + 60)
    raw_runtime = steps.BY_NAME["raw_runtime"]
    failed = run.run(raw_runtime)
    assert failed["state"] == "failed" and "none.so" in failed["reason"]
    run.options["libcudart"] = str(_library(tmp_path, "void *cudaMalloc(void) { return *(void **)8; }"))
    crashed = run.run(raw_runtime)
    assert crashed["state"] == "crashed" and crashed["reason"].startswith("signal 11")
    code = "int cudaMalloc(void) { return 0; } int cudaEventCreate(void) { for (;;) ; }"
    run.options["libcudart"] = str(_library(tmp_path, code))
    slow = run.run(raw_runtime._replace(seconds=2))
    assert slow["state"] == "too slow" and [row["what"] for row in slow["rows"]] == ["cudaMalloc"]
    monkeypatch.setattr(conductor, "_LEAST_SECONDS", 1000.0)
    assert run.run(raw_runtime)["state"] == "not run"


def _library(folder: Path, code: str) -> Path:
    if not shutil.which("gcc"):
        _unavailable("gcc is not installed")
    path = folder / f"libtest{len(list(folder.iterdir()))}.so"
    subprocess.run(
        ["gcc", "-O1", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=code, text=True, check=True
    )
    return path


@pytest.mark.usefixtures("needs_counting")
def test_an_address_that_only_the_look_up_tells_is_counted(tmp_path: Path) -> None:
    """Rows without an export become places of their own."""
    path = str(_library(tmp_path, "int cudaMalloc(void) { return 0; }"))
    run = conductor.Conductor({"libcudart": path}, time.monotonic() + 60)
    offset = exports(path)["cudaMalloc"].offset
    private = {"name": "cuMemAlloc", "file": path, "offset": offset, "exports": []}
    run.count_looked_up([private, {**private, "name": "cuMemFree", "offset": offset + 1, "exports": ["cuMemFree_v2"]}])
    assert len(run.counters) == 1
    rows = run.run(steps.BY_NAME["raw_runtime"])["rows"]
    run.counters.close()
    assert rows[0]["hits"] == {"CUDA@:cuMemAlloc": 20}


def test_a_refusal_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three refusals in a row: nothing else is tried."""

    def refuse(path: str, offset: int, cpu: int) -> int:
        raise OSError(13, "EACCES (Permission denied)")

    monkeypatch.setattr("gpufind.counters.open_counter", refuse)
    counters = Counters(0)
    for index in range(10):
        counters.add(Place(f"CUDA:f{index}", sys.executable, index))
    assert counters.refused == "EACCES (Permission denied)" and len(counters.errors) == 3
    assert counters.read() == {}


def _result(hits: dict[str, int], codes: tuple[int, ...] = ()) -> dict[str, Any]:
    row = {"what": "matmul", "calls": 1000, "codes": list(codes), "hits": hits}
    row["expects"] = [{"family": "launch", "driver": "cuLaunchKernel(Ex)?", "runtime": "cudaLaunchKernel", "nccl": ""}]
    return {"step": "torch_matmul", "origin": "cuBLAS", "state": "ran", "reason": "", "rows": [row], "facts": {}}


@pytest.mark.parametrize(
    ("hits", "codes", "state", "sentence"),
    [
        ({"CUDA:cuLaunchKernelEx_ptsz": 900, "CUDA:cuLaunchKernel": 100}, (), "all", "fire for:\n  - **cuBLAS**"),
        ({"CUDA:cuLaunchKernel": 7, "CUDA:cuLaunchHostFunc": 9}, (), "some", "for some calls only of:\n  - **cuBLAS**"),
        ({"CUDART:cudaLaunchKernel": 1000}, (), "none", "do not fire for:\n  - **cuBLAS**"),
        ({"CUDA@:cuLaunchKernel": 1000}, (), "none", "but 1000 at the looked-up address"),
        ({}, (98,), "unknown", "the calls failed (code 98)"),
    ],
)
def test_verdicts(hits: dict[str, int], codes: tuple[int, ...], state: str, sentence: str) -> None:
    """The conclusion follows from the counts alone."""
    results = [_result(hits, codes)]
    (line,) = verdict.lines(results, {"CUDA:cuLaunchKernel", "CUDA:cuLaunchHostFunc", *hits})
    assert line.state == state
    assert sentence in "\n".join(verdict.conclusion([line], {}, ""))


def test_without_counters_all_is_unknown() -> None:
    """The page says which errno, and still has all its tables."""
    empty: dict[str, Any] = {
        "machine": {},
        "instructions": {},
        "missing": {},
        "problems": [],
        "counted": [],
        "errors": {},
    }
    data = {**empty, "when": "now", "places": 0, "results": [_result({})], "refused": "EACCES (Permission denied)"}
    page = markdown(data)
    assert "No uprobe could be counted here: EACCES" in page
    assert "nothing could be counted" in page and "fire for: nothing" in page


def test_names() -> None:
    """Variants, base names, and that the tables of the package are read."""
    assert verdict.is_variant("cuMemcpyHtoDAsync_v2_ptsz", "cuMemcpy(HtoD)?(Async)?")
    assert not verdict.is_variant("cuLaunchKernelEx", "cuLaunchKernel")
    assert base_name("cuMemcpyHtoD_v2_ptds") == "cuMemcpyHtoD"
    assert "cuLaunchKernel" in hooked_names("CUDA") and "cuGetExportTable" in hooked_names("CUDA")
    assert library_of("/usr/lib/libcuda.so.580.1") == "CUDA"
    assert difference({"a": 1, "b": 2}, {"a": 1, "b": 5}) == {"b": 3}


def test_first_instructions(tmp_path: Path) -> None:
    """endbr64 moves the probe; anything that is no push or nop5 is slow."""
    assert first_instruction(bytes.fromhex("f30f1efa41574156")) == "endbr64, then push"
    assert first_instruction(bytes.fromhex("4157")) == first_instruction(b"\x55") == "push"
    assert first_instruction(bytes.fromhex("4883ec08")) == "other"
    code = '__asm__(".globl f\\n.type f,@function\\nf: endbr64\\npush %rbp\\npop %rbp\\nret\\n");'
    found = exports(str(_library(tmp_path, code)))["f"]
    assert found.probe_offset == found.offset + 4
    assert instruction_classes([found]) == {"endbr64, then push": ["f"]}
    with pytest.raises(ValueError, match="no 64-bit"):
        exports(__file__)


@pytest.mark.parametrize(
    ("setting", "code", "says"), [(None, 0, "skipped: no GPU"), ("1", 1, "failed"), ("0", 0, "skipped")]
)
def test_three_states(setting: str | None, code: int, says: str) -> None:
    """Without a GPU: skip, or fail where it has to run; docs/ stays as it is."""
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU here")
    page = ROOT / "docs" / "gpu-findings.md"
    before = page.read_bytes() if page.exists() else None
    env = {name: value for name, value in os.environ.items() if name != "STALLSCOPE_GPU_TESTS"}
    env |= {"STALLSCOPE_GPU_TESTS": setting} if setting else {}
    done = subprocess.run(["sh", str(GPU / "run.sh")], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-1].startswith(says)) == (code, True)
    assert (page.read_bytes() if page.exists() else None) == before

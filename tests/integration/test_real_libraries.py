"""NVIDIA's own libcudart and libnccl from PyPI: real symbols, real arguments, real return codes. No GPU: calls fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import wheel_library
from harness import ROOT, TARGETS, Program, Tracer, balance, counts, recorded, unique_ids
from test_attach_counts import hooked, own

pytestmark = pytest.mark.usefixtures("needs_bpf")
CUDART = {"12.9.79": "nvidia-cuda-runtime-cu12"}
NCCL = {"2.27.5": "nvidia-nccl-cu12"}
NO_DRIVER = 35
ENVIRONMENT = {"NCCL_SOCKET_IFNAME": "lo", "LD_LIBRARY_PATH": ""}


def trace(program: Program, recording: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(truth, report) of a program that waits at "ready"."""
    program.wait_for("ready")
    with Tracer([program.pid], "--sample", "1/1", "-o", recording) as tracer:
        tracer.attached()
        program.say()
        return program.truth(), tracer.report()


@pytest.mark.parametrize("version", CUDART)
def test_real_cudart(version: str, tmp_path: Path) -> None:
    """Counts, arguments and return codes."""
    path = wheel_library(CUDART[version], version, "nvidia/cuda_runtime/lib/libcudart.so.12")
    recording = tmp_path / "cudart.stall"
    with Program([TARGETS / "real_cudart", path, "50"], sim=False, env=ENVIRONMENT) as program:
        truth, report = trace(program, recording)
    assert own(report) == hooked(truth["calls"])
    assert balance(report)[0] == balance(report)[1]
    check_cudart_arguments(truth["arguments"], recorded(recording))
    errors = {call["api"]: (call["errors"], call["count"]) for call in report["calls"] if call["errors"] is not None}
    assert all(failed == made for failed, made in errors.values()), errors
    assert truth["returned"]["cudaStreamSynchronize"] == NO_DRIVER


def check_cudart_arguments(given: dict[str, Any], rows: dict[str, Any]) -> None:
    """Every argument of a launch, and the return code of what returns."""
    (gx, gy, gz), (bx, by, bz) = given["grid"], given["block"]
    shape = [given["func"], gx | gy << 32, gz, bx | by << 32, bz]
    # Two launches a round: `__cudaLaunchKernel` jumps into the same function. The stream tells the rounds apart.
    for n, row in enumerate(rows["cudaLaunchKernel"]):
        masks = (-1, -1, 0xFFFFFFFF, -1, 0xFFFFFFFF)
        assert [int(a) & mask for a, mask in zip(row["a"], masks, strict=False)] == shape
        assert (int(row["a"][6]), int(row["a"][7])) == (given["smem"], given["stream"] + n // 2)
    for n, row in enumerate(rows["cudaLaunchKernelExC"]):
        assert [int(a) for a in row["a"]] == [*shape, 0, given["smem"], given["stream"] + n]
    for n, row in enumerate(rows["cudaMemcpyAsync"]):
        assert [int(a) for a in row["a"][:3]] == [given["dst"], given["src"], given["bytes"]]
        assert int(row["a"][4]) == given["stream"] + n
    for n, row in enumerate(rows["cudaStreamSynchronize"]):
        assert int(row["a"][0]) == given["stream"] + n
    for api in ("cudaMemcpyAsync", "cudaMemcpy", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMalloc"):
        assert set(rows[api]["status"].tolist()) == {NO_DRIVER}


@pytest.mark.parametrize("version", CUDART)
def test_real_cudart_from_python(version: str, tmp_path: Path) -> None:
    """ctypes on the real runtime."""
    path = wheel_library(CUDART[version], version, "nvidia/cuda_runtime/lib/libcudart.so.12")
    words = ["/usr/bin/python3", ROOT / "tests" / "targets" / "real_calls.py", path, "200"]
    with Program(words, sim=False, env=ENVIRONMENT) as program:
        truth, report = trace(program, tmp_path / "python.stall")
    assert own(report) == hooked(truth["calls"])
    assert set(truth["returned"].values()) == {NO_DRIVER}
    rows = recorded(tmp_path / "python.stall")
    assert rows["cudaMemcpy"]["a"][:, 2].tolist() == truth["bytes"]


@pytest.mark.parametrize("version", NCCL)
def test_real_nccl(version: str, tmp_path: Path) -> None:
    """The 128-byte id as the program got it, rank and size, the failing creation."""
    path = wheel_library(NCCL[version], version, "nvidia/nccl/lib/libnccl.so.2")
    recording = tmp_path / "nccl.stall"
    with Program([TARGETS / "real_nccl", path], sim=False, env=ENVIRONMENT) as program:
        truth, report = trace(program, recording)
    # ncclCommInitRank calls ncclGetUniqueId in no version; what the library calls itself is not a call of the program.
    assert own(report) == hooked(truth["calls"])
    assert balance(report)[0] == balance(report)[1]
    ids = unique_ids(recording)
    assert ("ncclGetUniqueId", 2, bytes.fromhex(truth["unique_id"])) in ids
    assert ("ncclCommInitRank", 1, bytes.fromhex(truth["unique_id"])) in ids
    (communicator,) = report["communicators"]
    assert communicator["unique_id"] == truth["unique_id"]
    assert communicator["uid"] == truth["unique_id"][:16]
    assert communicator["nranks"] == truth["nranks"]
    assert [member["rank"] for member in communicator["members"]] == [truth["rank"]]
    assert communicator["root_addr"].startswith("127.0.0.1:")
    assert recorded(recording)["ncclCommInitRank"]["status"].tolist() == [1]
    assert counts(report)["ncclCommInitRank"] == 1

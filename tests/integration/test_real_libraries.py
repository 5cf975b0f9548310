"""NVIDIA's own libcudart and libnccl from PyPI: real symbols, real arguments, real return codes. No GPU: calls fail."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import wheel_library
from elftools.elf.elffile import ELFFile
from harness import ROOT, TARGETS, Program, Tracer, balance, counts, recorded, unique_ids
from test_attach_counts import hooked, own
from test_places import PLACES, do

from stallscope.wire.frames import FILE_HEADER_BYTES, Decoder, Kind
from stallscope.wire.hook_table import BY_ID, HOOKS

pytestmark = pytest.mark.usefixtures("needs_bpf")
# Two in every run; the rest with STALLSCOPE_ALL_LIBS=1 (`make test-libs`): 1 GB to download.
ALL = os.environ.get("STALLSCOPE_ALL_LIBS") == "1"
OLD_PLACE, NEW_PLACE = "nvidia/cuda_runtime/lib/libcudart.so.", "nvidia/cu13/lib/libcudart.so."
CUDART = {"12.9.79": ("nvidia-cuda-runtime-cu12", f"{OLD_PLACE}12")}
NCCL = {"2.27.5": ("nvidia-nccl-cu12", "nvidia/nccl/lib/libnccl.so.2")}
if ALL:
    CUDART["11.8.89"] = ("nvidia-cuda-runtime-cu11", f"{OLD_PLACE}11.0")
    CUDART |= dict.fromkeys(("13.0.48", "13.5.37"), ("nvidia-cuda-runtime", f"{NEW_PLACE}13"))
    NCCL |= dict.fromkeys(("2.18.3", "2.21.5", "2.32.3"), NCCL["2.27.5"])
# Calls that crash on the zeros that `every_call` passes, or need real arguments: test_real_nccl makes some of them.
NOT_WITH_ZEROS = {"ncclCommShrink", "ncclCommWindowRegister", "ncclReduceConfig", "ncclCommInitRank",
                  "ncclCommInitRankConfig", "ncclCommInitRankScalable", "ncclCommInitAll", "ncclGetUniqueId"}  # fmt: skip
NO_DRIVER = 35
ENVIRONMENT = {"NCCL_SOCKET_IFNAME": "lo", "LD_LIBRARY_PATH": ""}


def library(versions: dict[str, tuple[str, str]], version: str) -> Path:
    """The library from its wheel."""
    package, member = versions[version]
    return wheel_library(package, version, member)


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
    path = library(CUDART, version)
    recording = tmp_path / "cudart.stall"
    with Program([TARGETS / "real_cudart", path, "50"], sim=False, env=ENVIRONMENT) as program:
        truth, report = trace(program, recording)
    assert own(report) == hooked(truth["calls"])
    assert balance(report)[0] == balance(report)[1]
    twice = 2 if "__cudaLaunchKernel" in truth["calls"] else 1  # 11.8 does not have it
    check_cudart_arguments(truth["arguments"], recorded(recording), twice)
    errors = {call["api"]: (call["errors"], call["count"]) for call in report["calls"] if call["errors"] is not None}
    assert all(failed == made for failed, made in errors.values()), errors
    assert truth["returned"]["cudaStreamSynchronize"] == NO_DRIVER


def check_cudart_arguments(given: dict[str, Any], rows: dict[str, Any], twice: int) -> None:
    """Every argument of a launch, and the return code of what returns."""
    (gx, gy, gz), (bx, by, bz) = given["grid"], given["block"]
    shape = [given["func"], gx | gy << 32, gz, bx | by << 32, bz]
    # `twice` launches a round: `__cudaLaunchKernel` jumps into the same function. The stream tells the rounds apart.
    for n, row in enumerate(rows["cudaLaunchKernel"]):
        masks = (-1, -1, 0xFFFFFFFF, -1, 0xFFFFFFFF)
        assert [int(a) & mask for a, mask in zip(row["a"], masks, strict=False)] == shape
        assert (int(row["a"][6]), int(row["a"][7])) == (given["smem"], given["stream"] + n // twice)
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
    path = library(CUDART, version)
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
    path = library(NCCL, version)
    recording = tmp_path / "nccl.stall"
    with Program([TARGETS / "real_nccl", path], sim=False, env=ENVIRONMENT) as program:
        truth, report = trace(program, recording)
    # ncclCommInitRank calls ncclGetUniqueId in no version; what the library calls itself is not a call of the program.
    assert own_of(report, "NCCL") == hooked(truth["calls"])
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


def own_of(report: dict[str, Any], library: str) -> Counter[str]:
    """Calls of one library that are not part of another call."""
    calls = (call for call in report["calls"] if call["library"] == library)
    return Counter({c["api"]: c["count"] - c["nested"] for c in calls if c["count"] > c["nested"]})


def exports(path: Path) -> dict[str, int]:
    """Name → address of what another reader of ELF files finds defined."""
    with path.open("rb") as file:
        symbols = list(ELFFile(file).get_section_by_name(".dynsym").iter_symbols())
    return {s.name: s["st_value"] for s in symbols if s["st_shndx"] != "SHN_UNDEF" and s["st_value"]}


def linked(recording: Path, library: str) -> list[list[str]]:
    """The names that were linked, of each file of that library."""
    frames = Decoder().feed(recording.read_bytes()[FILE_HEADER_BYTES:])
    links = [f.body for f in frames if f.kind == Kind.LINK and f.body["library"] == library]
    return [[BY_ID[hook].name for hook in link["hooks"]] for link in links]


def every_call(path: Path, names: list[str], recording: Path) -> Any:
    """The report of a program that makes each call three times, with zeros."""
    with Program(PLACES, sim=False, env=ENVIRONMENT) as program:
        program.wait_for("ready")
        do(program, [["load", "x", str(path), "local"]])
        with Tracer([program.pid], "--sample", "1/1", "-o", recording).attached() as tracer:
            do(program, [["any", "x", name, 3] for name in names])
            program.say(json.dumps(["end"]))
            program.truth()
            return tracer.report()


@pytest.mark.parametrize("version", CUDART)
def test_every_function_of_cudart(version: str, tmp_path: Path) -> None:
    """What the file defines is linked and counted; `__cudaLaunchKernel` is one call, not two."""
    path, recording = library(CUDART, version), tmp_path / "all.stall"
    defined = exports(path)
    names = [hook.name for hook in HOOKS if hook.library == "CUDART" and hook.name in defined]
    report = every_call(path, names, recording)
    probed = [hook.name for hook in HOOKS if hook.name in names and hook.mode != "SHIM"]
    assert [sorted(found) for found in linked(recording, "CUDART")] == [sorted(probed)]
    assert own(report) == hooked(dict.fromkeys(names, 3))
    assert balance(report)[0] == balance(report)[1]
    assert {call["errors"] for call in report["calls"]} <= {None, 3}
    assert len(probed) >= 75


@pytest.mark.parametrize("version", NCCL)
def test_every_function_of_nccl(version: str, tmp_path: Path) -> None:
    """The same, also by the other name of each function; ncclBcast has an ncclBroadcast inside."""
    path, recording = library(NCCL, version), tmp_path / "all.stall"
    defined = exports(path)
    probed = [hook.name for hook in HOOKS if hook.library == "NCCL" and hook.name in defined]
    names = [name for name in probed if name not in NOT_WITH_ZEROS]
    twice = [f"p{name}" for name in names if defined.get(f"p{name}") == defined[name]]
    assert "pncclAllReduce" in twice
    report = every_call(path, names + twice, recording)
    assert [sorted(found) for found in linked(recording, "NCCL")] == [sorted(probed)]
    wanted = Counter(dict.fromkeys(names, 3)) + Counter({name[1:]: 3 for name in twice})
    assert own_of(report, "NCCL") == wanted
    nested = {call["api"]: call["nested"] for call in report["calls"] if call["nested"] and call["library"] == "NCCL"}
    inner = {nested.pop(name, 0) for name in ("ncclGroupStart", "ncclGroupEnd")}
    # Up to 2.21, ncclSend and ncclRecv open and close a group themselves.
    assert inner in ({0}, {wanted["ncclSend"] + wanted["ncclRecv"]})
    assert nested == {"ncclBroadcast": wanted["ncclBcast"]}
    assert balance(report)[0] == balance(report)[1]


@pytest.mark.parametrize("version", NCCL)
def test_the_runtime_inside_nccl(version: str, tmp_path: Path) -> None:
    """No libcudart is mapped: NCCL's own one, which only .symtab names, is linked; with one it is left alone."""
    path, recording = library(NCCL, version), tmp_path / "nccl.stall"
    with Program([TARGETS / "real_nccl", path], sim=False, env=ENVIRONMENT) as program:
        _, report = trace(program, recording)
    (inside,) = linked(recording, "CUDART")
    assert {"cudaLaunchKernel", "cudaMalloc", "cudaStreamSynchronize"} <= set(inside)
    assert any(f"{path} has CUDART inside, under another name" in note for note in report["capture"]["notes"])

"""NVIDIA's own libraries behind the wrappers: each call reaches them with its arguments, and its result comes back."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from conftest import wheel_library
from shim_kit import ROOT, Agent, Read, environment

from stallscope.wire.hook_table import BY_NAME

TARGETS = ROOT / "build" / "targets"
NO_DRIVER = 35


def truth_of(agent: Agent, *words: str | Path) -> tuple[dict[str, Any], Read]:
    """The program's own count, and the segment."""
    env = environment(Path("/nowhere"), STALLSCOPE_SHIM=f"socket:{agent.path}", NCCL_SOCKET_IFNAME="lo")
    done = subprocess.run([str(w) for w in words], env=env, input="go\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    (read,) = agent.wait_for(1)
    return found, read.drain()


def hooked(calls: dict[str, int]) -> dict[str, int]:
    """What is counted: `__cudaLaunchKernel` as the function it jumps into."""
    found: Counter[str] = Counter()
    for api, count in calls.items():
        if api.removeprefix("__") in BY_NAME:
            found[api.removeprefix("__")] += count
    return {api: count for api, count in found.items() if count}


def own(read: Read) -> dict[str, int]:
    read.conserved()
    return {api: int(row["calls"] - row["nested"]) for api, row in read.latest.items() if row["calls"] > row["nested"]}


def test_real_cudart(agent: Agent) -> None:
    """12.9; without a driver each call fails, and is a call all the same."""
    path = wheel_library("nvidia-cuda-runtime-cu12", "12.9.79", "nvidia/cuda_runtime/lib/libcudart.so.12")
    truth, read = truth_of(agent, TARGETS / "real_cudart", path, "50")
    assert own(read) == hooked(truth["calls"])
    recs = read.recs
    copies = recs[recs["hook"] == BY_NAME["cudaMemcpyAsync"].id]
    assert (copies["status"] == NO_DRIVER).all()
    assert (copies["a"][:, :3] == [0xD57000, 0x52C000, 0x7654321]).all()
    launches = recs[recs["hook"] == BY_NAME["cudaLaunchKernelExC"].id]
    assert (launches["a"][:, 0] == 0xF00D000).all()
    assert launches["a"][:, 7].tolist() == list(range(0x5EED000, 0x5EED000 + 50))
    assert (launches["status"] == NO_DRIVER).all()


def test_real_nccl(agent: Agent) -> None:
    """2.27; its look-ups go through our dlsym."""
    path = wheel_library("nvidia-nccl-cu12", "2.27.5", "nvidia/nccl/lib/libnccl.so.2")
    truth, read = truth_of(agent, TARGETS / "real_nccl", path)
    assert own(read) == hooked(truth["calls"])
    uid = bytes.fromhex(truth["unique_id"])
    assert read.uids == [("ncclGetUniqueId", 2, uid), ("ncclCommInitRank", 1, uid)]
    (creation,) = read.recs[(read.recs["hook"] == BY_NAME["ncclCommInitRank"].id) & (read.recs["kind"] == 2)]
    assert creation["status"] == 1

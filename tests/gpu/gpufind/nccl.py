"""NCCL through torch.distributed: alone, and with a second process on a second GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpufind.channel import COLLECTIVE, LAUNCH, Channel, Unavailable
from gpufind.frameworks import torch_on_gpu

_CALLS = 100
_SCRIPT = Path(__file__).resolve().parents[1] / "findings.py"


def _join(rank: int, size: int, store: str) -> Any:
    torch = torch_on_gpu()
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        raise Unavailable("this torch has no NCCL")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=size)
    return torch


def _reducer(torch: Any, operation: str) -> Any:
    x, op = torch.ones(1 << 16, device="cuda"), getattr(torch.distributed.ReduceOp, operation)
    torch.distributed.all_reduce(x, op=op)
    torch.cuda.synchronize()
    return lambda: torch.distributed.all_reduce(x, op=op)


def nccl_alone(channel: Channel) -> None:
    """One rank: a sum needs no kernel, so only AVG is expected to launch one."""
    with tempfile.TemporaryDirectory() as folder:
        torch = _join(0, 1, f"{folder}/store")
        channel.fact("nccl", ".".join(map(str, torch.cuda.nccl.version())))
        channel.count("all_reduce SUM, 1 rank", _CALLS, _reducer(torch, "SUM"), COLLECTIVE)
        channel.count("all_reduce AVG, 1 rank", _CALLS, _reducer(torch, "AVG"), COLLECTIVE, LAUNCH)
        torch.distributed.destroy_process_group()


def nccl_pair(channel: Channel) -> None:
    """Two ranks, both counted: each call is made twice."""
    if torch_on_gpu().cuda.device_count() < 2:
        raise Unavailable("there is one GPU only")
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        command = [sys.executable, str(_SCRIPT), "--nccl-peer", store]
        peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert peer.stdin and peer.stdout
        torch = _join(0, 2, store)
        call, made = _reducer(torch, "SUM"), iter(range(_CALLS))
        to_peer, from_peer = peer.stdin, peer.stdout

        def both() -> None:
            step = next(made)
            if step == 0:
                to_peer.write(b"go\n")
                to_peer.flush()
            call()
            if step == _CALLS - 1:
                from_peer.readline()

        channel.count("all_reduce SUM, 2 ranks", _CALLS, both, COLLECTIVE, LAUNCH, total=2 * _CALLS)
        torch.cuda.synchronize()
        to_peer.close()
        peer.wait()


def peer_main(store: str) -> None:
    """The second rank: waits for "go", makes the same calls, says "done"."""
    torch = _join(1, 2, store)
    call = _reducer(torch, "SUM")
    sys.stdin.readline()
    for _ in range(_CALLS):
        call()
    print("done", flush=True)
    torch.cuda.synchronize()
    sys.stdin.read()

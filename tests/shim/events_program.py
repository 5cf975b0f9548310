"""One rank on the simulated NCCL: ``python events_program.py SCENARIO UID RANK``, with the shim preloaded. The last line that
it prints is JSON; instants are CLOCK_MONOTONIC ns."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sim"))

import nccl_kit
import numpy as np

LINGER_S = 1.4  # what is older than a second is told
ENDLESS = (1 << 64) - 1


class Rank:
    """With a communicator of two, and one operation done on it."""

    def __init__(self, uid: bytes, rank: int) -> None:
        self.nccl, self.rank = nccl_kit.Nccl(), rank
        self.world = self.nccl.init(uid, 2, rank)
        self.a, self.b = self.nccl.array(64, nccl_kit.FLOAT32), self.nccl.array(64, nccl_kit.FLOAT32)
        self.reduce()
        self.nccl.synchronize()

    def reduce(self, comm: nccl_kit.Comm | None = None, **where: Any) -> None:
        (comm or self.world).all_reduce(self.a, self.b, nccl_kit.FLOAT32, **where)

    def gate(self, seconds: float) -> None:
        """The stream stands still that long."""
        self._gate = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: time.sleep(seconds))
        assert self.nccl.cuda.cudaLaunchHostFunc(self.nccl.stream, self._gate, None) == 0


def stuck(rank: Rank) -> dict[str, Any]:
    """Rank 1 comes to the second operation seconds late; a third one stands behind it.

    The runtime's last error is the program's, and stays while events are recorded and asked.
    """
    cuda = rank.nccl.cuda
    assert cuda.cudaEventRecord(None, None)
    before = cuda.cudaPeekAtLastError()
    if rank.rank == 1:
        rank.gate(2.5)
    rank.reduce()
    rank.reduce()
    rank.nccl.synchronize()
    opened = time.monotonic_ns()
    time.sleep(LINGER_S)
    return {"opened": opened, "kept": before == cuda.cudaPeekAtLastError() == cuda.cudaGetLastError() != 0,
            "after": cuda.cudaGetLastError()}  # fmt: skip


def steps(rank: Rank) -> dict[str, Any]:
    """Many, in step and ahead, with a second communicator in groups; nothing is slow."""
    child = rank.world.split(0, rank.rank)
    assert child
    for i in range(200):
        with rank.nccl.group():
            rank.reduce()
            rank.reduce(child)
        if i % 10 == 0:
            rank.nccl.synchronize()
    rank.nccl.synchronize()
    time.sleep(LINGER_S)
    child.destroy()
    rank.world.destroy()
    return {}


def graph(rank: Rank) -> dict[str, Any]:
    """A capture in the global mode while an older operation is asked for, and a captured operation that runs twice."""
    cuda, side = rank.nccl.cuda, rank.nccl.new_stream()
    other = rank.world.split(0, rank.rank)
    assert other
    rank.gate(2)
    rank.reduce()
    captured, run, nodes = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
    assert cuda.cudaStreamBeginCapture(side, 0) == 0
    time.sleep(1.5)
    rank.reduce(other, stream=side)
    end = cuda.cudaStreamEndCapture(side, ctypes.byref(captured))
    assert end == 0, f"the capture is broken: {end}"
    assert cuda.cudaGraphGetNodes(captured, None, ctypes.byref(nodes)) == 0
    assert cuda.cudaGraphInstantiateWithFlags(ctypes.byref(run), captured, ctypes.c_ulonglong(0)) == 0
    for _ in range(2):
        assert cuda.cudaGraphLaunch(run, side) == 0
    rank.nccl.synchronize()
    rank.nccl.synchronize(side)
    time.sleep(LINGER_S)
    return {"nodes": nodes.value}


def forks(rank: Rank) -> dict[str, Any]:
    """A child has neither thread nor events; one that runs another program has neither of ours."""
    rank.gate(1.4)
    rank.reduce()
    code = (
        "import os, sys; sys.exit(any('stallscope' in open(f'/proc/self/task/{t}/comm').read()"
        " for t in os.listdir('/proc/self/task')))"
    )
    child = os.fork()
    if child == 0:
        threads = os.listdir("/proc/self/task")
        names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in threads]
        if names != ["python"] and len(threads) != 1:
            os._exit(3)
        os.execv(sys.executable, [sys.executable, "-c", code])
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    rank.nccl.synchronize()
    time.sleep(LINGER_S)
    return {"child": status}


def ends(rank: Rank) -> dict[str, Any]:
    """The program ends while its GPU never does."""
    rank.nccl.cuda.stallscope_sim_set_next_kernel_ns(ctypes.c_uint64(ENDLESS))
    rank.reduce()
    time.sleep(1.5)
    return {}


def nothing(rank: Rank) -> dict[str, Any]:
    """Ends at once."""
    with rank.nccl.group():
        rank.reduce()
    rank.nccl.synchronize()
    return {}


def aborts(rank: Rank) -> dict[str, Any]:
    """A communicator is given up in a block; the next one, perhaps at its address, works."""
    if rank.rank == 1:
        rank.gate(2)
    rank.reduce()
    time.sleep(1.5)
    rank.world.abort()
    rank.nccl.synchronize()
    return {}


def main() -> None:
    name, uid, index = sys.argv[1:]
    rank = Rank(bytes.fromhex(uid), int(index))
    found = globals()[name](rank)
    comm = rank.world.handle.value
    print(json.dumps({"comm": comm, "pid": os.getpid(), "threads": _threads(), **found}), flush=True)
    assert isinstance(rank.a, np.ndarray)


def _threads() -> list[str]:
    tasks = Path("/proc/self/task")
    return sorted((task / "comm").read_text().strip() for task in tasks.iterdir())


main()

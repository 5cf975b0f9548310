"""What ranks on the simulated NCCL do in the tests of the GPU's witness: its calls as the wrappers see them."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import nccl_kit
import numpy as np
from gpu_kit import Event, Witness

from stallscope.wire.hook_table import BY_NAME

INT32, FLOAT32 = nccl_kit.INT32, nccl_kit.FLOAT32
GPU_AT_WORK = 16


class Shimmed:
    """libnccl, and before and after each call what a wrapper does."""

    def __init__(self, lib: Any, witness: Witness) -> None:
        self._lib, self.witness = lib, witness
        self.issued: list[tuple[str, int, int]] = []
        self._depth = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._lib, name)
        hook = BY_NAME.get(name)
        if hook is None:
            return real

        def call(*args: Any) -> int:
            if hook.kind == "comm":
                self.witness.lib.kit_before_creation(ctypes.cast(real, ctypes.c_void_p))
                return int(real(*args))
            values = dict(zip(hook.arguments.split(), (_word(arg) for arg in args), strict=False))
            n = self.witness.enter(name, **values)
            if hook.kind == "p2p" or (hook.kind == "collective" and values["count"]):
                self.issued.append((name, n, values["comm"]))
            status = int(real(*args))
            self.witness.leave(name, n, status, **values)
            return status

        return call


def _word(arg: Any) -> int:
    value = getattr(arg, "value", arg)
    return int(value or 0) & (1 << 64) - 1


def joined(nccl: nccl_kit.Nccl, library: str, uid: bytes, ranks: int, rank: int) -> int:
    """Load the witness, make a communicator; how far the witness is."""
    witness = Witness(Path(library))
    nccl.lib = Shimmed(nccl.lib, witness)  # type: ignore[assignment]
    nccl.world = nccl.init(uid, ranks, rank)  # type: ignore[attr-defined]
    return int(witness.lib.kit_state())


def claimed(nccl: nccl_kit.Nccl, library: str) -> tuple[int, str | None, int]:
    """(state, what is in the environment then, its size) after a first unique id; no communicator."""
    witness = Witness(Path(library))
    before = os.environ.copy()
    Shimmed(nccl.lib, witness).ncclGetUniqueId(ctypes.byref(nccl_kit.UniqueId()))
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    value = libc.getenv(b"NCCL_PROFILER_PLUGIN")
    kept = sum(libc.getenv(name.encode()) == text.encode() for name, text in before.items())
    return int(witness.lib.kit_state()), None if value is None else value.decode(), len(before) - kept


def _arrays(nccl: nccl_kit.Nccl, count: int) -> tuple[np.ndarray, np.ndarray]:
    return nccl.array(count, FLOAT32), nccl.array(count, FLOAT32)


def _program(nccl: nccl_kit.Nccl, ranks: int, rank: int) -> None:
    """Collectives, empty ones, groups, transfers, a second communicator; twice with the same buffers."""
    world: nccl_kit.Comm = nccl.world  # type: ignore[attr-defined]
    child = world.split(0, rank)
    assert child
    many = ctypes.c_size_t
    (send, recv), (a, b) = _arrays(nccl, 64 * ranks), _arrays(nccl, 16)
    for _ in range(2):
        world.all_reduce(send, recv, FLOAT32)
        world.call("ncclAllReduce", send, recv, many(0), FLOAT32, 0)
        world.call("ncclAllGather", send, recv, many(16), FLOAT32)
        world.call("ncclBcast", send, many(16), FLOAT32, 0)
        with nccl.group():
            world.all_reduce(a, b, FLOAT32)
            child.all_reduce(a, b, FLOAT32)
            world.all_reduce(send, recv, FLOAT32)
            world.call("ncclReduceScatter", send, recv, many(16), FLOAT32, 0)
        with nccl.group():
            for peer in range(ranks):
                world.send(send[peer * 8 :][:8], FLOAT32, peer)
                world.recv(recv[peer * 8 :][:8], FLOAT32, peer)
        child.call("ncclBroadcast", send, recv, many(8), FLOAT32, 1)
        child.call("ncclReduce", send, recv, many(8), FLOAT32, 0, 0)
    nccl.synchronize()
    for comm in (child, world):
        comm.destroy()


def program(
    nccl: nccl_kit.Nccl, ranks: int, rank: int
) -> tuple[list[Event], list[tuple[str, int, int]], dict[str, int]]:
    """What was told, what was issued, without collectives of nothing, and what went untold."""
    _program(nccl, ranks, rank)
    return nccl.lib.witness.told(), nccl.lib.issued, nccl.lib.witness.figures  # type: ignore[attr-defined]


def stuck(nccl: nccl_kit.Nccl, is_stuck: bool, ranks: int, rank: int) -> list[Event]:
    """An all-reduce; where `is_stuck`, behind a kernel that does not end. What is told a second later."""
    world: nccl_kit.Comm = nccl.world  # type: ignore[attr-defined]
    send, recv = _arrays(nccl, 64)
    world.all_reduce(send, recv, FLOAT32)
    nccl.synchronize()
    nccl.lib.witness.told()  # type: ignore[attr-defined]
    if is_stuck:
        nccl.gate = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: time.sleep(2))  # type: ignore[attr-defined]
        nccl.cuda.cudaLaunchHostFunc(nccl.stream, nccl.gate, None)  # type: ignore[attr-defined]
    world.all_reduce(send, recv, FLOAT32)
    time.sleep(1)
    told: list[Event] = nccl.lib.witness.told()  # type: ignore[attr-defined]
    nccl.synchronize()
    return told


def graph(nccl: nccl_kit.Nccl, ranks: int, rank: int) -> tuple[list[Event], dict[str, int]]:
    """Captured calls run three times; the same call without a graph between them."""
    world: nccl_kit.Comm = nccl.world  # type: ignore[attr-defined]
    send, recv = _arrays(nccl, 64)
    captured, run = ctypes.c_void_p(), ctypes.c_void_p()
    assert nccl.cuda.cudaStreamBeginCapture(nccl.stream, 1) == 0
    world.all_reduce(send, recv, FLOAT32)
    assert nccl.cuda.cudaStreamEndCapture(nccl.stream, ctypes.byref(captured)) == 0
    assert nccl.cuda.cudaGraphInstantiateWithFlags(ctypes.byref(run), captured, ctypes.c_ulonglong(0)) == 0
    for _ in range(3):
        assert nccl.cuda.cudaGraphLaunch(run, nccl.stream) == 0
        nccl.synchronize()
    world.all_reduce(send, recv, FLOAT32)
    nccl.synchronize()
    return nccl.lib.witness.told(), nccl.lib.witness.figures  # type: ignore[attr-defined]

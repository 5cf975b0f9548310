"""The simulated NCCL from Python: one rank a process, its buffers as numpy arrays, and a pool of such processes."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SIM = Path(os.environ.get("STALLSCOPE_SIM_LIB", ROOT / "build/sim/lib"))
SUM, PROD, MAX, MIN, AVG = range(5)
INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, E4M3, E5M2 = range(12)
NUMPY = {
    INT8: np.int8, UINT8: np.uint8, INT32: np.int32, UINT32: np.uint32, INT64: np.int64, UINT64: np.uint64,
    FLOAT16: np.float16, FLOAT32: np.float32, FLOAT64: np.float64, BFLOAT16: np.uint16, E4M3: np.uint8, E5M2: np.uint8,
}  # fmt: skip
IN_PROGRESS, NOT_READY = 7, 600
CONFIG_MAGIC, UNDEFINED = 0xCAFEBEEF, -(2**31)


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


class Config(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", ctypes.c_int),
        ("cga", ctypes.c_int), ("min_ctas", ctypes.c_int), ("max_ctas", ctypes.c_int), ("net", ctypes.c_char_p),
        ("split_share", ctypes.c_int), ("traffic_class", ctypes.c_int), ("name", ctypes.c_char_p),
        ("collnet", ctypes.c_int), ("policy", ctypes.c_int), ("shrink_share", ctypes.c_int), ("nvls", ctypes.c_int),
    ]  # fmt: skip

    def __init__(self, blocking: int = 1, name: bytes | None = None) -> None:
        u = UNDEFINED
        super().__init__(ctypes.sizeof(Config), CONFIG_MAGIC, 22705, blocking, u, u, u, None, u, u, name, u, u, u, u)


def to_bfloat(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def encode(values: np.ndarray, dtype: int) -> np.ndarray:
    """Whole numbers, as that type keeps them."""
    return to_bfloat(values) if dtype == BFLOAT16 else values.astype(NUMPY[dtype])


def decode(values: np.ndarray, dtype: int) -> np.ndarray:
    return from_bfloat(values) if dtype == BFLOAT16 else values


class Nccl:
    """libnccl and libcudart of one process."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL(str(SIM / "libcudart.so.12"))
        self.lib = ctypes.CDLL(str(SIM / os.environ.get("NCCL_KIT_LIBRARY", "libnccl.so.2")))
        self.stream = self.new_stream()

    def new_stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        assert self.cuda.cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
        return stream

    def array(self, count: int, dtype: int) -> np.ndarray:
        """Device memory, which is ordinary memory here."""
        pointer = ctypes.c_void_p()
        size = max(count, 1) * np.dtype(NUMPY[dtype]).itemsize
        assert self.cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0
        raw = (ctypes.c_char * size).from_address(pointer.value or 0)
        return np.frombuffer(raw, NUMPY[dtype])[:count]

    def free(self, *arrays: np.ndarray) -> None:
        for array in arrays:
            assert self.cuda.cudaFree(ctypes.c_void_p(array.ctypes.data)) == 0

    def unique_id(self) -> bytes:
        uid = UniqueId()
        assert self.lib.ncclGetUniqueId(ctypes.byref(uid)) == 0
        return bytes(ctypes.string_at(ctypes.addressof(uid), 128))

    def init(self, uid: bytes, ranks: int, rank: int, config: Config | None = None) -> Comm:
        comm = ctypes.c_void_p()
        value = UniqueId.from_buffer_copy(uid)
        if config is None:
            result = self.lib.ncclCommInitRank(ctypes.byref(comm), ranks, value, rank)
        else:
            result = self.lib.ncclCommInitRankConfig(ctypes.byref(comm), ranks, value, rank, ctypes.byref(config))
        assert result in (0, IN_PROGRESS), result
        return Comm(self, comm, ranks, rank)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        assert self.lib.ncclGroupStart() == 0
        yield
        assert self.lib.ncclGroupEnd() == 0

    def synchronize(self, stream: ctypes.c_void_p | None = None) -> None:
        assert self.cuda.cudaStreamSynchronize(stream or self.stream) == 0

    def done(self, seconds: float = 0.0, stream: ctypes.c_void_p | None = None) -> bool:
        """Whether the stream is idle, now or within that time."""
        end = time.monotonic() + seconds
        while self.cuda.cudaStreamQuery(stream or self.stream) == NOT_READY:
            if time.monotonic() >= end:
                return False
            time.sleep(0.002)
        return True


class Comm:
    """One rank's communicator; each call is made on the process's stream unless told otherwise."""

    def __init__(self, nccl: Nccl, handle: ctypes.c_void_p, ranks: int, rank: int) -> None:
        self.nccl, self.handle, self.ranks, self.rank = nccl, handle, ranks, rank

    def try_call(self, name: str, *args: Any, stream: ctypes.c_void_p | None = None) -> int:
        plain = [ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in args]
        return int(getattr(self.nccl.lib, name)(*plain, self.handle, stream or self.nccl.stream))

    def call(self, name: str, *args: Any, stream: ctypes.c_void_p | None = None) -> None:
        result = self.try_call(name, *args, stream=stream)
        assert result == 0, f"{name}: {result}"

    def all_reduce(self, send: np.ndarray, recv: np.ndarray, dtype: int, op: int = SUM, **where: Any) -> None:
        self.call("ncclAllReduce", send, recv, ctypes.c_size_t(len(send)), dtype, op, **where)

    def send(self, data: np.ndarray, dtype: int, peer: int, **where: Any) -> None:
        self.call("ncclSend", data, ctypes.c_size_t(len(data)), dtype, peer, **where)

    def recv(self, data: np.ndarray, dtype: int, peer: int, **where: Any) -> None:
        self.call("ncclRecv", data, ctypes.c_size_t(len(data)), dtype, peer, **where)

    def split(self, color: int, key: int, config: Config | None = None) -> Comm | None:
        child = ctypes.c_void_p()
        result = self.nccl.lib.ncclCommSplit(
            self.handle, color, key, ctypes.byref(child), ctypes.byref(config) if config else None
        )
        assert result in (0, IN_PROGRESS), result
        return Comm(self.nccl, child, *self.nccl_ranks(child)) if child.value else None

    def nccl_ranks(self, handle: ctypes.c_void_p) -> tuple[int, int]:
        ranks, rank = ctypes.c_int(), ctypes.c_int()
        assert self.nccl.lib.ncclCommCount(handle, ctypes.byref(ranks)) == 0
        assert self.nccl.lib.ncclCommUserRank(handle, ctypes.byref(rank)) == 0
        return ranks.value, rank.value

    def async_error(self) -> int:
        error = ctypes.c_int(-1)
        assert self.nccl.lib.ncclCommGetAsyncError(self.handle, ctypes.byref(error)) == 0
        return error.value

    def finalize(self) -> int:
        return int(self.nccl.lib.ncclCommFinalize(self.handle))

    def destroy(self) -> None:
        assert self.nccl.lib.ncclCommDestroy(self.handle) == 0

    def abort(self) -> None:
        assert self.nccl.lib.ncclCommAbort(self.handle) == 0


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    nccl = Nccl()
    while True:
        try:
            work, args = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            answer = (True, work(nccl, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        with contextlib.suppress(OSError):  # nobody may be left to tell
            pipe.send(answer)


class Rank:
    """One process that does what it is told; `pid` may be killed."""

    def __init__(self, **environment: str) -> None:
        self._pipe, theirs = _context().Pipe()
        self._process = _context().Process(target=_serve, args=(theirs, environment), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0

    def start(self, work: Callable[..., Any], *args: Any) -> None:
        self._pipe.send((work, args))

    def ended(self, seconds: float) -> bool:
        """Whether what was started ends within that time."""
        return self._pipe.poll(seconds)

    def result(self, seconds: float = 30.0) -> Any:
        assert self.ended(seconds), "the rank hangs"
        fine, value = self._pipe.recv()
        assert fine, value
        return value

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.join(10)

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join(10)


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nccl_kit", "nccl_programs", "nccl_scenarios"])
    return context


@contextlib.contextmanager
def ranks(count: int, **environment: str) -> Iterator[list[Rank]]:
    """Processes with nothing done yet."""
    sys.path.insert(0, str(Path(__file__).parent))
    pool = [Rank(**environment) for _ in range(count)]
    try:
        yield pool
    finally:
        for rank in pool:
            rank.close()


def everywhere(pool: list[Rank], work: Callable[..., Any], *args: Any, seconds: float = 60.0) -> list[Any]:
    """The same work on every rank: `work(nccl, *args, ranks, rank)`."""
    for index, rank in enumerate(pool):
        rank.start(work, *args, len(pool), index)
    return [rank.result(seconds) for rank in pool]

"""What a program of these needs: the simulated libraries through ctypes, ids through files, and a word on the block."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
LIB = ROOT / "build" / "sim" / "lib"
FLOAT, SUM, COUNT = 7, 0, 1024
NON_BLOCKING = 1
PACE_S = 0.01
ALL_LATER = 50
FOREVER_S = 1e6


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class Rank:
    """One rank. Its program goes wrong once the runner has put the file `wrong` into its folder."""

    def __init__(self, number: int, ranks: int, folder: Path) -> None:
        self.number, self.ranks, self.folder = number, ranks, folder
        self._is_wrong = False
        self.cudart, self.libnccl = (ctypes.CDLL(str(LIB / name)) for name in ("libcudart.so.12", "libnccl.so.2"))
        self.call("cudaSetDevice", number)
        self.buffer = ctypes.c_void_p()
        self.call("cudaMalloc", ctypes.byref(self.buffer), ctypes.c_size_t(1 << 20))

    def call(self, api: str, *args: Any) -> None:
        result = getattr(self.libnccl if api.startswith("nccl") else self.cudart, api)(*args)
        if result != 0:
            raise RuntimeError(f"{api} failed with {result}")

    def stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self.call("cudaStreamCreateWithFlags", ctypes.byref(stream), NON_BLOCKING)
        return stream

    def communicator(self, name: str, members: list[int] | None = None) -> ctypes.c_void_p:
        """Of all ranks, or of those; the first one publishes the unique id."""
        members = members or list(range(self.ranks))
        path = self.folder / f"{name}.id"
        if self.number == members[0]:
            made = UniqueId()
            self.call("ncclGetUniqueId", ctypes.byref(made))
            fresh = path.with_suffix(".new")
            fresh.write_bytes(ctypes.string_at(ctypes.addressof(made), 128))
            fresh.rename(path)
        while not path.exists():
            time.sleep(0.002)
        unique_id, comm = UniqueId.from_buffer_copy(path.read_bytes()), ctypes.c_void_p()
        self.call("ncclCommInitRank", ctypes.byref(comm), len(members), unique_id, members.index(self.number))
        return comm

    def all_reduce(self, comm: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        count = ctypes.c_size_t(COUNT)
        self.call("ncclAllReduce", self.buffer, self.buffer, count, FLOAT, SUM, comm, stream)

    def broadcast(self, root: int, comm: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        count = ctypes.c_size_t(COUNT)
        self.call("ncclBroadcast", self.buffer, self.buffer, count, FLOAT, root, comm, stream)

    def send(self, peer: int, comm: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        self.call("ncclSend", self.buffer, ctypes.c_size_t(COUNT), FLOAT, peer, comm, stream)

    def receive(self, peer: int, comm: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        self.call("ncclRecv", self.buffer, ctypes.c_size_t(COUNT), FLOAT, peer, comm, stream)

    def wait(self, stream: ctypes.c_void_p) -> None:
        self.call("cudaStreamSynchronize", stream)

    def is_fault(self, *culprits: int) -> bool:
        """Whether this rank goes wrong in this step, the only one; says so to the runner, when it does."""
        wrong = self.number in culprits and not self._is_wrong and (self.folder / "wrong").exists()
        if wrong:
            self._is_wrong = True
            self.begin()
        return wrong

    def all_at(self, step: int) -> bool:
        """Whether all ranks are to do it in this step: rank 0 says in which."""
        when = self.folder / "when"
        if self.is_fault(0):
            when.write_text(str(step + ALL_LATER), encoding="ascii")
        return when.exists() and when.read_text(encoding="ascii") == str(step)

    def begin(self) -> None:
        fresh = self.folder / f"begun.{self.number}.new"
        fresh.write_text(f"{time.time_ns()} {os.getpid()}", encoding="ascii")
        fresh.rename(self.folder / f"begun.{self.number}")

    def steps(self) -> Any:
        """Step numbers without end, at a pace that all ranks keep."""
        step = 0
        while True:
            time.sleep(PACE_S)
            yield step
            step += 1

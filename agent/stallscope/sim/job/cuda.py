"""The simulated libcudart and libnccl through ctypes, with this program's own counts and clock."""

from __future__ import annotations

import ctypes
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from stallscope.sim.job.board import Slot

LONG_WAIT_NS = 200_000
UNIQUE_ID_BYTES = 128
CONFIG_MAGIC, CONFIG_VERSION, UNDEFINED = 0xCAFEBEEF, 22705, -(2**31)


class Dim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """ncclConfig_t of 2.27: blocking, and a name."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("numbers", ctypes.c_int * 4),
        ("net", ctypes.c_char_p),
        ("shared", ctypes.c_int * 2),
        ("name", ctypes.c_char_p),
        ("rest", ctypes.c_int * 4),
    )

    def __init__(self, name: str) -> None:
        u = UNDEFINED
        size = ctypes.sizeof(Config)
        super().__init__(
            size, CONFIG_MAGIC, CONFIG_VERSION, (1, u, u, u), None, (u, u), name.encode(), (u, u, u, u)
        )  # fmt: skip


class JobError(Exception):
    """Says what failed, on what, why, and what to do next."""


def library_folder() -> Path:
    """Where the simulated libraries are: STALLSCOPE_SIM_LIB, else this checkout's build."""
    folder = Path(os.environ.get("STALLSCOPE_SIM_LIB") or Path(__file__).resolve().parents[4] / "build/sim/lib")
    for name in ("libcudart.so.12", "libnccl.so.2"):
        if not (folder / name).exists():
            raise JobError(
                f"cannot start the simulated job: {folder / name} does not exist\n"
                "  why: the simulated CUDA stack is not built, or STALLSCOPE_SIM_LIB names another folder\n"
                f"  next: run `make build`, or set STALLSCOPE_SIM_LIB to the folder that holds {name}"
            )
    return folder


class Runtime:
    """Calls into both libraries: counts them, measures those that wait, and says on the board which one runs."""

    def __init__(self, folder: Path, slot: Slot) -> None:
        self.library = ctypes.CDLL(str(folder / "libcudart.so.12"))
        self.slot = slot
        self._nccl = ctypes.CDLL(str(folder / "libnccl.so.2"))
        self.calls: Counter[str] = Counter()
        self.waits: dict[str, dict[str, int]] = {}

    def call(self, api: str, *args: Any) -> None:
        self.calls[api] += 1
        library = self._nccl if api.startswith("nccl") else self.library
        result = getattr(library, api)(*args)
        if result != 0:
            raise JobError(f"{api} failed with error {result}")

    def nccl(self, api: str, *args: Any) -> None:
        """A call that may block on the host."""
        self.slot.enter(api)
        self.call(api, *args)
        self.slot.leave()

    def wait(self, api: str, *args: Any) -> None:
        start_ns = time.monotonic_ns()
        self.nccl(api, *args)
        duration_ns = time.monotonic_ns() - start_ns
        if duration_ns >= LONG_WAIT_NS:
            known = self.waits.setdefault(api, {"count": 0, "total_ns": 0})
            known["count"] += 1
            known["total_ns"] += duration_ns

    def allocate(self, api: str, size: int) -> ctypes.c_void_p:
        pointer = ctypes.c_void_p()
        self.call(api, ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer

    def unique_id(self) -> bytes:
        value = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(value))
        return ctypes.string_at(ctypes.addressof(value), UNIQUE_ID_BYTES)

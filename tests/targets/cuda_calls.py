"""ctypes access to a CUDA runtime for the Python targets, with exact tallies; ctypes calls are ordinary calls."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections import Counter, defaultdict
from typing import Any

LONG_WAIT_NS = 200_000
WAITS = {
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMemcpyAsync",
    "cudaFree",
}
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2


class Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]


class Runtime:
    """One loaded libcudart. `call` counts; its waits are also measured with this program's clock."""

    def __init__(self, path: str | None = None) -> None:
        where = os.environ.get("STALLSCOPE_SIM_LIB", os.path.join(os.path.dirname(__file__), "../../build/sim/lib"))
        self.library = ctypes.CDLL(path or os.path.join(where, "libcudart.so.12"))
        self.calls: Counter[str] = Counter()
        self.long_waits: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def call(self, api: str, *args: Any) -> None:
        self.calls[api] += 1
        start_ns = time.monotonic_ns()
        result = getattr(self.library, api)(*args)
        duration_ns = time.monotonic_ns() - start_ns
        if result != 0:
            sys.exit(f"{api} returned {result}")
        if api in WAITS and duration_ns >= LONG_WAIT_NS:
            self.long_waits[api][0] += 1
            self.long_waits[api][1] += duration_ns

    def launch(self, stream: ctypes.c_void_p, duration_ns: int = 0, name: int = 0x1000) -> None:
        if duration_ns:
            self.library.stallscope_sim_set_next_kernel_ns(ctypes.c_uint64(duration_ns))
        one = Dim3(1, 1, 1)
        self.call("cudaLaunchKernel", ctypes.c_void_p(name), one, one, None, ctypes.c_size_t(0), stream)

    def stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self.call("cudaStreamCreateWithFlags", ctypes.byref(stream), 1)
        return stream

    def event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self.call("cudaEventCreate", ctypes.byref(event))
        return event

    def memory(self, api: str, count: int) -> ctypes.c_void_p:
        pointer = ctypes.c_void_p()
        flags = (0,) if api == "cudaHostAlloc" else ()
        self.call(api, ctypes.byref(pointer), ctypes.c_size_t(count), *flags)
        return pointer

    def report(self) -> dict[str, Any]:
        waits = {api: {"count": count, "total_ns": total} for api, (count, total) in self.long_waits.items()}
        return {"calls": dict(self.calls), "long_waits": waits}

    def reset(self) -> None:
        self.calls.clear()
        self.long_waits.clear()


def ready() -> None:
    """Prints "ready" and waits for a line; an ended stdin ends the program."""
    print("ready", flush=True)
    if not sys.stdin.readline():
        sys.exit(0)

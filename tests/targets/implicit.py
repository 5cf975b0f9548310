"""implicit.py [STEPS [KERNEL_US]]: steps with every kind of implicit wait, each on a line of its own.

Prints "ready" before it loads CUDA, waits for a line, loads it, prints "loaded", waits, makes its memory, prints "set up",
waits, and prints one line of JSON: "sites" {"function": [[api, calls]..]} of its functions, which wait nowhere else, and
"gap_ns": {"function": host time between its wait and the next launch}, by the program's own clock. Ends with a line.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections import Counter, defaultdict
from typing import Any

from cuda_calls import DEVICE_TO_HOST, HOST_TO_DEVICE, Runtime, ready

BYTES = 4096
HOST_S = 0.001
calls: Counter[tuple[str, str]] = Counter()
gap_ns: Counter[str] = Counter()


class Steps:
    """One method a kind of wait; all in one stream but for `other`."""

    def __init__(self, kernel_ns: int) -> None:
        self.runtime, self.kernel_ns = Runtime(), kernel_ns
        where = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../build/targets/libimplicit.so")
        self.library = ctypes.CDLL(os.environ.get("STALLSCOPE_TARGET_LIB", where))

    def set_up(self) -> None:
        r = self.runtime
        self.stream, self.other, self.event = r.stream(), r.stream(), r.event()
        self.device, self.pinned = r.memory("cudaMalloc", BYTES), r.memory("cudaHostAlloc", BYTES)
        self.pageable = ctypes.create_string_buffer(BYTES)
        self.locked = ctypes.create_string_buffer(BYTES)
        r.call("cudaHostRegister", self.locked, ctypes.c_size_t(BYTES), 0)

    def launch(self) -> None:
        self.runtime.launch(self.stream, self.kernel_ns)

    def item(self) -> None:
        size = ctypes.c_size_t(BYTES)
        self.library.copy_and_wait(self.pinned, self.device, size, DEVICE_TO_HOST, self.stream)

    def cpu(self) -> None:
        size = ctypes.c_size_t(BYTES)
        self.library.copy_and_wait(self.pageable, self.device, size, DEVICE_TO_HOST, self.stream)

    def cuda(self) -> None:
        size = ctypes.c_size_t(BYTES)
        self.library.copy_and_wait(self.device, self.pageable, size, HOST_TO_DEVICE, self.stream)

    def cuda_pinned(self) -> None:
        size = ctypes.c_size_t(BYTES)
        self.library.copy_and_wait(self.device, self.locked, size, HOST_TO_DEVICE, self.stream)

    def unpinned(self) -> None:
        size = ctypes.c_size_t(BYTES)
        self.runtime.library.cudaMemcpyAsync(self.device, self.pageable, size, HOST_TO_DEVICE, self.stream)

    def pinned_copy(self) -> None:
        size = ctypes.c_size_t(BYTES)
        self.runtime.library.cudaMemcpyAsync(self.device, self.pinned, size, HOST_TO_DEVICE, self.stream)

    def synchronize(self) -> None:
        self.runtime.library.cudaDeviceSynchronize()

    def asked_for(self) -> None:
        """A copy, and on the next line a wait that the program asks for."""
        size = ctypes.c_size_t(BYTES)
        self.runtime.library.cudaMemcpyAsync(self.pinned, self.device, size, DEVICE_TO_HOST, self.stream)
        self.runtime.library.cudaStreamSynchronize(self.stream)

    def elsewhere(self) -> None:
        size, stream, other = ctypes.c_size_t(BYTES), self.stream, self.other
        self.library.copy_and_wait_elsewhere(self.pinned, self.device, size, DEVICE_TO_HOST, stream, other)

    def for_event(self) -> None:
        self.runtime.library.cudaEventRecord(self.event, self.stream)
        self.runtime.library.cudaEventSynchronize(self.event)

    def blocking_copy(self) -> None:
        self.runtime.library.cudaMemcpy(self.pageable, self.device, ctypes.c_size_t(BYTES), DEVICE_TO_HOST)

    def allocate_and_free(self) -> None:
        pointer = ctypes.c_void_p()
        self.runtime.library.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(BYTES))
        self.runtime.library.cudaFree(pointer)


BOTH = ("cudaMemcpyAsync", "cudaStreamSynchronize")
SHAPES: dict[str, tuple[str, ...]] = {
    "item": BOTH, "cpu": BOTH, "cuda": BOTH, "cuda_pinned": BOTH, "asked_for": BOTH, "elsewhere": BOTH,
    "unpinned": BOTH[:1], "pinned_copy": BOTH[:1], "synchronize": ("cudaDeviceSynchronize",),
    "for_event": ("cudaEventSynchronize",), "blocking_copy": ("cudaMemcpy",),
    "allocate_and_free": ("cudaMalloc", "cudaFree"),
}  # fmt: skip


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    ready()
    steps = Steps(int(sys.argv[2]) * 1000 if len(sys.argv) > 2 else 300_000)
    print("loaded", flush=True)
    sys.stdin.readline()
    steps.set_up()
    print("set up", flush=True)
    sys.stdin.readline()
    for _ in range(count):
        for name, apis in SHAPES.items():
            steps.launch()
            getattr(steps, name)()
            ended_ns = time.monotonic_ns()
            time.sleep(HOST_S)
            gap_ns[name] += time.monotonic_ns() - ended_ns
            calls.update((name, api) for api in apis)
    steps.launch()
    sites: dict[str, list[list[Any]]] = defaultdict(list)
    for (name, api), number in calls.items():
        sites[name].append([api, number])
    print(json.dumps({"target": "implicit.py", "pid": os.getpid(), "sites": sites, "gap_ns": gap_ns}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()

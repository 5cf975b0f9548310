"""calls.py [ROUNDS]: known calls from Python. Prints "ready", waits for a line, and ends with one line of JSON."""

from __future__ import annotations

import ctypes
import json
import os
import sys

from cuda_calls import DEVICE_TO_HOST, HOST_TO_DEVICE, Runtime, ready

BYTES = 4096
WAIT_NS = 2_000_000


def one_round(runtime: Runtime, stream: ctypes.c_void_p, device: ctypes.c_void_p, pinned: ctypes.c_void_p) -> None:
    pageable = ctypes.create_string_buffer(BYTES)
    size = ctypes.c_size_t(BYTES)
    runtime.call("cudaMemcpyAsync", device, pinned, size, HOST_TO_DEVICE, stream)
    runtime.launch(stream, WAIT_NS)
    runtime.call("cudaMemcpyAsync", pageable, device, size, DEVICE_TO_HOST, stream)
    runtime.launch(stream, WAIT_NS)
    runtime.call("cudaStreamSynchronize", stream)
    runtime.call("cudaMemcpy", device, pageable, size, HOST_TO_DEVICE)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    runtime = Runtime()
    ready()
    stream, device = runtime.stream(), runtime.memory("cudaMalloc", BYTES)
    pinned = runtime.memory("cudaHostAlloc", BYTES)
    for _ in range(rounds):
        one_round(runtime, stream, device, pinned)
    runtime.call("cudaDeviceSynchronize")
    runtime.call("cudaFree", device)
    print(json.dumps({"target": "calls.py", "pid": os.getpid(), **runtime.report()}))


if __name__ == "__main__":
    main()

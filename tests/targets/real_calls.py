"""real_calls.py LIBRARY ROUNDS: ctypes calls of a real libcudart, with and without the GIL, all of which fail."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections import Counter

CALLS: Counter[str] = Counter()
RETURNED: dict[str, int] = {}


def call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    """Make and count one call."""
    CALLS[name] += 1
    RETURNED[name] = getattr(library, name)(*arguments)


def main() -> None:
    """Load, wait for a line, call."""
    path, rounds = sys.argv[1], int(sys.argv[2])
    free, held = ctypes.CDLL(path), ctypes.PyDLL(path)
    print("ready", flush=True)
    sys.stdin.readline()
    sizes = []
    for i in range(rounds):
        sizes.append(i * 7 + 1)
        call(free, "cudaMemcpy", ctypes.c_void_p(64), ctypes.c_void_p(128), ctypes.c_size_t(sizes[-1]), 1)
        call(held, "cudaStreamSynchronize", ctypes.c_void_p(0x5000 + i))
        call(free, "cudaDeviceSynchronize")
    print(json.dumps({"pid": os.getpid(), "calls": dict(CALLS), "returned": RETURNED, "bytes": sizes}))


main()

"""many_operations.py BEFORE AFTER: more operations than any ring has room for, on a communicator of one rank.

Makes BEFORE all-reduces, then another communicator with three, prints "done" and waits for a line; makes AFTER more on
the first one, and prints its pid and that one's unique id.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time

FLOAT, SUM, COUNT = 7, 0, 16
nccl, cudart = ctypes.CDLL("libnccl.so.2"), ctypes.CDLL("libcudart.so.12")


class UniqueId(ctypes.Structure):
    """ncclUniqueId, passed by value."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


def check(result: int) -> None:
    """0 or the end."""
    if result:
        sys.exit(f"{result}")


def create() -> tuple[ctypes.c_void_p, str]:
    """A communicator and its unique id."""
    uid, comm = UniqueId(), ctypes.c_void_p()
    check(nccl.ncclGetUniqueId(ctypes.byref(uid)))
    check(nccl.ncclCommInitRank(ctypes.byref(comm), 1, uid, 0))
    return comm, ctypes.string_at(ctypes.addressof(uid), 128).hex()


def reduce(comm: ctypes.c_void_p, buffer: ctypes.c_void_p, times: int) -> None:
    """All-reduces, and then the end of the last one."""
    for _ in range(times):
        check(nccl.ncclAllReduce(buffer, buffer, ctypes.c_size_t(COUNT), FLOAT, SUM, comm, None))
    check(cudart.cudaDeviceSynchronize())


def main() -> None:
    """See above."""
    before, after = map(int, sys.argv[1:])
    buffer = ctypes.c_void_p()
    check(cudart.cudaMalloc(ctypes.byref(buffer), ctypes.c_size_t(4 * COUNT)))
    first, uid = create()
    reduce(first, buffer, before)
    second, _ = create()
    reduce(second, buffer, 3)
    time.sleep(1.5)  # longer ago than what counts as late
    print("done", flush=True)
    sys.stdin.readline()
    reduce(first, buffer, after)
    time.sleep(0.5)
    print(json.dumps({"pid": os.getpid(), "uid": uid}))


main()

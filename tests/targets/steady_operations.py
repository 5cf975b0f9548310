"""steady_operations.py FAST SECONDS: calls NCCL all the time, on a communicator of one rank.

Makes FAST all-reduces at once, then one a millisecond; prints "long since" when SECONDS have passed, goes on until it gets
a line, and prints how many there were and the unique id.
"""

from __future__ import annotations

import ctypes
import json
import select
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


def main() -> None:
    """See above."""
    fast, seconds = int(sys.argv[1]), float(sys.argv[2])
    uid, comm, buffer, made = UniqueId(), ctypes.c_void_p(), ctypes.c_void_p(), 0
    check(cudart.cudaMalloc(ctypes.byref(buffer), ctypes.c_size_t(4 * COUNT)))
    check(nccl.ncclGetUniqueId(ctypes.byref(uid)))
    check(nccl.ncclCommInitRank(ctypes.byref(comm), 1, uid, 0))
    is_told, end = False, time.monotonic() + seconds
    while not (is_told and select.select([sys.stdin], [], [], 0)[0]):
        check(nccl.ncclAllReduce(buffer, buffer, ctypes.c_size_t(COUNT), FLOAT, SUM, comm, None))
        made += 1
        if made % 100 == 0:
            check(cudart.cudaDeviceSynchronize())
        if made > fast:
            time.sleep(0.001)
        if not is_told and made > fast and time.monotonic() > end:
            is_told = True
            print("long since", flush=True)
    time.sleep(0.5)
    print(json.dumps({"operations": made, "uid": ctypes.string_at(ctypes.addressof(uid), 128).hex()}))


main()

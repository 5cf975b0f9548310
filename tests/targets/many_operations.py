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

from nccl_calls import buffer_of, check, create, cudart, reduce


def reduce_all(comm: ctypes.c_void_p, buffer: ctypes.c_void_p, times: int) -> None:
    """All-reduces, and then the end of the last one."""
    for _ in range(times):
        reduce(comm, buffer)
    check(cudart.cudaDeviceSynchronize())


def main() -> None:
    """See above."""
    before, after = map(int, sys.argv[1:])
    buffer = buffer_of()
    first, uid = create()
    reduce_all(first, buffer, before)
    second, _ = create()
    reduce_all(second, buffer, 3)
    time.sleep(1.5)  # longer ago than what counts as late
    print("done", flush=True)
    sys.stdin.readline()
    reduce_all(first, buffer, after)
    time.sleep(0.5)
    print(json.dumps({"pid": os.getpid(), "uid": uid}))


main()

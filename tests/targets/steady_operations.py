"""steady_operations.py FAST SECONDS: calls NCCL all the time, on a communicator of one rank.

Makes FAST all-reduces at once, then one a millisecond; prints "long since" when SECONDS have passed, goes on until it gets
a line, and prints how many there were and the unique id.
"""

from __future__ import annotations

import json
import select
import sys
import time

from nccl_calls import buffer_of, check, create, cudart, reduce


def main() -> None:
    """See above."""
    fast, seconds = int(sys.argv[1]), float(sys.argv[2])
    buffer, made = buffer_of(), 0
    comm, uid = create()
    is_told, end = False, time.monotonic() + seconds
    while not (is_told and select.select([sys.stdin], [], [], 0)[0]):
        reduce(comm, buffer)
        made += 1
        if made % 100 == 0:
            check(cudart.cudaDeviceSynchronize())
        if made > fast:
            time.sleep(0.001)
        if not is_told and made > fast and time.monotonic() > end:
            is_told = True
            print("long since", flush=True)
    time.sleep(0.5)
    print(json.dumps({"operations": made, "uid": uid}))


main()

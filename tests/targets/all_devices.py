"""all_devices.py: two devices of one process, by ncclCommInitAll and by one ncclCommInitRankConfig or -Scalable each.

Prints "ready" and waits for a line; makes the communicators (after the line with "then", before it without), calls ten
all-reduces on each, prints "called", waits for a line and prints its pid.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

from nccl_calls import COUNT, FLOAT, SUM, UniqueId, check, cudart, nccl

DEVICES, CALLS = 2, 10


def each(config: bool, ids: list[str]) -> list[ctypes.c_void_p]:
    """Two communicators made in one group, as one call a device."""
    uid, comms = UniqueId(), [ctypes.c_void_p() for _ in range(DEVICES)]
    check(nccl.ncclGetUniqueId(ctypes.byref(uid)))
    ids.append(bytes(uid).hex())
    check(nccl.ncclGroupStart())
    for rank, comm in enumerate(comms):
        check(cudart.cudaSetDevice(rank))
        if config:
            check(nccl.ncclCommInitRankConfig(ctypes.byref(comm), DEVICES, uid, rank, None))
        else:
            check(nccl.ncclCommInitRankScalable(ctypes.byref(comm), DEVICES, rank, 1, ctypes.byref(uid), None))
    check(nccl.ncclGroupEnd())
    return comms


def reduce_all(comms: list[ctypes.c_void_p], buffers: list[ctypes.c_void_p]) -> None:
    """Ten groups of one all-reduce a device."""
    for _ in range(CALLS):
        check(nccl.ncclGroupStart())
        for rank, (comm, buffer) in enumerate(zip(comms, buffers, strict=True)):
            check(cudart.cudaSetDevice(rank))
            check(nccl.ncclAllReduce(buffer, buffer, ctypes.c_size_t(COUNT), FLOAT, SUM, comm, None))
        check(nccl.ncclGroupEnd())
    for rank in range(DEVICES):
        check(cudart.cudaSetDevice(rank))
        check(cudart.cudaDeviceSynchronize())


def make(ids: list[str]) -> list[list[ctypes.c_void_p]]:
    """All three."""
    both = (ctypes.c_void_p * DEVICES)()
    check(nccl.ncclCommInitAll(both, DEVICES, None))
    return [[ctypes.c_void_p(pointer) for pointer in both], each(True, ids), each(False, ids)]


def wait(word: str) -> None:
    """Say it, wait for a line."""
    print(word, flush=True)
    sys.stdin.readline()


def main() -> None:
    """See above."""
    then, ids = sys.argv[1:] == ["then"], list[str]()
    buffers = [ctypes.c_void_p() for _ in range(DEVICES)]
    for rank, buffer in enumerate(buffers):
        check(cudart.cudaSetDevice(rank))
        check(cudart.cudaMalloc(ctypes.byref(buffer), ctypes.c_size_t(4 * COUNT)))
    made = [] if then else make(ids)
    wait("ready")
    for comms in made or make(ids):
        reduce_all(comms, buffers)
    wait("called")
    print(json.dumps({"pid": os.getpid(), "ids": ids}))


main()

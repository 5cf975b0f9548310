"""What the programs here need to call NCCL and the runtime by ctypes."""

from __future__ import annotations

import ctypes
import sys

FLOAT, SUM, COUNT = 7, 0, 16
nccl, cudart = ctypes.CDLL("libnccl.so.2"), ctypes.CDLL("libcudart.so.12")


class UniqueId(ctypes.Structure):
    """ncclUniqueId, passed by value."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


def check(result: int) -> None:
    """0 or the end."""
    if result:
        sys.exit(f"{result}")


def buffer_of(count: int = COUNT) -> ctypes.c_void_p:
    """Room for so many floats."""
    buffer = ctypes.c_void_p()
    check(cudart.cudaMalloc(ctypes.byref(buffer), ctypes.c_size_t(4 * count)))
    return buffer


def create() -> tuple[ctypes.c_void_p, str]:
    """A communicator of one rank, and its unique id."""
    uid, comm = UniqueId(), ctypes.c_void_p()
    check(nccl.ncclGetUniqueId(ctypes.byref(uid)))
    check(nccl.ncclCommInitRank(ctypes.byref(comm), 1, uid, 0))
    return comm, ctypes.string_at(ctypes.addressof(uid), 128).hex()


def reduce(comm: ctypes.c_void_p, buffer: ctypes.c_void_p) -> None:
    """One all-reduce, not waited for."""
    check(nccl.ncclAllReduce(buffer, buffer, ctypes.c_size_t(COUNT), FLOAT, SUM, comm, None))

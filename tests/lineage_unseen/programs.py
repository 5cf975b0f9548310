"""What the cases' programs share: `from programs import *` in their text."""

# ruff: noqa: F401
import ctypes
import multiprocessing as mp
import os
import signal
import socket
import subprocess
import sys
import threading
import time


def say(name: str, pid: int | None = None) -> None:
    """For the checks: who is who."""
    os.write(1, f"pid {name} {os.getpid() if pid is None else pid}\n".encode())


def cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcudart.so.12")


class Dim(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class Id(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


class nccl:
    """A communicator of one rank."""

    def __init__(self) -> None:
        self.lib, self.cudart, uid = ctypes.CDLL("libnccl.so.2"), cuda(), Id()
        self.comm, self.buffer = ctypes.c_void_p(), ctypes.c_void_p()
        self.cudart.cudaMalloc(ctypes.byref(self.buffer), ctypes.c_size_t(1 << 20))
        self.lib.ncclGetUniqueId(ctypes.byref(uid))
        self.lib.ncclCommInitRank(ctypes.byref(self.comm), 1, uid, 0)

    def reduce(self, count: int = 1024) -> None:
        self.lib.ncclAllReduce(self.buffer, self.buffer, ctypes.c_size_t(count), 7, 0, self.comm, None)

    def launch(self, ns: int = 0) -> None:
        if ns:
            self.cudart.stallscope_sim_set_next_kernel_ns(ctypes.c_uint64(ns))
        one = Dim(1, 1, 1)
        self.cudart.cudaLaunchKernel(ctypes.c_void_p(0x1000), one, one, None, ctypes.c_size_t(0), None)

    def sync(self) -> None:
        self.cudart.cudaDeviceSynchronize()


def train(seconds: float, name: str = "trainer") -> None:
    """Launches and waits for so long."""
    say(name)
    lib, end = cuda(), time.monotonic() + seconds
    while time.monotonic() < end:
        lib.cudaDeviceSynchronize()
        time.sleep(0.02)

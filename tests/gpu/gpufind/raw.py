"""Steps that call the CUDA libraries by ctypes: no framework, the caller is known."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

from gpufind.channel import (
    ALLOC,
    COPY,
    DEVICE_WAIT,
    EVENT,
    EVENT_WAIT,
    FREE,
    LAUNCH,
    STREAM_WAIT,
    Channel,
    Unavailable,
)

_PTX = ".version {0}\n.target {1}\n.address_size 64\n.visible .entry noop()\n{{\nret;\n}}\n"
_TARGETS = (("7.0", "sm_75"), ("6.3", "sm_50"))
_BYTES = 1 << 16
_H2D, _D2H = 1, 2
_BATCHES, _BATCH = 15, 2000
# Cheap exported calls that no hook counts: (name, number of out-parameters).
CHEAP = (("cuDriverGetVersion", 1), ("cuCtxGetCurrent", 1), ("cuDeviceGetCount", 1), ("cuCtxGetFlags", 1))


class Dim3(ctypes.Structure):
    """Passed by value, as in the C API."""

    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class Library:
    """A CUDA library by ctypes: each int argument is passed as 64 bits, which both ABIs allow for int."""

    def __init__(self, path: str) -> None:
        try:
            self.cdll = ctypes.CDLL(path)
        except OSError as error:
            raise Unavailable(str(error)) from error

    def bind(self, name: str, *arguments: Any) -> Callable[[], int]:
        """The call with these arguments, ready to be made many times."""
        try:
            function = self.cdll[name]
        except AttributeError as error:
            raise Unavailable(f"{name} is not exported") from error
        function.restype = ctypes.c_int
        ready = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        return lambda: int(function(*ready))

    def call(self, name: str, *arguments: Any) -> int:
        """One call; its return code."""
        return self.bind(name, *arguments)()


def open_driver(options: dict[str, Any]) -> Library:
    """libcuda, with the first device's primary context current. Raises Unavailable."""
    cuda = Library(options.get("libcuda") or "libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for name, arguments in (
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(device), 0)),
        ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), device)),
        ("cuCtxSetCurrent", (context,)),
    ):
        code = cuda.call(name, *arguments)
        if code:
            raise Unavailable(f"{name} returned {code}")
    return cuda


def _driver_kernel(cuda: Library) -> ctypes.c_void_p:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    for target in _TARGETS:
        if cuda.call("cuModuleLoadData", ctypes.byref(module), _PTX.format(*target).encode()) == 0:
            cuda.call("cuModuleGetFunction", ctypes.byref(function), module, b"noop")
            break
    return function


def raw_driver(channel: Channel) -> None:
    """The control: called by name, these must be counted; else the method itself fails."""
    cuda = open_driver(channel.options)
    kernel, pointer, event = _driver_kernel(cuda), ctypes.c_uint64(), ctypes.c_void_p()
    host = ctypes.create_string_buffer(_BYTES)
    channel.count("cuMemAlloc_v2", 20, cuda.bind("cuMemAlloc_v2", ctypes.byref(pointer), _BYTES), ALLOC)
    cuda.call("cuEventCreate", ctypes.byref(event), 0)
    launch = cuda.bind("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
    channel.count("cuLaunchKernel", 1000, launch, LAUNCH)
    channel.count("cuCtxSynchronize", 100, cuda.bind("cuCtxSynchronize"), DEVICE_WAIT)
    channel.count("cuStreamSynchronize", 100, cuda.bind("cuStreamSynchronize", 0), STREAM_WAIT)
    channel.count("cuEventRecord", 100, cuda.bind("cuEventRecord", event, 0), EVENT)
    channel.count("cuEventSynchronize", 100, cuda.bind("cuEventSynchronize", event), EVENT_WAIT)
    channel.count("cuMemcpyHtoD_v2", 100, cuda.bind("cuMemcpyHtoD_v2", pointer, host, _BYTES), COPY)
    channel.count("cuMemFree_v2", 1, cuda.bind("cuMemFree_v2", pointer), FREE)


def _runtime_kernel(cudart: Library) -> ctypes.c_void_p:
    library, kernel = ctypes.c_void_p(), ctypes.c_void_p(0x1000)
    if not hasattr(cudart.cdll, "cudaLibraryLoadData"):
        return kernel
    for target in _TARGETS:
        code = _PTX.format(*target).encode()
        if cudart.call("cudaLibraryLoadData", ctypes.byref(library), code, 0, 0, 0, 0, 0, 0) == 0:
            cudart.call("cudaLibraryGetKernel", ctypes.byref(kernel), library, b"noop")
            break
    return kernel


def raw_runtime(channel: Channel) -> None:
    """libcudart alone: does what it does reach libcuda's exports?"""
    cudart = Library(channel.options.get("libcudart") or "libcudart.so.12")
    pointer, event = ctypes.c_void_p(), ctypes.c_void_p()
    host, one = ctypes.create_string_buffer(_BYTES), Dim3(1, 1, 1)
    channel.count("cudaMalloc", 20, cudart.bind("cudaMalloc", ctypes.byref(pointer), _BYTES), ALLOC)
    cudart.call("cudaEventCreate", ctypes.byref(event))
    launch = cudart.bind("cudaLaunchKernel", _runtime_kernel(cudart), one, one, None, 0, None)
    channel.count("cudaLaunchKernel", 1000, launch, LAUNCH)
    channel.count("cudaDeviceSynchronize", 100, cudart.bind("cudaDeviceSynchronize"), DEVICE_WAIT)
    channel.count("cudaStreamSynchronize", 100, cudart.bind("cudaStreamSynchronize", 0), STREAM_WAIT)
    channel.count("cudaEventRecord", 100, cudart.bind("cudaEventRecord", event, 0), EVENT)
    channel.count("cudaEventSynchronize", 100, cudart.bind("cudaEventSynchronize", event), EVENT_WAIT)
    channel.count("cudaMemcpy H2D", 100, cudart.bind("cudaMemcpy", pointer, host, _BYTES, _H2D), COPY)
    channel.count("cudaMemcpy D2H", 100, cudart.bind("cudaMemcpy", host, pointer, _BYTES, _D2H), COPY)
    channel.count("cudaMemcpyAsync", 100, cudart.bind("cudaMemcpyAsync", pointer, host, _BYTES, _H2D, 0), COPY)
    channel.count("cudaFree", 1, cudart.bind("cudaFree", pointer), FREE)


def cost(channel: Channel) -> None:
    """A cheap exported call, bare and counted: what one uprobe costs on this machine."""
    cuda = open_driver(channel.options)
    rows = []
    for name, outs in CHEAP:
        room = [ctypes.byref(ctypes.c_uint64()) for _ in range(outs)]
        call = cuda.bind(name, *room)
        bare = _median_ns(call)
        channel.ask({"say": "attach", "name": name})
        rows.append({"name": name, "bare_ns": bare, "counted_ns": _median_ns(call)})
    channel.fact("cost", rows)


def _median_ns(call: Callable[[], int]) -> float:
    times = []
    for _ in range(_BATCHES):
        start = time.perf_counter_ns()
        for _ in range(_BATCH):
            call()
        times.append((time.perf_counter_ns() - start) / _BATCH)
    return round(statistics.median(times), 1)

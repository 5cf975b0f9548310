"""Names that nobody wrote by hand, memory of other processes, virtual memory, cuBLAS: no call crashes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIM = ROOT / "build/sim/lib"
LISTS = {
    "cudart.txt": ("libcudart.so.12", "libcudart.so.13"),
    "cuda.txt": ("libcuda.so.1",),
    "cublas.txt": ("libcublas.so.12", "libcublas.so.13"),
    "cublasLt.txt": ("libcublasLt.so.12", "libcublasLt.so.13"),
    "nvml.txt": ("libnvidia-ml.so.1",),
}


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    subprocess.run(["make", "-s", "-C", str(ROOT / "native/sim")], check=True)


def rows(list_name: str) -> dict[str, str]:
    lines = (ROOT / "native/sim/stubs" / list_name).read_text().splitlines()
    return dict(tuple(line.split()) for line in lines if not line.startswith("#"))


def exported(library: str) -> dict[str, str]:
    """name → version."""
    text = subprocess.run(
        ["nm", "-D", "--defined-only", str(SIM / library)], check=True, capture_output=True, text=True
    ).stdout
    return dict(match.groups() for match in re.finditer(r" [TW] (\w+)@*(\S*)", text))


def script(text: str, *words: str, **env: str) -> list[str]:
    """Words that a fresh process with a runtime `rt` and the driver `cu` prints."""
    head = f"""
import ctypes, os, subprocess, sys
from cuda_calls import *
rt = Runtime()
rt.call("cudaFree", None)
cu = ctypes.CDLL("{SIM}/libcuda.so.1")
ref, u64 = ctypes.byref, ctypes.c_uint64
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests/targets"), "STALLSCOPE_SIM_LIB": str(SIM), **env}
    done = subprocess.run(
        [sys.executable, "-c", head + text, *words], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("list_name, library", [(name, library) for name in LISTS for library in LISTS[name]])
def test_every_listed_name_is_exported(list_name: str, library: str) -> None:
    found = exported(library)
    assert set(rows(list_name)) - set(found) == set()
    if not library.startswith(("libcuda.", "libnvidia")):
        assert set(found.values()) == {library}


def test_a_stub_counts_itself_and_tells_the_error() -> None:
    text = """
calls = rt.library.stallscope_sim_stub_calls
print(calls(b"cudaMallocArray"), rt.library.cudaMallocArray(), rt.library.cudaMallocArray(), calls(b"cudaMallocArray"))
print(rt.library.cudaGetLastError(), calls(b"cudaMalloc"), rt.library.cudaMemAdvise())
"""
    assert script(text) == ["0", "801", "801", "2", "801", "0", "0"]


def test_every_stub_of_the_runtime_returns() -> None:
    """With no arguments at all: what is written by hand is not called."""
    text = """
import re
for name, result in (line.split() for line in open(sys.argv[1]) if line[0] != "#"):
    function = getattr(rt.library, name)
    if rt.library.stallscope_sim_stub_calls(name.encode()) == 0 and name in sys.argv[2:]:
        assert function() == int(result), name
        assert rt.library.stallscope_sim_stub_calls(name.encode()) == 1, name
print("done")
"""
    generated = (ROOT / "build/sim/obj/stubs/libcudart12.c").read_text()
    names = re.findall(r"^STUB\(\d+, (\w+),", generated, re.M)
    assert len(names) > 100
    assert script(text, str(ROOT / "native/sim/stubs/cudart.txt"), *names) == ["done"]


# memory of another process

IPC_CHILD = """
handle = (ctypes.c_char * 64).from_buffer_copy(bytes.fromhex(sys.argv[1]))
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]
pointer = ctypes.c_void_p()
given = Handle.from_buffer_copy(bytes(handle.raw))
error = rt.library.cudaIpcOpenMemHandle(ref(pointer), given, 1)
if error:
    sys.exit(print(error))
host = ctypes.create_string_buffer(8)
rt.call("cudaMemcpy", host, pointer, ctypes.c_size_t(8), 2)
rt.call("cudaMemcpy", pointer, ctypes.create_string_buffer(b"answered"), ctypes.c_size_t(8), 1)
print(host.raw.decode(), rt.library.cudaFree(pointer), rt.library.cudaIpcCloseMemHandle(pointer), rt.library.cudaIpcCloseMemHandle(pointer))
"""


def test_memory_is_shared_with_another_process() -> None:
    text = """
size, handle, host = 1 << 20, ctypes.create_string_buffer(64), ctypes.create_string_buffer(8)
device = rt.memory("cudaMalloc", size)
rt.call("cudaMemcpy", device, ctypes.create_string_buffer(b"question"), ctypes.c_size_t(8), 1)
rt.call("cudaIpcGetMemHandle", handle, device)
child = subprocess.run([sys.executable, "-c", sys.argv[1], handle.raw.hex()], capture_output=True, text=True)
rt.call("cudaMemcpy", host, device, ctypes.c_size_t(8), 2)
print(child.stdout, child.stderr, host.raw.decode(), rt.library.cudaIpcGetMemHandle(handle, host))
rt.call("cudaFree", device)
child = subprocess.run([sys.executable, "-c", sys.argv[1], handle.raw.hex()], capture_output=True, text=True)
print(child.stdout, child.stderr)
small = rt.memory("cudaMalloc", 64)
print(rt.library.cudaIpcGetMemHandle(handle, small))
"""
    head = "import ctypes, os, sys\nfrom cuda_calls import *\nrt = Runtime()\nrt.call('cudaFree', None)\nref = ctypes.byref\n"
    assert script(text, head + IPC_CHILD) == ["question", "1", "0", "1", "answered", "1", "1", "801"]


EVENT_CHILD = """
import time
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]
event = ctypes.c_void_p()
rt.call("cudaIpcOpenEventHandle", ref(event), Handle.from_buffer_copy(bytes.fromhex(sys.argv[1])))
first = rt.library.cudaEventQuery(event)
stream = rt.stream()
rt.call("cudaStreamWaitEvent", stream, event, 0)
second = rt.library.cudaStreamQuery(stream)
print("asked", flush=True)
start = time.monotonic()
rt.call("cudaEventSynchronize", event)
rt.call("cudaStreamSynchronize", stream)
print(first, second, time.monotonic() - start > 0.2, rt.library.cudaEventQuery(event))
"""


@pytest.mark.parametrize("how", ["kernel", "hold"])
def test_an_event_is_shared_with_another_process(how: str) -> None:
    """Also one whose time nobody knows yet."""
    text = f"""
import time
stream, event, handle, hold = rt.stream(), ctypes.c_void_p(), ctypes.create_string_buffer(64), ctypes.c_void_p()
rt.call("cudaEventCreateWithFlags", ref(event), 2 | 4)
rt.call("cudaIpcGetEventHandle", handle, event)
if "{how}" == "hold":
    rt.call("stallscope_sim_hold", stream, ref(hold))
else:
    rt.launch(stream, 1_500_000_000)
rt.call("cudaEventRecord", event, stream)
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], handle.raw.hex()], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
if "{how}" == "hold":
    time.sleep(0.5)
    rt.call("stallscope_sim_release", hold)
print(child.communicate()[0])
"""
    head = "import ctypes, os, sys\nfrom cuda_calls import *\nrt = Runtime()\nrt.call('cudaFree', None)\nref = ctypes.byref\n"
    assert script(text, head + EVENT_CHILD) == ["600", "600", "True", "0"]


def test_virtual_memory() -> None:
    text = """
class Properties(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int) for n in ("type", "handles", "place", "device")] + [("rest", u64 * 2)]
properties, size, free, total = Properties(1, 1, 1, 0), 4 << 20, ctypes.c_size_t(), ctypes.c_size_t()
address, second, handle, again, fd = u64(), u64(), u64(), u64(), ctypes.c_int()
def used():
    rt.call("cudaMemGetInfo", ref(free), ref(total))
    return (total.value - free.value) >> 20
def ok(error):
    assert error == 0, error
ok(cu.cuMemAddressReserve(ref(address), u64(64 << 20), u64(0), u64(0), u64(0)))
print(cu.cuMemCreate(ref(handle), u64(1000), ref(properties), u64(0)))
ok(cu.cuMemCreate(ref(handle), u64(size), ref(properties), u64(0)))
print(used())
ok(cu.cuMemMap(address, u64(size), u64(0), handle, u64(0)))
ok(cu.cuMemSetAccess(address, u64(size), ref(properties), u64(1)))
rt.call("cudaMemcpy", ctypes.c_void_p(address.value + 100), ctypes.create_string_buffer(b"same"), ctypes.c_size_t(4), 1)
ok(cu.cuMemExportToShareableHandle(ref(fd), handle, 1, u64(0)))
ok(cu.cuMemImportFromShareableHandle(ref(again), ctypes.c_void_p(fd.value), 1))
ok(cu.cuMemAddressReserve(ref(second), u64(size), u64(0), u64(0), u64(0)))
ok(cu.cuMemMap(second, u64(size), u64(0), again, u64(0)))
host = ctypes.create_string_buffer(4)
rt.call("cudaMemcpy", host, ctypes.c_void_p(second.value + 100), ctypes.c_size_t(4), 2)
print(host.raw.decode(), used(), rt.library.cudaFree(ctypes.c_void_p(address.value)))
ok(cu.cuMemRelease(handle))
print(used())
ok(cu.cuMemUnmap(address, u64(64 << 20)))
print(used(), cu.cuMemUnmap(address, u64(size)))
ok(cu.cuMemAddressFree(address, u64(64 << 20)))
"""
    assert script(text) == ["1", "4", "same", "4", "1", "4", "0", "1"]


def test_an_event_in_a_launch_is_recorded() -> None:
    """NCCL waits on it."""
    text = """
class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint64), ("event", ctypes.c_void_p), ("rest", u64 * 7)]
class Config(ctypes.Structure):
    _fields_ = [("dims", ctypes.c_uint * 7), ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)]
stream, event, function = rt.stream(), rt.event(), ctypes.c_void_p()
cu.stallscope_sim_function(ref(function), b"ncclDevKernel")
attribute = Attribute(12, event, (u64 * 7)())
config = Config((ctypes.c_uint * 7)(1, 1, 1, 1, 1, 1, 0), stream, ctypes.addressof(attribute), 1)
rt.library.stallscope_sim_set_next_kernel_ns(u64(100_000_000))
cu.stallscope_sim_set_next_kernel_ns(u64(100_000_000))
print(cu.cuLaunchKernelEx(ref(config), function, None, None), rt.library.cudaEventQuery(event))
rt.call("cudaEventSynchronize", event)
print(rt.library.cudaStreamQuery(stream))
"""
    assert script(text) == ["0", "600", "0"]


def test_user_objects_live_as_long_as_their_graph() -> None:
    text = """
gone = []
destroy = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(gone.append)
graph, exec_, one, two = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
rt.call("cudaGraphCreate", ref(graph), 0)
for number, out in ((1, one), (2, two)):
    rt.call("cudaUserObjectCreate", ref(out), ctypes.c_void_p(number), destroy, 1, 1)
rt.call("cudaGraphRetainUserObject", graph, one, 1, 1)
rt.call("cudaGraphRetainUserObject", graph, two, 1, 0)
rt.call("cudaGraphInstantiate", ref(exec_), graph, u64(0))
rt.call("cudaGraphDestroy", graph)
print(len(gone))
rt.call("cudaGraphExecDestroy", exec_)
print(*gone)
rt.call("cudaUserObjectRelease", two, 1)
print(*gone)
"""
    assert script(text) == ["0", "1", "1", "2"]


def test_values_are_written_in_stream_order() -> None:
    text = """
stream, hold, device = rt.stream(), ctypes.c_void_p(), rt.memory("cudaMalloc", 64)
host = ctypes.create_string_buffer(8)
rt.call("cudaMemset", device, 0, ctypes.c_size_t(64))
rt.call("stallscope_sim_hold", stream, ref(hold))
cu.cuStreamWriteValue64_v2(stream, device, u64(0x1122334455667788), 0)
read = lambda: int.from_bytes(ctypes.string_at(device, 8), "little")
print(read())
rt.call("stallscope_sim_release", hold)
rt.call("cudaStreamSynchronize", stream)
print(hex(read()))
"""
    assert script(text) == ["0", "0x1122334455667788"]


def test_a_pool_knows_what_it_gave() -> None:
    text = """
pool, stream, pointer, value = ctypes.c_void_p(), rt.stream(), ctypes.c_void_p(), u64()
rt.call("cudaDeviceGetDefaultMemPool", ref(pool), 0)
def ask(attribute):
    rt.call("cudaMemPoolGetAttribute", pool, attribute, ref(value))
    return value.value
rt.call("cudaMallocAsync", ref(pointer), ctypes.c_size_t(5000), stream)
print(ask(5), ask(7))
rt.call("cudaFreeAsync", pointer, stream)
print(ask(7), ask(8))
"""
    assert script(text) == ["5000", "5000", "0", "5000"]


@pytest.mark.parametrize("visible, count", [("1,0", 2), ("1", 1), ("1,7,0", 1), ("", 0), ("-1", 0)])
def test_visible_devices(visible: str, count: int) -> None:
    text = f"""
import ctypes
rt = ctypes.CDLL("{SIM}/libcudart.so.12")
count, text = ctypes.c_int(), ctypes.create_string_buffer(32)
error = rt.cudaGetDeviceCount(ctypes.byref(count))
rt.cudaDeviceGetPCIBusId(text, 32, 0)
print(error, count.value, text.value.decode())
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    out = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True).stdout.split()
    assert out == (["0", str(count), "0000:02:00.0"] if count else ["100", "0"])


@pytest.mark.parametrize("way", ["exported", "private", "inside"])
def test_cublas_launches_on_its_stream(way: str) -> None:
    text = f"""
blas, handle, stream = ctypes.CDLL("{SIM}/libcublas.so.12"), ctypes.c_void_p(), rt.stream()
print(blas.cublasCreate_v2(ref(handle)), blas.cublasSetStream_v2(handle, stream))
rt.library.stallscope_sim_set_next_kernel_ns(u64(100_000_000))
print(blas.cublasSgemm_v2(handle), rt.library.cudaStreamQuery(stream), blas.stallscope_sim_stub_calls(b"cublasSgemm_v2"))
rt.call("cudaStreamSynchronize", stream)
print(blas.cublasDestroy_v2(handle), blas.cublasSgemm_v2(None), blas.cublasGetMatrix())
"""
    assert script(text, STALLSCOPE_SIM_DRIVER=way) == ["0", "0", "0", "600", "1", "0", "1", "15"]

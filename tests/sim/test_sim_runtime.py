"""The simulated CUDA runtime: what waits and what does not, in which order, and through which driver functions."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIM = ROOT / "build/sim/lib"
TARGETS = ROOT / "build/targets"
sys.path.insert(0, str(ROOT / "tests/targets"))

from cuda_calls import DEVICE_TO_HOST, HOST_TO_DEVICE, Dim3, Runtime  # noqa: E402

MS = 1_000_000
DEVICE_TO_DEVICE = 3
NOT_READY = 600
NON_BLOCKING = 1
PER_THREAD = ctypes.c_void_p(2)
LEGACY = ctypes.c_void_p(None)
HOST_FN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    for folder in ("native/sim", "tests/targets"):
        subprocess.run(["make", "-s", "-C", str(ROOT / folder)], check=True)


@pytest.fixture
def rt(_built: None) -> Runtime:
    runtime = Runtime(str(SIM / "libcudart.so.12"))
    runtime.call("cudaDeviceSynchronize")
    runtime.library.cudaGetLastError()
    return runtime


def took_ns(call: Callable[[], object]) -> int:
    start_ns = time.monotonic_ns()
    call()
    return time.monotonic_ns() - start_ns


def new_event(rt: Runtime) -> ctypes.c_void_p:
    return rt.event()


def blocking_stream(rt: Runtime) -> ctypes.c_void_p:
    stream = ctypes.c_void_p()
    rt.call("cudaStreamCreate", ctypes.byref(stream))
    return stream


def script(text: str, **env: str) -> str:
    """Runs Python with a fresh runtime `rt`: settings are read once a process."""
    head = "import ctypes, time, os\nfrom cuda_calls import *\nrt = Runtime()\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests/targets"), "STALLSCOPE_SIM_LIB": str(SIM), **env}
    done = subprocess.run(
        [sys.executable, "-c", head + text], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# launches and waits


def test_launch_returns_at_once_and_the_wait_lasts(rt: Runtime) -> None:
    stream = rt.stream()
    start_ns = time.monotonic_ns()
    rt.launch(stream, 200 * MS)
    assert time.monotonic_ns() - start_ns < 100 * MS
    assert rt.library.cudaStreamQuery(stream) == NOT_READY
    rt.call("cudaStreamSynchronize", stream)
    assert time.monotonic_ns() - start_ns >= 200 * MS
    assert rt.library.cudaStreamQuery(stream) == 0


def test_kernels_of_one_stream_add_up(rt: Runtime) -> None:
    stream = rt.stream()
    start_ns = time.monotonic_ns()
    for _ in range(10):
        rt.launch(stream, 5 * MS)
    rt.call("cudaDeviceSynchronize")
    assert time.monotonic_ns() - start_ns >= 50 * MS


def test_streams_run_side_by_side(rt: Runtime) -> None:
    streams = [rt.stream() for _ in range(4)]
    for stream in streams:
        rt.launch(stream, 100 * MS)
    assert took_ns(lambda: rt.call("cudaDeviceSynchronize")) < 200 * MS


CPU_SHARE = """
stream = rt.stream()
{before}
rt.launch(stream, 100_000_000)
cpu, wall = time.thread_time_ns(), time.monotonic_ns()
rt.call("cudaStreamSynchronize", stream)
print((time.thread_time_ns() - cpu) / (time.monotonic_ns() - wall))
"""


@pytest.mark.parametrize(
    "wait, flags, spins",
    [("", 0, False), ("block", 0, False), ("spin", 0, True), ("block", 1, True), ("spin", 4, False)],
)
def test_wait_sleeps_or_spins(wait: str, flags: int, spins: bool) -> None:
    before = f'rt.call("cudaSetDeviceFlags", {flags})' if flags else ""
    share = float(script(CPU_SHARE.format(before=before), STALLSCOPE_SIM_WAIT=wait))
    # A spinning thread on a busy machine may be kept off the CPU for a part of it.
    assert share > 0.2 if spins else share < 0.1


# events


def test_elapsed_time_is_the_work_between(rt: Runtime) -> None:
    stream, first, second = rt.stream(), new_event(rt), new_event(rt)
    rt.launch(stream, 30 * MS)
    rt.call("cudaEventRecord", first, stream)
    rt.launch(stream, 20 * MS)
    rt.call("cudaEventRecord", second, stream)
    assert rt.library.cudaEventQuery(second) == NOT_READY
    rt.call("cudaEventSynchronize", first)
    assert rt.library.cudaEventQuery(first) == 0
    assert rt.library.cudaEventQuery(second) == NOT_READY
    rt.call("cudaEventSynchronize", second)
    elapsed = ctypes.c_float()
    rt.call("cudaEventElapsedTime", ctypes.byref(elapsed), first, second)
    assert elapsed.value == 20.0


def test_event_orders_two_streams(rt: Runtime) -> None:
    ahead, behind, event = rt.stream(), rt.stream(), new_event(rt)
    start_ns = time.monotonic_ns()
    rt.launch(ahead, 100 * MS)
    rt.call("cudaEventRecord", event, ahead)
    rt.call("cudaStreamWaitEvent", behind, event, 0)
    rt.launch(behind, 50 * MS)
    rt.call("cudaStreamSynchronize", behind)
    assert time.monotonic_ns() - start_ns >= 150 * MS


def test_unrecorded_event_is_complete(rt: Runtime) -> None:
    event = new_event(rt)
    assert rt.library.cudaEventQuery(event) == 0
    rt.call("cudaEventSynchronize", event)


# default streams


def test_legacy_stream_waits_for_blocking_streams_only(rt: Runtime) -> None:
    blocking, other = blocking_stream(rt), rt.stream()
    rt.launch(other, 400 * MS)
    rt.launch(blocking, 50 * MS)
    start_ns = time.monotonic_ns()
    rt.launch(LEGACY, MS)
    rt.call("cudaStreamSynchronize", LEGACY)
    assert 40 * MS <= time.monotonic_ns() - start_ns < 300 * MS


def test_blocking_stream_waits_for_the_legacy_stream(rt: Runtime) -> None:
    blocking, other = blocking_stream(rt), rt.stream()
    rt.launch(LEGACY, 100 * MS)
    rt.launch(blocking, MS)
    rt.launch(other, MS)
    assert took_ns(lambda: rt.call("cudaStreamSynchronize", other)) < 80 * MS
    assert took_ns(lambda: rt.call("cudaStreamSynchronize", blocking)) >= 15 * MS


def launch_own(rt: Runtime, duration_ns: int) -> None:
    rt.library.stallscope_sim_set_next_kernel_ns(ctypes.c_uint64(duration_ns))
    one = Dim3(1, 1, 1)
    rt.call("cudaLaunchKernel_ptsz", ctypes.c_void_p(0x1000), one, one, None, ctypes.c_size_t(0), LEGACY)


def test_per_thread_default_streams_are_apart(rt: Runtime) -> None:
    started = threading.Event()

    def other() -> None:
        launch_own(rt, 200 * MS)
        started.set()
        time.sleep(0.3)

    thread = threading.Thread(target=other)
    thread.start()
    started.wait()
    launch_own(rt, MS)
    assert took_ns(lambda: rt.call("cudaStreamSynchronize_ptsz", LEGACY)) < 100 * MS
    assert took_ns(lambda: rt.call("cudaStreamSynchronize", LEGACY)) >= 50 * MS
    thread.join()


def test_handle_two_is_the_own_default_stream(rt: Runtime) -> None:
    launch_own(rt, 50 * MS)
    assert rt.library.cudaStreamQuery(PER_THREAD) == NOT_READY
    ids = [ctypes.c_ulonglong(), ctypes.c_ulonglong(), ctypes.c_ulonglong()]
    rt.call("cudaStreamGetId", PER_THREAD, ctypes.byref(ids[0]))
    rt.call("cudaStreamGetId_ptsz", LEGACY, ctypes.byref(ids[1]))
    rt.call("cudaStreamGetId", LEGACY, ctypes.byref(ids[2]))
    assert ids[0].value == ids[1].value != ids[2].value
    rt.call("cudaStreamSynchronize", PER_THREAD)


def test_work_of_a_thread_that_ended_still_counts(rt: Runtime) -> None:
    thread = threading.Thread(target=launch_own, args=(rt, 100 * MS))
    start_ns = time.monotonic_ns()
    thread.start()
    thread.join()
    rt.call("cudaDeviceSynchronize")
    assert time.monotonic_ns() - start_ns >= 100 * MS


# copies and memory

SIZE = ctypes.c_size_t(4096)


def buffers(rt: Runtime) -> tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.Array[ctypes.c_char]]:
    return rt.memory("cudaMalloc", 4096), rt.memory("cudaHostAlloc", 4096), ctypes.create_string_buffer(4096)


@pytest.mark.parametrize("pinned, waits", [(True, False), (False, True)])
@pytest.mark.parametrize("kind", [HOST_TO_DEVICE, DEVICE_TO_HOST])
def test_async_copy_waits_only_for_pageable_memory(rt: Runtime, pinned: bool, waits: bool, kind: int) -> None:
    stream = rt.stream()
    device, pinned_memory, pageable = buffers(rt)
    host = pinned_memory if pinned else pageable
    rt.launch(stream, 100 * MS)
    pair = (device, host) if kind == HOST_TO_DEVICE else (host, device)
    assert (took_ns(lambda: rt.call("cudaMemcpyAsync", *pair, SIZE, kind, stream)) >= 50 * MS) is waits
    assert rt.library.cudaStreamQuery(stream) == (0 if waits else NOT_READY)


def test_registered_memory_is_pinned(rt: Runtime) -> None:
    stream = rt.stream()
    device, _, host = buffers(rt)
    rt.call("cudaHostRegister", host, SIZE, 0)
    rt.launch(stream, 100 * MS)
    assert took_ns(lambda: rt.call("cudaMemcpyAsync", device, host, SIZE, HOST_TO_DEVICE, stream)) < 50 * MS
    rt.call("cudaHostUnregister", host)
    rt.launch(stream, 100 * MS)
    assert took_ns(lambda: rt.call("cudaMemcpyAsync", device, host, SIZE, HOST_TO_DEVICE, stream)) >= 50 * MS


def test_sync_copy_waits_but_not_on_the_device(rt: Runtime) -> None:
    device, _, host = buffers(rt)
    rt.launch(LEGACY, 100 * MS)
    assert took_ns(lambda: rt.call("cudaMemcpy", device, device, SIZE, DEVICE_TO_DEVICE)) < 50 * MS
    assert took_ns(lambda: rt.call("cudaMemcpy", device, host, SIZE, HOST_TO_DEVICE)) >= 50 * MS


def test_free_waits_for_the_device(rt: Runtime) -> None:
    device, _, _ = buffers(rt)
    rt.launch(rt.stream(), 100 * MS)
    assert took_ns(lambda: rt.call("cudaFree", device)) >= 50 * MS


def test_copies_move_the_bytes(rt: Runtime) -> None:
    device, pinned, host = buffers(rt)
    host.value = b"through the device"
    rt.call("cudaMemcpy", device, host, SIZE, HOST_TO_DEVICE)
    stream = rt.stream()
    rt.call("cudaMemsetAsync", device, ord("T"), ctypes.c_size_t(1), stream)
    rt.call("cudaMemcpyAsync", pinned, device, SIZE, DEVICE_TO_HOST, stream)
    rt.call("cudaStreamSynchronize", stream)
    assert ctypes.string_at(pinned.value) == b"Through the device"


def test_2d_copy_respects_pitches(rt: Runtime) -> None:
    device, _, host = buffers(rt)
    rt.call("cudaMemset", device, ord("."), SIZE)
    host.raw = b"abXXcdXX".ljust(4096, b"\0")
    size = ctypes.c_size_t
    rt.call("cudaMemcpy2D", device, size(3), host, size(4), size(2), size(2), HOST_TO_DEVICE)
    rt.call("cudaMemcpy", host, device, size(6), DEVICE_TO_HOST)
    assert host.raw[:6] == b"ab.cd."


def test_memory_runs_out() -> None:
    text = """
pointer = ctypes.c_void_p()
print(*[rt.library.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size << 20)) for size in (60, 60, 4)])
"""
    assert script(text, STALLSCOPE_SIM_MEMORY_MB="64") == "0 2 0"


def test_copy_length_follows_its_size() -> None:
    text = """
stream, first, second = rt.stream(), rt.event(), rt.event()
size = 8 << 20
device, pinned = rt.memory("cudaMalloc", size), rt.memory("cudaHostAlloc", size)
rt.launch(stream, 50_000_000)
rt.call("cudaEventRecord", first, stream)
rt.call("cudaMemcpyAsync", device, pinned, ctypes.c_size_t(size), HOST_TO_DEVICE, stream)
rt.call("cudaEventRecord", second, stream)
rt.call("cudaEventSynchronize", second)
elapsed = ctypes.c_float()
rt.call("cudaEventElapsedTime", ctypes.byref(elapsed), first, second)
print(round(elapsed.value * 1e6))
"""
    assert int(script(text, STALLSCOPE_SIM_COPY_GBPS="1")) == pytest.approx((8 << 20) + 5000, abs=64)


# host functions and holds: streams that become queues


def test_host_function_runs_in_stream_order(rt: Runtime) -> None:
    stream, event = rt.stream(), new_event(rt)
    device, pinned, _ = buffers(rt)
    seen: list[int] = []

    def host(_: int) -> None:
        seen.append(time.monotonic_ns())
        time.sleep(0.05)
        ctypes.memmove(pinned.value, b"late", 5)

    callback = HOST_FN(host)
    start_ns = time.monotonic_ns()
    rt.launch(stream, 50 * MS)
    rt.call("cudaLaunchHostFunc", stream, callback, None)
    rt.call("cudaMemcpyAsync", device, pinned, SIZE, HOST_TO_DEVICE, stream)
    rt.call("cudaEventRecord", event, stream)
    assert time.monotonic_ns() - start_ns < 50 * MS
    assert rt.library.cudaEventQuery(event) == rt.library.cudaStreamQuery(stream) == NOT_READY
    rt.call("cudaEventSynchronize", event)
    assert time.monotonic_ns() - start_ns >= 100 * MS
    assert seen[0] - start_ns >= 50 * MS
    rt.call("cudaMemcpy", pinned, device, SIZE, DEVICE_TO_HOST)
    assert ctypes.string_at(pinned.value) == b"late"


def test_hold_stops_its_stream_and_who_waits_for_it(rt: Runtime) -> None:
    held, behind, free, event = rt.stream(), rt.stream(), rt.stream(), new_event(rt)
    hold = ctypes.c_void_p()
    rt.call("stallscope_sim_hold", held, ctypes.byref(hold))
    rt.launch(held, MS)
    rt.call("cudaEventRecord", event, held)
    rt.call("cudaStreamWaitEvent", behind, event, 0)
    rt.launch(free, MS)
    rt.call("cudaStreamSynchronize", free)
    assert rt.library.cudaEventQuery(event) == rt.library.cudaStreamQuery(behind) == NOT_READY
    timer = threading.Timer(0.1, lambda: rt.call("stallscope_sim_release", hold))
    timer.start()
    assert took_ns(lambda: rt.call("cudaStreamSynchronize", behind)) >= 50 * MS
    assert rt.library.cudaEventQuery(event) == rt.library.cudaStreamQuery(held) == 0
    timer.join()


def test_legacy_stream_and_device_wait_for_a_hold(rt: Runtime) -> None:
    held, hold = blocking_stream(rt), ctypes.c_void_p()
    for wait in (lambda: rt.call("cudaStreamSynchronize", LEGACY), lambda: rt.call("cudaDeviceSynchronize")):
        rt.call("stallscope_sim_hold", held, ctypes.byref(hold))
        timer = threading.Timer(0.1, lambda: rt.call("stallscope_sim_release", hold))
        timer.start()
        assert took_ns(wait) >= 50 * MS
        timer.join()


# graphs


def test_capture_records_and_launch_executes(rt: Runtime) -> None:
    stream, graph, executable = rt.stream(), ctypes.c_void_p(), ctypes.c_void_p()
    count = ctypes.c_size_t()
    rt.call("cudaStreamBeginCapture", stream, 0)
    for _ in range(3):
        rt.launch(stream, 20 * MS)
    assert rt.library.cudaStreamSynchronize(stream) == 900
    rt.call("cudaStreamEndCapture", stream, ctypes.byref(graph))
    assert rt.library.cudaStreamQuery(stream) == 0
    rt.call("cudaGraphGetNodes", graph, None, ctypes.byref(count))
    assert count.value == 3
    rt.call("cudaGraphInstantiate", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
    for _ in range(2):
        start_ns = time.monotonic_ns()
        rt.call("cudaGraphLaunch", executable, stream)
        rt.call("cudaStreamSynchronize", stream)
        assert time.monotonic_ns() - start_ns >= 60 * MS


@pytest.mark.parametrize(
    ("capture", "thread", "is_broken"), [(0, 0, True), (0, 1, False), (0, 2, False), (1, 0, False)]
)
def test_a_query_breaks_a_capture_in_the_global_mode(rt: Runtime, capture: int, thread: int, is_broken: bool) -> None:
    """0 global, 1 of the thread, 2 relaxed: what the query's own thread is in counts as well."""
    stream, event, graph, mode = rt.stream(), new_event(rt), ctypes.c_void_p(), ctypes.c_int(thread)
    rt.call("cudaStreamBeginCapture", stream, capture)
    rt.call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert rt.library.cudaEventQuery(event) == (900 if is_broken else 0)
    rt.call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert rt.library.cudaStreamEndCapture(stream, ctypes.byref(graph)) == (901 if is_broken else 0)
    assert bool(graph) == (not is_broken)
    assert rt.library.cudaEventQuery(event) == 0


def test_capture_spreads_over_events(rt: Runtime) -> None:
    stream, side, event, graph = rt.stream(), rt.stream(), new_event(rt), ctypes.c_void_p()
    count = ctypes.c_size_t()
    rt.call("cudaStreamBeginCapture", stream, 0)
    rt.call("cudaEventRecord", event, stream)
    rt.call("cudaStreamWaitEvent", side, event, 0)
    rt.launch(side, 100 * MS)
    rt.call("cudaEventRecord", event, side)
    rt.call("cudaStreamWaitEvent", stream, event, 0)
    rt.call("cudaStreamEndCapture", stream, ctypes.byref(graph))
    rt.call("cudaGraphGetNodes", graph, None, ctypes.byref(count))
    assert count.value == 1
    assert rt.library.cudaStreamQuery(side) == 0


def test_branches_of_a_graph_run_side_by_side(rt: Runtime) -> None:
    """100 ms, then 100 beside 150, then 50: 300, not 400."""
    stream, side, graph, executable = rt.stream(), rt.stream(), ctypes.c_void_p(), ctypes.c_void_p()
    fork, join = new_event(rt), new_event(rt)
    rt.call("cudaStreamBeginCapture", stream, 0)
    rt.launch(stream, 100 * MS)
    rt.call("cudaEventRecord", fork, stream)
    rt.call("cudaStreamWaitEvent", side, fork, 0)
    rt.launch(side, 150 * MS)
    rt.launch(stream, 100 * MS)
    rt.call("cudaEventRecord", join, side)
    rt.call("cudaStreamWaitEvent", stream, join, 0)
    rt.launch(stream, 50 * MS)
    rt.call("cudaStreamEndCapture", stream, ctypes.byref(graph))
    rt.call("cudaGraphInstantiate", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
    before, after, elapsed = new_event(rt), new_event(rt), ctypes.c_float()
    rt.launch(stream, 30 * MS)
    rt.call("cudaEventRecord", before, stream)
    rt.call("cudaGraphLaunch", executable, stream)
    rt.call("cudaEventRecord", after, stream)
    rt.call("cudaEventSynchronize", after)
    rt.call("cudaEventElapsedTime", ctypes.byref(elapsed), before, after)
    assert elapsed.value == pytest.approx(300, abs=0.1)


# names, devices, errors


def test_kernel_lengths_by_name() -> None:
    text = """
stream = rt.stream()
for address, name in ((0x1000, b"void gemm<float>"), (0x2000, b"reduce_all"), (0x3000, b"other")):
    rt.library.stallscope_sim_name_function(ctypes.c_void_p(address), name)
    first, second = rt.event(), rt.event()
    rt.launch(stream, 20_000_000)
    rt.call("cudaEventRecord", first, stream)
    rt.launch(stream, 0, address)
    rt.call("cudaEventRecord", second, stream)
    rt.call("cudaEventSynchronize", second)
    elapsed = ctypes.c_float()
    rt.call("cudaEventElapsedTime", ctypes.byref(elapsed), first, second)
    print(round(elapsed.value, 3), end=" ")
"""
    assert (
        script(text, STALLSCOPE_SIM_KERNELS="gemm=3000000,reduce_*=2000000", STALLSCOPE_SIM_KERNEL_NS="1000000")
        == "3.0 2.0 1.0"
    )


@pytest.mark.parametrize("version", ["12", "13"])
def test_device_says_that_it_is_simulated(version: str) -> None:
    text = f"""
rt = Runtime("{SIM}/libcudart.so.{version}")
count, properties, version = ctypes.c_int(), ctypes.create_string_buffer(1100), ctypes.c_int()
rt.call("cudaGetDeviceCount", ctypes.byref(count))
rt.call("cudaGetDeviceProperties", properties, 0)
rt.call("cudaRuntimeGetVersion", ctypes.byref(version))
print(count.value, version.value // 1000, properties.value.decode())
"""
    assert script(text, STALLSCOPE_SIM_DEVICES="5") == f"5 {version} stallscope simulated GPU"


def test_errors_are_told_and_stick(rt: Runtime) -> None:
    one = Dim3(1, 1, 1)
    launch = rt.library.cudaLaunchKernel
    assert launch(None, one, one, None, ctypes.c_size_t(0), None) == 98
    assert launch(ctypes.c_void_p(0x1000), Dim3(0, 1, 1), one, None, ctypes.c_size_t(0), None) == 1
    assert rt.library.cudaPeekAtLastError() == rt.library.cudaGetLastError() == 1
    assert rt.library.cudaGetLastError() == 0
    assert rt.library.cudaSetDevice(99) == 101
    assert rt.library.cudaGraphAddNode() == 801
    rt.library.cudaGetErrorName.restype = ctypes.c_char_p
    assert rt.library.cudaGetErrorName(35) == b"cudaErrorInsufficientDriver"
    rt.library.cudaGetLastError()


def test_without_a_driver_every_call_says_so(tmp_path: Path) -> None:
    shutil.copy(SIM / "libcudart.so.12", tmp_path)
    text = f"""
rt = Runtime("{tmp_path}/libcudart.so.12")
print(rt.library.cudaFree(None), rt.library.cudaDeviceSynchronize())
"""
    assert script(text) == "35 35"


def test_driver_needs_initialisation_and_context() -> None:
    text = f"""
cu = ctypes.CDLL("{SIM}/libcuda.so.1")
stream, context = ctypes.c_void_p(), ctypes.c_void_p()
create = lambda: cu.cuStreamCreate(ctypes.byref(stream), 0)
print(create(), cu.cuInit(0), create())
print(cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), cu.cuCtxSetCurrent(context), create())
"""
    assert script(text) == "3 0 201\n0 0 0"


def test_entry_points_are_the_exported_ones(rt: Runtime) -> None:
    rt.call("cudaFree", None)
    driver = ctypes.CDLL(str(SIM / "libcuda.so.1"))
    address, status = ctypes.c_void_p(), ctypes.c_int()
    asked = {
        b"cuLaunchKernel": "cuLaunchKernel",
        b"cuMemAlloc": "cuMemAlloc_v2",
        b"cuStreamBeginCapture": "cuStreamBeginCapture_v2",
    }
    for symbol, exported in asked.items():
        rt.call("cudaGetDriverEntryPoint", symbol, ctypes.byref(address), ctypes.c_ulonglong(0), ctypes.byref(status))
        assert address.value == ctypes.cast(getattr(driver, exported), ctypes.c_void_p).value
    rt.call("cudaGetDriverEntryPoint", b"cuNothing", ctypes.byref(address), ctypes.c_ulonglong(0), ctypes.byref(status))
    assert (address.value, status.value) == (None, 1)


# the libraries as files


def hook_names(library: str) -> set[str]:
    names = set()
    for twin, name in re.findall(
        rf"^HOOK(_PTSZ|_PTDS)?\(\d+, {library}, (\w+),", (ROOT / "probes/hooks.def").read_text(), re.M
    ):
        names |= {name, name + twin.lower()}
    return names


def exports(library: str) -> dict[str, str]:
    out = subprocess.run(
        ["nm", "-D", "--defined-only", str(SIM / library)], check=True, capture_output=True, text=True
    ).stdout
    symbols = [line.split()[-1].split("@@") for line in out.splitlines() if " T " in line]
    return {symbol[0]: symbol[-1] for symbol in symbols}


@pytest.mark.parametrize(
    "library, hooks", [("libcudart.so.12", "CUDART"), ("libcudart.so.13", "CUDART"), ("libcuda.so.1", "CUDA")]
)
def test_every_hooked_function_is_exported(library: str, hooks: str) -> None:
    gone = {"cudaThreadSynchronize"} if library.endswith("13") else set()
    assert hook_names(hooks) - set(exports(library)) == gone


@pytest.mark.parametrize("library", ["libcudart.so.12", "libcudart.so.13"])
def test_symbols_carry_the_soname_as_version(library: str) -> None:
    assert set(exports(library).values()) == {library}
    dynamic = subprocess.run(["readelf", "-d", str(SIM / library)], check=True, capture_output=True, text=True).stdout
    assert f"soname: [{library}]" in dynamic


def test_no_two_functions_share_an_address() -> None:
    for library in ("libcudart.so.12", "libcuda.so.1"):
        out = subprocess.run(
            ["nm", "-D", "--defined-only", str(SIM / library)], check=True, capture_output=True, text=True
        ).stdout
        addresses = [line.split()[0] for line in out.splitlines() if " T " in line]
        assert len(addresses) == len(set(addresses))


# ways to the driver


@pytest.fixture(scope="session")
def nesting(_built: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("nesting") / "nesting"
    include = [f"-I{ROOT}/native/sim/include", f"-I{ROOT}/probes"]
    source = str(Path(__file__).parent / "nesting.c")
    flags = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *flags, *include, "-o", str(program), source, "-ldl"], check=True)
    # Libraries of its own: a tracer that tests run beside this one may hold breakpoints on the shared files in all
    # processes, and the program then finds a breakpoint where it wants to set one.
    shutil.copytree(SIM, program.with_name("lib"), symlinks=True)
    return program


def run_nesting(program: Path, way: str, library: str = "libcudart.so.12") -> dict[str, object]:
    environment = {**os.environ, "STALLSCOPE_SIM_DRIVER": way}
    done = subprocess.run(
        [str(program), str(program.with_name("lib") / library)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def documented() -> dict[str, str | None]:
    """Runtime function -> hooked driver function, from the table in README.md."""
    rows = re.findall(r"^\| (_*cuda\w+)[^|]*\| (\w+)[^|]*\|$", (ROOT / "native/sim/README.md").read_text(), re.M)
    return {runtime: None if driver == "none" else driver for runtime, driver in rows}


def expected_hits(call: str, way: str) -> dict[str, int]:
    twin = next((suffix for suffix in ("_ptsz", "_ptds") if call.endswith(suffix)), "")
    base = call.removesuffix(twin)
    runtime = base.lstrip("_") + twin
    hits = {runtime: 1} if base.lstrip("_") in hook_names("CUDART") else {}
    driver = documented().get(base)
    if driver and way == "exported":
        hits[driver + twin] = 1
    return hits


@pytest.mark.parametrize("library", ["libcudart.so.12", "libcudart.so.13"])
@pytest.mark.parametrize("way", ["exported", "private", "inside"])
def test_one_runtime_call_is_at_most_one_driver_call(nesting: Path, way: str, library: str) -> None:
    result = run_nesting(nesting, way, library)
    assert result["libcuda"] is (way != "inside")
    calls = result["calls"]
    assert isinstance(calls, dict)
    assert calls == {call: expected_hits(call, way) for call in calls}
    gone = {"cudaThreadSynchronize"} if library.endswith("13") else set()
    assert set(documented()) - set(calls) == gone


# the static runtime, fork, and the programs for other tests


def target(name: str, *args: object, feed: str = "go\n", **env: str) -> dict[str, object]:
    command = [sys.executable, str(ROOT / "tests/targets" / name)] if name.endswith(".py") else [str(TARGETS / name)]
    done = subprocess.run(
        [*command, *map(str, args)], input=feed, env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_static_runtime_is_in_the_program() -> None:
    symbols = subprocess.run(["nm", str(TARGETS / "inwait_static")], check=True, capture_output=True, text=True).stdout
    assert re.search(r" T cudaLaunchKernel$", symbols, re.M)
    libraries = subprocess.run(
        ["ldd", str(TARGETS / "inwait_static")], check=True, capture_output=True, text=True
    ).stdout
    assert "libcudart" not in libraries
    for way in ("exported", "private", "inside"):
        result = target("inwait_static", 3, 200, 5, STALLSCOPE_SIM_DRIVER=way)
        assert result["calls"]["cudaLaunchKernel"] == 15


@pytest.mark.parametrize("name", ["inwait", "inwait.py"])
def test_inwait(name: str) -> None:
    threads = [3] if name == "inwait" else []
    result = target(name, *threads, 300, 5)
    wait = result["before_long_waits"]["cudaStreamSynchronize"]
    assert wait["count"] == 1 and wait["total_ns"] >= 250 * MS
    assert result["long_waits"]["cudaStreamSynchronize"]["count"] == 5


def test_million_counts() -> None:
    result = target("million", 8000, 8, 1000)
    calls = result["calls"]
    assert (
        calls["__cudaLaunchKernel"]
        == calls["cudaLaunchKernelExC"]
        == calls["cuLaunchKernel"]
        == calls["cudaMemcpyAsync"]
        == 4000
    )
    assert calls["cudaLaunchKernel"] == 8000 + 4 * 6
    assert calls["cudaLaunchKernel_ptsz"] == 4000 + 4 * 2
    waits = result["long_waits"]
    assert waits["cudaEventSynchronize"]["count"] == waits["cuStreamSynchronize"]["count"] == 8


def test_forked_children_start_anew() -> None:
    result = target("forker", 3, 50, 100)
    assert result["calls"] == {"cudaLaunchKernel": 101, "cudaStreamSynchronize": 1}
    children = result["children"]
    assert sorted(child["exec"] for child in children) == [False, False, True]
    assert all(child["calls"] == {"cudaLaunchKernel": 51, "cudaStreamSynchronize": 1} for child in children)


def test_lateload_keeps_its_rate() -> None:
    result = target("lateload", SIM / "libcudart.so.12", 100, 1000, 10)
    assert result["calls"] == {"cudaLaunchKernel": 100, "cudaStreamSynchronize": 10}
    assert result["last_ns"] - result["first_ns"] >= 99 * MS


def test_calls_py() -> None:
    calls = target("calls.py", 5)["calls"]
    assert (calls["cudaMemcpyAsync"], calls["cudaLaunchKernel"], calls["cudaMemcpy"]) == (10, 10, 5)


def test_job_writes_the_truth(tmp_path: Path) -> None:
    truth_file = tmp_path / "truth.json"
    command = [
        sys.executable,
        "-m",
        "stallscope.sim.job",
        "--ranks=2",
        "--duration=2",
        "--checkpoint-every=0.5",
        "--slow-rank=1",
        f"--truth={truth_file}",
    ]
    subprocess.run(
        command,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "agent"), "STALLSCOPE_SIM_LIB": str(SIM)},
        timeout=60,
    )
    ranks = json.loads(truth_file.read_text())["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert ranks[1]["slow"] and ranks[1]["steps"] == ranks[0]["steps"] > 0
    assert ranks[0]["checkpoints"] > 0 == ranks[1]["checkpoints"]
    for rank in ranks:
        assert rank["calls"]["cudaLaunchKernel"] == 24 * rank["steps"]
        assert rank["calls"]["cudaStreamSynchronize"] == 2 * rank["steps"]  # the flag and the loss
        assert rank["calls"].get("cudaDeviceSynchronize", 0) == rank["checkpoints"]


# price


PRICE = r"""
#include <stdio.h>
#include <time.h>
#include "sim_cudart.h"
int main(void) {
  struct timespec a, b; cudaStream_t s; dim3 one = {1, 1, 1};
  cudaStreamCreateWithFlags(&s, 1);
  clock_gettime(CLOCK_MONOTONIC, &a);
  for (int i = 0; i < 1000000; i++) cudaLaunchKernel((void *)main, one, one, NULL, 0, s);
  clock_gettime(CLOCK_MONOTONIC, &b);
  printf("%.1f\n", ((b.tv_sec - a.tv_sec) * 1e9 + b.tv_nsec - a.tv_nsec) / 1e6);
}
"""


def test_launch_cost_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "price.c"
    source.write_text(PRICE)
    link = [f"-L{SIM}", "-lcudart", f"-Wl,-rpath,{SIM}"]
    subprocess.run(
        ["gcc", "-O2", f"-I{ROOT}/native/sim/include", "-o", str(tmp_path / "price"), str(source), *link], check=True
    )
    cost = subprocess.run([str(tmp_path / "price")], check=True, capture_output=True, text=True).stdout.strip()
    with capsys.disabled():
        print(f"[one simulated launch: {cost} ns] ", end="")
    assert float(cost) > 0


@pytest.mark.parametrize("sanitizer", ["", "address,undefined", "thread"])
def test_stress_of_all_that_shares_state(_built: None, tmp_path: Path, sanitizer: str) -> None:
    libraries = SIM
    flags = [
        "-std=c11",
        "-D_GNU_SOURCE",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pthread",
        "-g",
        "-O1",
        f"-I{ROOT}/native/sim/include",
    ]
    if sanitizer:
        make = [
            "make",
            "-s",
            "-j2",
            "-C",
            str(ROOT / "native/sim"),
            f"OUT={tmp_path}",
            f"SAN={sanitizer}",
            f"{tmp_path}/lib/libcudart.so",
        ]
        subprocess.run([*make, f"{tmp_path}/lib/libcuda.so.1"], check=True, capture_output=True)
        libraries = tmp_path / "lib"
        flags.append(f"-fsanitize={sanitizer}")
    link = [f"-L{libraries}", "-lcudart", f"-Wl,-rpath,{libraries}"]
    source = str(Path(__file__).parent / "stress.c")
    subprocess.run(["gcc", *flags, "-o", str(tmp_path / "stress"), source, *link], check=True)
    no_fork = {"STRESS_NO_FORK": "1"} if sanitizer == "thread" else {}
    done = subprocess.run(
        [str(tmp_path / "stress"), "100"], env={**os.environ, **no_fork}, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")

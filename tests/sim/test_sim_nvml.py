"""The simulated NVML: what the simulated devices do, seen from another process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIM = ROOT / "build/sim/lib"
NOT_SUPPORTED, INSUFFICIENT_SIZE, MISSING, UNKNOWN = 3, 7, 12, 999
IDLE_MW, FULL_MW = 65_000, 400_000


class Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Nvml:
    """The library, initialised; `device` 0 unless said otherwise."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(SIM / "libnvidia-ml.so.1"))
        assert self.library.nvmlInit_v2() == 0

    def device(self, index: int = 0) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        assert self.library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0
        return handle

    def number(self, name: str, *args: object, index: int = 0, kind: type = ctypes.c_uint) -> int:
        out = kind()
        assert getattr(self.library, name)(self.device(index), *args, ctypes.byref(out)) == 0
        return int(out.value)

    def text(self, name: str, index: int = 0) -> str:
        out = ctypes.create_string_buffer(96)
        assert getattr(self.library, name)(self.device(index), out, 96) == 0
        return out.value.decode()

    def busy(self, index: int = 0) -> int:
        rates = Utilization()
        assert self.library.nvmlDeviceGetUtilizationRates(self.device(index), ctypes.byref(rates)) == 0
        return int(rates.gpu)

    def power_mw(self, index: int = 0) -> int:
        return self.number("nvmlDeviceGetPowerUsage", index=index)

    def reasons(self, index: int = 0) -> int:
        return self.number("nvmlDeviceGetCurrentClocksThrottleReasons", index=index, kind=ctypes.c_ulonglong)

    def used(self, index: int = 0) -> int:
        memory = Memory()
        assert self.library.nvmlDeviceGetMemoryInfo(self.device(index), ctypes.byref(memory)) == 0
        assert memory.used + memory.free == memory.total
        return int(memory.used)

    def processes(self, index: int = 0) -> dict[int, int]:
        count, infos = ctypes.c_uint(64), (Process * 64)()
        ask = self.library.nvmlDeviceGetComputeRunningProcesses_v3
        assert ask(self.device(index), ctypes.byref(count), infos) == 0
        return {info.pid: info.used for info in infos[: count.value]}


@pytest.fixture(scope="module")
def nvml() -> Iterator[Nvml]:
    subprocess.run(["make", "-s", "-C", str(ROOT / "native/sim")], check=True)
    os.environ["STALLSCOPE_SIM_MACHINE"] = f"test {os.getpid()}"  # nobody else's processes
    yield Nvml()
    del os.environ["STALLSCOPE_SIM_MACHINE"]


@contextlib.contextmanager
def program(text: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A process with a runtime `rt` that has said "ready"; it ends when its stdin does."""
    head = "import ctypes, sys, time\nfrom cuda_calls import *\nrt = Runtime()\n"
    tail = "\nprint('ready', flush=True)\nsys.stdin.read()\nimport os; os._exit(0)\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests/targets"), "STALLSCOPE_SIM_LIB": str(SIM), **env}
    command = [sys.executable, "-c", head + text + tail]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def settled(nvml: Nvml, seconds: float = 0.6, index: int = 0) -> tuple[int, int]:
    """(utilisation, power) over the last moments."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        nvml.busy(index)
        time.sleep(0.02)
    return nvml.busy(index), nvml.power_mw(index)


# devices


def test_who_the_devices_are(nvml: Nvml) -> None:
    count = ctypes.c_uint()
    assert nvml.library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    assert count.value == 2
    assert nvml.text("nvmlDeviceGetName") == "stallscope simulated GPU"
    assert nvml.text("nvmlDeviceGetUUID", 1) == "GPU-7374616c-6c73-636f-7065-2d73696d2d01"
    for how, word in (("UUID", b"GPU-7374616c-6c73-636f-7065-2d73696d2d01"), ("PciBusId_v2", b"00000000:02:00.0")):
        handle = ctypes.c_void_p()
        assert getattr(nvml.library, f"nvmlDeviceGetHandleBy{how}")(word, ctypes.byref(handle)) == 0
        assert handle.value == nvml.device(1).value
    assert nvml.library.nvmlDeviceGetHandleByIndex_v2(2, ctypes.byref(ctypes.c_void_p())) == 2


def test_what_is_not_there_says_so(nvml: Nvml) -> None:
    before = nvml.library.stallscope_sim_stub_calls(b"nvmlDeviceGetFanSpeed")
    assert nvml.library.nvmlDeviceGetFanSpeed(nvml.device(), ctypes.byref(ctypes.c_uint())) == NOT_SUPPORTED
    assert nvml.library.stallscope_sim_stub_calls(b"nvmlDeviceGetFanSpeed") == before + 1


# what goes on


def test_an_idle_device(nvml: Nvml) -> None:
    with program("rt.call('cudaFree', None)"):
        assert settled(nvml, index=1) == (0, IDLE_MW)
        assert nvml.number("nvmlDeviceGetClockInfo", 1, index=1) == 210
        assert nvml.reasons(index=1) == 1


def test_a_device_at_work_and_its_memory(nvml: Nvml) -> None:
    with program("rt.memory('cudaMalloc', 50 << 20); rt.launch(rt.stream(), 60_000_000_000)") as process:
        busy, power = settled(nvml)
        assert busy == 100
        assert power > 0.8 * FULL_MW
        assert nvml.number("nvmlDeviceGetClockInfo", 1) == 1410
        assert nvml.reasons() == 0
        assert nvml.used() >= 50 << 20
        assert nvml.processes()[process.pid] == 50 << 20
        assert process.pid not in nvml.processes(1)
        process.kill()
        process.wait()
        time.sleep(0.15)
        assert process.pid not in nvml.processes()


def test_half_busy(nvml: Nvml) -> None:
    text = """
stream = rt.stream()
import threading
def work():
    while True:
        rt.launch(stream, 100_000_000)
        time.sleep(0.2)
threading.Thread(target=work, daemon=True).start()
"""
    with program(text):
        busy, power = settled(nvml, 1.0)
    assert 30 <= busy <= 60
    assert IDLE_MW + 0.2 * (FULL_MW - IDLE_MW) < power < IDLE_MW + 0.65 * (FULL_MW - IDLE_MW)


def test_a_kernel_that_never_ends(nvml: Nvml) -> None:
    with program("rt.launch(rt.stream(), (1 << 64) - 1)"):
        assert settled(nvml)[0] == 100


def test_a_kernel_that_waits_is_busy_and_draws_no_power(nvml: Nvml) -> None:
    with program("hold = ctypes.c_void_p(); rt.call('stallscope_sim_hold', rt.stream(), ctypes.byref(hold))"):
        assert settled(nvml) == (100, IDLE_MW)
        assert nvml.number("nvmlDeviceGetClockInfo", 1) == 1410


def test_a_wait_that_is_over_counts_no_more(nvml: Nvml) -> None:
    text = """
hold = ctypes.c_void_p()
rt.call("stallscope_sim_hold", rt.stream(), ctypes.byref(hold))
time.sleep(0.05)
rt.call("stallscope_sim_release", hold)
"""
    with program(text):
        assert settled(nvml) == (0, IDLE_MW)


def test_visible_devices_are_the_machines_own(nvml: Nvml) -> None:
    with program("rt.memory('cudaMalloc', 7 << 20)", CUDA_VISIBLE_DEVICES="1") as process:
        time.sleep(0.15)
        assert nvml.processes(1)[process.pid] == 7 << 20
        assert process.pid not in nvml.processes(0)


def test_a_forked_child_is_counted_once(nvml: Nvml) -> None:
    with program("rt.memory('cudaMalloc', 3 << 20)\nimport os\nchild = os.fork() or time.sleep(2) or os._exit(0)"):
        time.sleep(0.15)
        assert sorted(nvml.processes().values()) == [3 << 20]


def test_too_small_an_array_gives_the_number(nvml: Nvml) -> None:
    with program("rt.memory('cudaMalloc', 1 << 20)"):
        time.sleep(0.15)
        count = ctypes.c_uint(0)
        ask = nvml.library.nvmlDeviceGetComputeRunningProcesses_v3
        assert ask(nvml.device(), ctypes.byref(count), None) == INSUFFICIENT_SIZE
        assert count.value == 1


# what it can be told to be

ASK = f"""
import ctypes, time
nvml = ctypes.CDLL("{SIM}/libnvidia-ml.so.1")
start = time.monotonic()
print(nvml.nvmlInit_v2(), flush=True)
print(nvml.nvmlDeviceGetCount_v2(ctypes.byref(ctypes.c_uint())), time.monotonic() - start > 0.5, flush=True)
"""


@pytest.mark.parametrize("word, error", [("missing", MISSING), ("fail", UNKNOWN)])
def test_told_to_be_missing_or_to_fail(nvml: Nvml, word: str, error: int) -> None:
    environment = {**os.environ, "STALLSCOPE_SIM_NVML": word}
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(error), str(error), "False"]


def test_told_to_hang_until_a_file_says_otherwise(nvml: Nvml, tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.write_text("nccl.slow ns=1\nnvml.hang\n")
    environment = {**os.environ, "STALLSCOPE_SIM_FAULTS": str(control)}
    with subprocess.Popen([sys.executable, "-c", ASK], env=environment, stdout=subprocess.PIPE, text=True) as process:
        time.sleep(1)
        assert process.poll() is None
        control.write_text("")
        assert process.communicate(timeout=60)[0].split() == ["0", "0", "True"]


def test_throttle_reasons_on_demand(nvml: Nvml, tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.write_text("nvml.throttle mask=0x20 device=0\nnvml.throttle mask=0x40 device=1\n")
    text = """
import ctypes, sys
nvml = ctypes.CDLL(sys.argv[1])
nvml.nvmlInit_v2()
device, reasons, mhz = ctypes.c_void_p(), ctypes.c_ulonglong(), ctypes.c_uint()
nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device, ctypes.byref(reasons))
nvml.nvmlDeviceGetClockInfo(device, 1, ctypes.byref(mhz))
print(reasons.value & ~1, mhz.value)
"""
    done = subprocess.run(
        [sys.executable, "-c", text, str(SIM / "libnvidia-ml.so.1")],
        env={**os.environ, "STALLSCOPE_SIM_FAULTS": str(control)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["32", "705"]

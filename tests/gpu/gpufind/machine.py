"""What the machine is, and whether BPF can be used on it."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from gpufind.channel import Channel, Unavailable
from gpufind.counters import PERF_EVENT_OPEN
from gpufind.hooks import ROOT
from gpufind.raw import open_driver

_BPF_CALL = {"x86_64": 321, "aarch64": 280}
_OBJECT = ROOT / "build" / "probes" / "stallscope.bpf.o"


def _line(path: str, start: str = "") -> str:
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except OSError as error:
        return f"not readable ({error.strerror})"
    return next((line.strip() for line in lines if line.startswith(start)), "")


def facts() -> dict[str, str]:
    """What can be read without CUDA."""
    return {
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _line("/proc/cpuinfo", "model name").partition(":")[2].strip() or platform.machine(),
        "CPUs": str(os.cpu_count()),
        "python": f"{platform.python_version()} at {sys.executable}",
        "user": f"uid {os.geteuid()}, {_line('/proc/self/status', 'CapEff')}, {_line('/proc/self/status', 'Seccomp')}",
        "perf_event_paranoid": _line("/proc/sys/kernel/perf_event_paranoid"),
        "uprobe PMU": _line("/sys/bus/event_source/devices/uprobe/type"),
        "driver module": _line("/proc/driver/nvidia/version"),
    }


def gpu(channel: Channel) -> None:
    """The devices; Unavailable where there is none."""
    cuda, version, count = open_driver(channel.options), ctypes.c_int(), ctypes.c_int()
    cuda.call("cuDriverGetVersion", ctypes.byref(version))
    cuda.call("cuDeviceGetCount", ctypes.byref(count))
    if not count.value:
        raise Unavailable("libcuda finds no device")
    name = ctypes.create_string_buffer(256)
    names = [cuda.call("cuDeviceGetName", name, 256, index) or name.value.decode() for index in range(count.value)]
    channel.fact("GPU", ", ".join(map(str, names)))
    channel.fact("CUDA driver API", f"{version.value // 1000}.{version.value % 1000 // 10}")


def _bpf(command: int, attr: bytes | bytearray) -> int:
    room = (ctypes.c_char * len(attr)).from_buffer_copy(attr)
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(_BPF_CALL[platform.machine()], command, room, len(attr)))
    if isinstance(attr, bytearray):
        attr[:] = room.raw
    if result < 0:
        raise OSError(ctypes.get_errno(), f"bpf({command}): {os.strerror(ctypes.get_errno())}")
    return result


def _perf_event_open(attr: bytes, pid: int, cpu: int, group: int = -1, flags: int = 8) -> int:
    room = ctypes.create_string_buffer(bytes(attr), len(attr))
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(PERF_EVENT_OPEN[platform.machine()], room, pid, cpu, group, flags))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _package_without_cffi() -> None:
    """Let the package's modules run where its C extension is not built: the system calls by ctypes."""
    sys.path.insert(0, str(ROOT / "agent"))
    stand_in = ModuleType("stallscope.capture.kernel")
    vars(stand_in).update(bpf=_bpf, perf_event_open=_perf_event_open, BTF_PATH="/sys/kernel/btf/vmlinux")
    sys.modules[stand_in.__name__] = stand_in


def bpf(channel: Channel) -> None:
    """The package's own preflight, then a try to load the prebuilt object. What fails is a line, not the end."""
    _package_without_cffi()
    for name, ask in (
        ("preflight", _preflight),
        ("uprobe_multi", _multi),
        ("ring buffer", _ring),
        ("object", _load_object),
    ):
        try:
            channel.fact(name, ask())
        except Exception as error:
            channel.fact(name, f"could not be asked: {type(error).__name__}: {error}")


def _preflight() -> list[list[str]]:
    from stallscope.capture.preflight import preflight

    return [[check.name, check.state, check.detail] for check in preflight(_OBJECT)]


def _multi() -> str:
    from stallscope.capture.rights import has_uprobe_multi

    return {True: "works", False: "this kernel has none", None: "unknown: BPF is refused"}[has_uprobe_multi()]


def _ring() -> str:
    from stallscope.capture.object_loader import MapSpec, create_map

    try:
        os.close(create_map("gpufind", MapSpec(27, 0, 0, 4096, 0)))
    except OSError as error:
        return f"refused: {error}"
    return "works"


def _load_object() -> str:
    from stallscope.capture.object_loader import load_object
    from stallscope.errors import StallscopeError

    if not _OBJECT.is_file():
        return f"{_OBJECT.relative_to(ROOT)} was not brought along"
    sizes: dict[str, Any] = {"bulk": 1 << 20, "vital": 1 << 20}
    try:
        programs, maps, _ = load_object(_OBJECT, sizes)
    except (OSError, StallscopeError) as error:
        return f"does not load: {error}"
    return f"loads: {len(programs)} programs, {len(maps)} maps"

"""One look at all devices through NVML (module `pynvml`, package nvidia-ml-py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pynvml

__all__ = ["MAX_DEVICES", "MAX_PIDS", "Look", "Nvml", "error_name"]

MAX_DEVICES = 64
MAX_PIDS = 64
_NAMES: dict[int, str] = {
    value: name for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_") and isinstance(value, int)
}
_SILENT = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

Row = list[Any]


class Look(NamedTuple):
    """What NVML said.

    `devices`: rows of a GPU frame (wire/frames.py); `note`: what could not be learnt, and why, else None.
    """

    devices: list[Row]
    note: str | None


def error_name(error: pynvml.NVMLError) -> str:
    """As nvml.h calls it; the library itself is not asked for a text."""
    return _NAMES.get(error.value, f"NVML error {error.value}")


class Nvml:
    """Finds `libnvidia-ml.so.1` at the first look; a library of that name that is loaded already is the one it finds.

    A failure of the whole library is tried again at the next look.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._ready = False

    def look(self) -> Look:
        """All devices, in about a millisecond each. May hang for as long as the driver likes."""
        try:
            self._open()
        except pynvml.NVMLError as error:
            self._ready = False
            if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
                return Look([], "NVML is not installed (libnvidia-ml.so.1 not found)")
            return Look([], f"NVML fails: {error_name(error)}")
        problems: list[str] = []
        rows = [_row(index, handle, problems) for index, handle in enumerate(self._handles)]
        if problems and all(value is None for row in rows for value in row[1:9]):
            self._ready = False  # the driver may have been reloaded: begin anew
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return Look(rows, f"NVML: {problems[0]}{more}" if problems else None)

    def _open(self) -> None:
        if self._ready:
            return
        pynvml.nvmlInit()
        count = min(pynvml.nvmlDeviceGetCount(), MAX_DEVICES)
        self._handles = [_handle(index) for index in range(count)]
        self._ready = True


def _handle(index: int) -> Any:
    """A device's handle; None for one that has fallen off the bus."""
    try:
        return pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError:
        return None


class _Device:
    """Asks one device; `failed` holds why a question has no answer, where it should have one."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.failed: list[str] = []

    def ask(self, *questions: Callable[[Any], Any]) -> Any:
        """The first answer; None when there is none."""
        problem = None
        for question in questions:
            try:
                return question(self._handle)
            except pynvml.NVMLError as error:
                problem = error
        if problem is not None and problem.value not in _SILENT:
            self.failed.append(error_name(problem))
        return None


def _row(index: int, handle: Any, problems: list[str]) -> Row:
    if handle is None:
        problems.append(f"GPU {index} has no handle")
        return [index, *[None] * 8, []]
    device = _Device(handle)
    row = [
        index,
        device.ask(lambda h: str(pynvml.nvmlDeviceGetUUID(h))),
        device.ask(lambda h: int(pynvml.nvmlDeviceGetUtilizationRates(h).gpu)),
        device.ask(pynvml.nvmlDeviceGetPowerUsage),
        device.ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, pynvml.nvmlDeviceGetPowerManagementLimit),
        device.ask(lambda h: int(pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM))),
        device.ask(lambda h: int(pynvml.nvmlDeviceGetMaxClockInfo(h, pynvml.NVML_CLOCK_SM))),
        device.ask(lambda h: int(pynvml.nvmlDeviceGetMemoryInfo(h).used)),
        device.ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, pynvml.nvmlDeviceGetCurrentClocksEventReasons),
        device.ask(_pids, _pids_before_515) or [],
    ]
    if device.failed:
        problems.append(f"GPU {index}: {device.failed[0]}")
    return row


def _pids(handle: Any) -> list[int]:
    return _numbers(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))


def _pids_before_515(handle: Any) -> list[int]:
    """Drivers before 515 have not the newest of the function's names."""
    return _numbers(pynvml.nvmlDeviceGetComputeRunningProcesses_v2(handle))


def _numbers(processes: list[Any]) -> list[int]:
    return sorted({int(process.pid) for process in processes})[:MAX_PIDS]

"""Counting uprobes through perf_event_open: exact hit counts without BPF and without a compiler.

One counter a place, for one CPU and all processes; the traced process is pinned to that CPU. Not `inherit=1` on the
process: each new thread would get its own copy of each probe, for which the kernel reads the path again from the memory
of the traced process (where it is not: thread creation fails), and each copy costs 0.1 s to take away.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import struct
from collections import Counter
from pathlib import Path
from typing import NamedTuple

_PMU_TYPE = Path("/sys/bus/event_source/devices/uprobe/type")
PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_ATTR_BYTES = 112
_CLOEXEC = 8
_SAMPLE_REFUSALS = 3

Hits = dict[str, int]


class Place(NamedTuple):
    """A probed place; `label` is e.g. "CUDA:cuLaunchKernel"."""

    label: str
    path: str
    offset: int


def open_counter(path: str, offset: int, cpu: int) -> int:
    """Descriptor of a counter of executions of the instruction at a file offset, on one CPU. Raises OSError."""
    try:
        kind = int(_PMU_TYPE.read_text())
    except OSError as error:
        raise OSError(error.errno, f"no uprobe PMU ({_PMU_TYPE}): the kernel lacks CONFIG_UPROBE_EVENTS") from error
    name = ctypes.create_string_buffer(os.fsencode(path))
    members = struct.pack("<IIQQQQQIIQQ", kind, _ATTR_BYTES, 0, 0, 0, 0, 0, 0, 0, ctypes.addressof(name), offset)
    attr = ctypes.create_string_buffer(members, _ATTR_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.syscall(PERF_EVENT_OPEN[platform.machine()], attr, -1, cpu, -1, _CLOEXEC))
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{errno.errorcode.get(number, number)} ({os.strerror(number)})")
    return fd


class Counters:
    """Counters at many places; equal places (aliases of a name) share one.

    Attributes:
        refused: why none could be opened; "" while that is not so.
        errors: refusals of single places, by label.
    """

    def __init__(self, cpu: int) -> None:
        self.cpu = cpu
        self.refused = ""
        self.errors: dict[str, str] = {}
        self._fds: dict[tuple[int, int, int], int] = {}
        self._labels: dict[tuple[int, int, int], list[str]] = {}

    def __len__(self) -> int:
        return len(self._fds)

    def add(self, place: Place) -> None:
        """Count executions of the place from now on; a refusal is noted, not raised."""
        if self.refused:
            return
        try:
            info = Path(place.path).stat()
            key = (info.st_dev, info.st_ino, place.offset)
            if key not in self._fds:
                self._fds[key] = open_counter(place.path, place.offset, self.cpu)
        except OSError as error:
            self._note(place, error)
            return
        labels = self._labels.setdefault(key, [])
        labels += [] if place.label in labels else [place.label]

    def _note(self, place: Place, error: OSError) -> None:
        self.errors[place.label] = error.strerror or str(error)
        if not self._fds and len(self.errors) >= _SAMPLE_REFUSALS:
            self.refused = self.errors[place.label]

    def read(self) -> Hits:
        """Hits so far by label; what several files of one library hit is added up."""
        hits: Counter[str] = Counter()
        for key, fd in self._fds.items():
            (count,) = struct.unpack("<Q", os.read(fd, 8))
            for label in self._labels[key]:
                hits[label] += count
        return dict(hits)

    def close(self) -> None:
        """Take the probes away: 0.1 s each. A second call does nothing."""
        while self._fds:
            with contextlib.suppress(OSError):
                os.close(self._fds.popitem()[1])


def difference(before: Hits, after: Hits) -> Hits:
    """Hits between two readings, without the zeros."""
    found = {label: count - before.get(label, 0) for label, count in after.items()}
    return {label: count for label, count in found.items() if count}

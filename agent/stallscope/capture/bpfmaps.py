"""The one BPF map that user space writes by system call: which processes are traced, and in which slot."""

from __future__ import annotations

import ctypes
import struct

from stallscope.capture.kernel import bpf

__all__ = ["PROC_FOLLOW", "ProcsMap"]

PROC_FOLLOW = 0x10000
_UPDATE, _DELETE = 2, 3


class ProcsMap:
    """tgid -> slot; a process not in it is not looked at."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def _call(self, command: int, tgid: int, value: int) -> None:
        key = ctypes.create_string_buffer(struct.pack("<I", tgid))
        data = ctypes.create_string_buffer(struct.pack("<I", value))
        attr = struct.pack("<IxxxxQQQ", self._fd, ctypes.addressof(key), ctypes.addressof(data), 0)
        bpf(command, attr)

    def add(self, tgid: int, slot: int, *, follow: bool) -> None:
        """Trace this process from now on; with `follow` also the children it forks. Raises OSError."""
        self._call(_UPDATE, tgid, slot | (PROC_FOLLOW if follow else 0))

    def remove(self, tgid: int) -> None:
        """Stop tracing it. Raises OSError when it is not there."""
        self._call(_DELETE, tgid, 0)

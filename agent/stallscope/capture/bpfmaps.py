"""Two BPF maps without a view in C: which processes are traced, and in which slot; and the communicators."""

from __future__ import annotations

import ctypes
import mmap
import struct

from stallscope.capture._drain import lib
from stallscope.capture.kernel import bpf

__all__ = ["PROC_FOLLOW", "Comms", "ProcsMap"]

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


class Comms:
    """The table of communicators (native/wire.h, wire_comm): programs take rows, a daemon gives them back."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, 16 << lib.WIRE_COMM_BITS, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._words = memoryview(self._map).cast("Q")

    def keys(self) -> list[int]:
        """The key of every row, 0 where it is free. About a millisecond."""
        return self._words[::2].tolist()

    def next(self, row: int) -> int:
        """How many operations were numbered there."""
        return self._words[2 * row + 1]

    def free(self, row: int) -> None:
        """Of a process that has ended: nobody writes it any more."""
        self._words[2 * row + 1] = 0
        self._words[2 * row] = 0  # last: then it is another's

    def close(self) -> None:
        """Unmap."""
        self._words.release()
        self._map.close()

"""The stack of a blocked thread, read without stopping it."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path

__all__ = ["MAX_STACK", "is_refused", "read_blocked", "read_memory", "read_up"]

MAX_STACK = 64 << 10
MAX_RANGES = 4096
PAGE = 4096
ADDRESS_LIMIT = 1 << 47
ATTEMPTS = 3


class _Iovec(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = (
    ctypes.c_int,
    ctypes.POINTER(_Iovec),
    ctypes.c_ulong,
    ctypes.POINTER(_Iovec),
    ctypes.c_ulong,
    ctypes.c_ulong,
)


def read_blocked(pid: int, tid: int) -> tuple[int, int, bytes] | None:
    """Copy the stack of a thread that waits in the kernel.

    Returns:
        (stack pointer, program counter, up to 64 KiB from the stack pointer upwards); None when the thread runs, moves
        on while it is read, has ended, or may not be read.
    """
    for _ in range(ATTEMPTS):
        before = _registers(pid, tid)
        if before is None:
            return None
        stack = read_up(pid, before[0], MAX_STACK)
        # The copy is of one moment only if the thread has not moved: otherwise its frames are a mixture.
        if stack and _registers(pid, tid) == before:
            return before[0], before[1], stack
    return None


def _registers(pid: int, tid: int) -> tuple[int, int] | None:
    """Return (sp, pc) of a thread that is off the CPU, or None."""
    try:
        words = Path(f"/proc/{pid}/task/{tid}/syscall").read_text().split()
        sp, pc = int(words[-2], 16), int(words[-1], 16)
    except (OSError, ValueError, IndexError):
        return None  # "running" is a single word
    return (sp, pc) if 0 < sp < ADDRESS_LIMIT and sp & 7 == 0 else None


def is_refused(pid: int) -> bool:
    """Whether the kernel does not let us read the memory of a process that is there."""
    byte = ctypes.create_string_buffer(1)
    local, nowhere = _Iovec(ctypes.addressof(byte), 1), _Iovec(PAGE, 1)  # rights are asked for before the address
    got = _readv(pid, ctypes.byref(local), 1, ctypes.byref(nowhere), 1, 0)
    return got < 0 and ctypes.get_errno() == errno.EPERM


def read_memory(pid: int, ranges: list[tuple[int, int]]) -> list[bytes]:
    """Copy ranges (address, length in bytes) of a process's memory.

    Returns:
        One value a range: the bytes, or b"" where the range can't be read as a whole, is over 64 KiB, or the process
        has ended. Never raises for what the target does.
    """
    return [_read_whole(pid, address, length) for address, length in ranges[:MAX_RANGES]]


def _read_whole(pid: int, address: int, length: int) -> bytes:
    data = read_up(pid, address, length) if length <= MAX_STACK else b""
    return data if len(data) == length else b""


def read_up(pid: int, address: int, length: int) -> bytes:
    """Copy from an address upwards, up to the first page that can't be read; b"" where there is none."""
    if not 0 <= address < ADDRESS_LIMIT - length or length <= 0:
        return b""
    # The kernel may refuse an element as a whole when its end is not mapped: one element a page keeps the start.
    edges = [address, *range((address // PAGE + 1) * PAGE, address + length, PAGE), address + length]
    pieces = (_Iovec * (len(edges) - 1))()
    for index in range(len(pieces)):
        pieces[index] = _Iovec(edges[index], edges[index + 1] - edges[index])
    buffer = ctypes.create_string_buffer(length)
    local = _Iovec(ctypes.addressof(buffer), length)
    got = _readv(pid, ctypes.byref(local), 1, pieces, len(pieces), 0)
    return buffer.raw[:got] if got > 0 else b""

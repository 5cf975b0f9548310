"""The stack of a running thread: a few samples of the kernel's profiler, without stopping it."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import select
import struct
from typing import NamedTuple

__all__ = ["Sample", "sample_running"]

SYSCALLS = {"x86_64": 298}
TYPE_SOFTWARE, CPU_CLOCK, RECORD_SAMPLE = 1, 0, 9
SAMPLE_TID, SAMPLE_REGS_USER, SAMPLE_STACK_USER = 1 << 1, 1 << 12, 1 << 13
DISABLED, EXCLUDE_KERNEL, EXCLUDE_HV = 1 << 0, 1 << 5, 1 << 6
FLAG_FD_CLOEXEC = 8
IOC_ENABLE, IOC_DISABLE = 0x2400, 0x2401
BP_SP_IP = 1 << 6 | 1 << 7 | 1 << 8
ATTR_SIZE = 112
STACK_BYTES = 16 << 10
RING = 128 << 10
HEAD, DATA_OFFSET = 1024, 1040


class Sample(NamedTuple):
    """Registers of one moment, and up to 16 KiB from the stack pointer upwards."""

    sp: int
    pc: int
    bp: int
    stack: bytes


def sample_running(tid: int, *, period_ns: int = 200_000, timeout_s: float = 0.05, most: int = 3) -> list[Sample]:
    """Sample one thread while it runs in user space.

    Args:
        tid: the thread, as this process's pid namespace numbers it.
        period_ns: CPU time of the thread between samples.
        timeout_s: how long to wait for the first sample; a thread that waits gives none.
        most: samples to return at most (up to 6 fit).

    Returns:
        The samples, oldest first; empty when the thread did not run, has ended, or this machine is no x86-64.

    Raises:
        PermissionError: CAP_PERFMON is missing or a filter forbids perf_event_open.
    """
    if platform.machine() not in SYSCALLS:
        return []
    try:
        fd = _open_event(tid, period_ns)
    except ProcessLookupError:
        return []
    try:
        with mmap.mmap(fd, mmap.PAGESIZE + RING) as ring:
            _run(fd, timeout_s)
            return _samples(ring)[:most]
    finally:
        os.close(fd)


def _open_event(tid: int, period_ns: int) -> int:
    """Open a stopped cpu-clock event of one thread; raises OSError."""
    sample_type = SAMPLE_TID | SAMPLE_REGS_USER | SAMPLE_STACK_USER
    flags = DISABLED | EXCLUDE_KERNEL | EXCLUDE_HV
    head = struct.pack("<IIQQQQQII", TYPE_SOFTWARE, ATTR_SIZE, CPU_CLOCK, period_ns, sample_type, 0, flags, 1, 0)
    # bp_addr, bp_len, branch_sample_type, then the registers and stack to copy.
    attr = (head + struct.pack("<QQQQII", 0, 0, 0, BP_SP_IP, STACK_BYTES, 0)).ljust(ATTR_SIZE, b"\0")
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_long(v) for v in (tid, -1, -1, FLAG_FD_CLOEXEC))
    fd = libc.syscall(ctypes.c_long(SYSCALLS["x86_64"]), ctypes.create_string_buffer(attr, ATTR_SIZE), *arguments)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(fd)


def _run(fd: int, timeout_s: float) -> None:
    """Let the event run until its first sample or the timeout."""
    fcntl.ioctl(fd, IOC_ENABLE, 0)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll(timeout_s * 1000)
    fcntl.ioctl(fd, IOC_DISABLE, 0)


def _samples(ring: mmap.mmap) -> list[Sample]:
    """Read all records. The ring was never emptied before, so it starts at its first byte and has not wrapped."""
    (head,) = struct.unpack_from("<Q", ring, HEAD)
    (start,) = struct.unpack_from("<Q", ring, DATA_OFFSET)
    data = ring[start : start + min(head, RING)]
    found: list[Sample] = []
    at = 0
    while at + 8 <= len(data):
        kind, _misc, size = struct.unpack_from("<IHH", data, at)
        sample = _sample(data[at + 8 : at + size]) if kind == RECORD_SAMPLE else None
        if sample:
            found.append(sample)
        at += max(size, 8)
    return found


def _sample(body: bytes) -> Sample | None:
    """Read one sample: pid, tid, abi, three registers, the stack and how much of it is real; None without registers."""
    if len(body) < 48 or struct.unpack_from("<Q", body, 8)[0] == 0:
        return None
    bp, sp, ip, size = struct.unpack_from("<QQQQ", body, 16)
    if size == 0 or len(body) < 48 + size + 8:
        return None
    (real,) = struct.unpack_from("<Q", body, 48 + size)
    return Sample(sp, ip, bp, body[48 : 48 + min(real, size)])

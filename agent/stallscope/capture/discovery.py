"""New executable mappings and the lives of processes, of the whole system, from perf_event side band records.

One dummy event a CPU writes a record per mmap of code, fork, exec and exit into a ring that is read on poll: no
wakeups, no cost to other system calls, and no sight of what began before (read /proc once after opening).
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from stallscope.capture._drain import ffi, lib
from stallscope.capture.kernel import perf_event_open

__all__ = ["Discovery", "Event", "Execed", "Exited", "Forked", "Lost", "Mapped", "online_cpus"]

DEFAULT_PAGES = 64
_ATTR_BYTES = 128
_SOFTWARE, _DUMMY, _CLOCK_MONOTONIC = 1, 9, 1
_SAMPLE_TID_TIME = 1 << 1 | 1 << 2
_MMAP, _COMM, _TASK, _WATERMARK, _SAMPLE_ID_ALL = 1 << 8, 1 << 9, 1 << 13, 1 << 14, 1 << 18
_MMAP2, _COMM_EXEC, _USE_CLOCKID = 1 << 23, 1 << 24, 1 << 25
_FLAGS = _MMAP | _COMM | _TASK | _WATERMARK | _SAMPLE_ID_ALL | _MMAP2 | _COMM_EXEC | _USE_CLOCKID
_RECORD_LOST, _RECORD_COMM, _RECORD_EXIT, _RECORD_FORK, _RECORD_MMAP2 = 2, 3, 4, 7, 10
_MISC_EXEC = 1 << 13

_HEAD = struct.Struct("<IHH")
_MAPPED = struct.Struct("<IIQQQIIQQII")
_TASK_BODY = struct.Struct("<IIII")
_PID = struct.Struct("<I")
_LOST_BODY = struct.Struct("<QQ")
_TRAILER = struct.Struct("<IIQ")  # sample_id_all: pid, tid, time


class Mapped(NamedTuple):
    """A file mapped executable. `path` is what the process sees from its own root, and it may be any bytes; `dev` is
    (major, minor) of the file system, which for overlayfs and btrfs is not always what stat says."""

    pid: int
    tid: int
    at_ns: int
    address: int
    length: int
    pgoff: int
    dev: tuple[int, int]
    inode: int
    path: str


class Forked(NamedTuple):
    """A new thread (pid == ppid) or process."""

    pid: int
    tid: int
    at_ns: int
    ppid: int
    ptid: int


class Execed(NamedTuple):
    """A process runs another program; `comm` has at most 15 bytes."""

    pid: int
    tid: int
    at_ns: int
    comm: str


class Exited(NamedTuple):
    """A thread ended; the process may have others left, even if tid == pid."""

    pid: int
    tid: int
    at_ns: int


class Lost(NamedTuple):
    """The ring of a CPU was full: `missing` records did not fit before `at_ns`; 0 = an unknown number."""

    pid: int
    tid: int
    at_ns: int
    cpu: int
    missing: int


Whole = Callable[[int], bool]
Event = Mapped | Forked | Execed | Exited | Lost


def online_cpus(text: str | None = None) -> list[int]:
    """The CPUs of a list such as "0-3,8"; without one, those that are online now."""
    listed = text if text is not None else Path("/sys/devices/system/cpu/online").read_text(encoding="ascii")
    bounds = (part.partition("-") for part in listed.strip().split(",") if part)
    return [cpu for low, _, high in bounds for cpu in range(int(low), int(high or low) + 1)]


def attributes(watermark: int) -> bytes:
    """struct perf_event_attr. `watermark`: bytes until the kernel would wake a poller."""
    attr = bytearray(_ATTR_BYTES)
    struct.pack_into("<IIQQQQQ", attr, 0, _SOFTWARE, _ATTR_BYTES, _DUMMY, 0, _SAMPLE_TID_TIME, 0, _FLAGS)
    struct.pack_into("<I", attr, 48, watermark)
    struct.pack_into("<i", attr, 92, _CLOCK_MONOTONIC)
    return bytes(attr)


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode(errors="surrogateescape")


def _mapped(data: bytes, wanted: re.Pattern[bytes] | None, whole: Whole | None) -> Mapped | None:
    path = data[_HEAD.size + _MAPPED.size : -_TRAILER.size].partition(b"\0")[0]
    if wanted is not None and not wanted.search(path):
        (owner,) = _PID.unpack_from(data, _HEAD.size)
        if whole is None or not whole(owner):
            return None
    pid, tid, address, length, pgoff, major, minor, inode, _gen, _prot, _flags = _MAPPED.unpack_from(data, _HEAD.size)
    at_ns = _TRAILER.unpack_from(data, len(data) - _TRAILER.size)[2]
    return Mapped(pid, tid, at_ns, address, length, pgoff, (major, minor), inode, _text(path))


def _comm(data: bytes, misc: int) -> Execed | None:
    if not misc & _MISC_EXEC:
        return None
    pid, tid, at_ns = _TRAILER.unpack_from(data, len(data) - _TRAILER.size)
    return Execed(pid, tid, at_ns, _text(data[_HEAD.size + 8 : -_TRAILER.size]))


def _task(data: bytes, kind: int) -> Forked | Exited:
    pid, ppid, tid, ptid = _TASK_BODY.unpack_from(data, _HEAD.size)
    at_ns = _TRAILER.unpack_from(data, len(data) - _TRAILER.size)[2]
    return Forked(pid, tid, at_ns, ppid, ptid) if kind == _RECORD_FORK else Exited(pid, tid, at_ns)


def _lost(data: bytes, cpu: int) -> Lost:
    pid, tid, at_ns = _TRAILER.unpack_from(data, len(data) - _TRAILER.size)
    return Lost(pid, tid, at_ns, cpu, _LOST_BODY.unpack_from(data, _HEAD.size)[1])


def _records(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(type, misc, whole record); ends early where a size makes no sense."""
    at = 0
    while at + _HEAD.size <= len(data):
        kind, misc, size = _HEAD.unpack_from(data, at)
        if size < _HEAD.size or at + size > len(data):
            return
        yield kind, misc, data[at : at + size]
        at += size


_LEAST = {
    _RECORD_MMAP2: _MAPPED.size, _RECORD_COMM: 8, _RECORD_FORK: _TASK_BODY.size, _RECORD_EXIT: _TASK_BODY.size,
    _RECORD_LOST: _LOST_BODY.size,
}  # fmt: skip


def parse(
    data: bytes, cpu: int = 0, wanted: re.Pattern[bytes] | None = None, whole: Whole | None = None
) -> list[Event]:
    """The events in raw records of one CPU's ring; records of other kinds or too short are left out."""
    parsers: dict[int, Callable[[bytes, int], Event | None]] = {
        _RECORD_MMAP2: lambda record, _: _mapped(record, wanted, whole),
        _RECORD_COMM: _comm,
        _RECORD_FORK: lambda record, _: _task(record, _RECORD_FORK),
        _RECORD_EXIT: lambda record, _: _task(record, _RECORD_EXIT),
        _RECORD_LOST: lambda record, _: _lost(record, cpu),
    }
    found = []
    for kind, misc, record in _records(data):
        if kind in parsers and len(record) >= _HEAD.size + _LEAST[kind] + _TRAILER.size:
            event = parsers[kind](record, misc)
            if event is not None:
                found.append(event)
    return found


class Discovery:
    """Reads the side band records of every CPU that is online at the start.

    Args:
        cpus: which CPUs; None = all that are online.
        pages: ring size of each CPU in pages, a power of two; 64 (256 KiB) hold about 1500 mappings between two reads.
        wanted: leave out mappings whose path does not match; saves most of the time on a node that starts many
            processes.
        whole: the pids of which no mapping is left out: a traced process may map a library under another name.

    Raises:
        OSError: EACCES, EPERM (CAP_PERFMON is missing), EMFILE, ...
        ValueError: `pages` is no power of two.
    """

    def __init__(
        self, cpus: Iterable[int] | None = None, pages: int = DEFAULT_PAGES, wanted: re.Pattern[bytes] | None = None,
        whole: Whole | None = None,
    ) -> None:  # fmt: skip
        if pages < 1 or pages & (pages - 1):
            raise ValueError(f"pages {pages}")
        self._wanted = wanted
        self._whole = whole
        self._rings: list[tuple[int, Any]] = []
        self._bytes = pages * os.sysconf("SC_PAGESIZE")
        self._room = ffi.new("uint8_t[]", self._bytes)
        self._attr = attributes(self._bytes - 1)
        try:
            for cpu in online_cpus() if cpus is None else cpus:
                self._rings.append((cpu, self._open(cpu, pages)))
        except BaseException:
            self.close()
            raise

    def _open(self, cpu: int, pages: int) -> Any:
        fd = perf_event_open(self._attr, -1, cpu)
        ring = ffi.new("struct perf **")
        result = lib.perf__open(fd, pages, ring)
        if result < 0:
            os.close(fd)
            raise OSError(-result, f"perf ring of cpu {cpu}: {os.strerror(-result)}")
        return ring[0]

    def read(self) -> list[Event]:
        """What happened since the last read, by time. Never waits."""
        found: list[Event] = []
        for cpu, ring in self._rings:
            length = lib.perf__drain(ring, self._room, self._bytes)
            if length > 0:
                found += parse(bytes(ffi.buffer(self._room, length)), cpu, self._wanted, self._whole)
            elif length < 0:
                found.append(Lost(0, 0, 0, cpu, 0))
        found.sort(key=lambda event: event.at_ns)
        return found

    def close(self) -> None:
        """Stop the events."""
        rings, self._rings = self._rings, []
        for _, ring in rings:
            lib.perf__close(ring)

    def __enter__(self) -> Discovery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

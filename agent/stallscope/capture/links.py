"""Our own links: uprobes on file offsets, raw tracepoints; closing a descriptor takes its probes away.

Not bcc's attach functions: attach_uprobe passes a wrong reference counter offset (iovisor/bcc#5236), and each of its
probes is a perf event whose removal takes 0.1 s. One uprobe_multi link holds any number of offsets of a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

from stallscope.capture.kernel import bpf
from stallscope.capture.rights import BPF_LINK_CREATE, has_uprobe_multi, permission_problem, uprobe_multi_attr
from stallscope.errors import CaptureProblem, StallscopeError, TargetProblem

__all__ = ["RawTracepoint", "UprobeLink", "close_all", "has_uprobe_multi"]

_RAW_TRACEPOINT_OPEN = 17
_MAX_CLOSERS = 64
_ENOTSUPP = 524  # the kernel's own, without a name in errno

# Errors that say something about one offset; any other one is about the process, the file or our rights.
_OF_ONE_OFFSET = {
    errno.EINVAL: "no instruction can be probed there, or another tracer holds this address with a reference counter "
    "of its own (tools on bcc's Python API do, iovisor/bcc#5236)",
    errno.ENOEXEC: "the bytes there are no instruction that the kernel can probe",
    errno.EIO: "the bytes there could not be read from the file",
    _ENOTSUPP: "the kernel can't probe the instruction there",
    errno.EEXIST: "something else is on that address",
}


class _Point(NamedTuple):
    offset: int
    cookie: int


class _Place(NamedTuple):
    """What all offsets of one link have in common."""

    prog_fd: int
    path: str
    pid: int
    is_return: bool


class _Closable(Protocol):
    def take(self) -> list[int]: ...


class UprobeLink:
    """Probes on offsets of one file; normally one kernel link, more where single offsets were refused.

    Attributes:
        offsets: file offsets that are probed.
        notes: one line for each offset that is not.
    """

    def __init__(self, fds: list[int], offsets: list[int], notes: list[str]) -> None:
        self._fds = fds
        self.offsets = offsets
        self.notes = notes

    @classmethod
    def attach(
        cls,
        prog_fd: int,
        target: str | int,
        offsets: Sequence[int],
        cookies: Sequence[int],
        pid: int,
        is_return: bool,
    ) -> UprobeLink:
        """Probe the offsets of a file, in one process or (pid 0) in all.

        Args:
            target: a path, e.g. /proc/PID/root/..., taken as it stands; or a descriptor of the file.
            offsets: file offsets in bytes; of equal ones the first counts, or each call would fire twice.
            cookies: what the program gets at each offset, in the same order.

        Raises:
            PermissionProblem: rights are missing.
            TargetProblem: the process is gone.
            CaptureProblem: the file can't be probed, or not one of the offsets.
        """
        path = f"/proc/self/fd/{target}" if isinstance(target, int) else target
        place = _Place(prog_fd, path, pid, is_return)
        points: dict[int, _Point] = {}
        for offset, cookie in zip(offsets, cookies, strict=True):
            points.setdefault(offset, _Point(offset, cookie))
        if not points:
            raise ValueError("a link without offsets")
        link = cls([], [], [])
        try:
            link._add(place, list(points.values()))
        except BaseException:
            link.close()
            raise
        if not link.offsets:
            raise _nothing_attached(place, link.notes)
        return link

    def _add(self, place: _Place, points: list[_Point]) -> None:
        """Link the points; halves while single ones are refused. Pieces stay apart: they share no address."""
        try:
            self._fds.append(_create(place, points))
        except OSError as error:
            if error.errno not in _OF_ONE_OFFSET:
                raise _translated(place, error) from error
            if len(points) == 1:
                self.notes.append(
                    f"{place.path}+{points[0].offset:#x} is not probed: {_why_refused(place, points[0], error)}"
                )
                return
            middle = len(points) // 2
            self._add(place, points[:middle])
            self._add(place, points[middle:])
            return
        self.offsets += [p.offset for p in points]

    def take(self) -> list[int]:
        """The link's descriptors; the caller closes them now."""
        fds, self._fds = self._fds, []
        return fds

    def close(self) -> None:
        """Take the probes away; the kernel has restored the bytes on return (20 ms). A second call does nothing."""
        _close(self.take())


class RawTracepoint:
    """A program on a raw tracepoint."""

    def __init__(self, fd: int) -> None:
        self._fds = [fd]

    @classmethod
    def attach(cls, prog_fd: int, name: str) -> RawTracepoint:
        """Run the program at each hit of the tracepoint, e.g. "sched_process_fork".

        Raises:
            PermissionProblem: rights are missing.
            CaptureProblem: this kernel has no such tracepoint.
        """
        text = ctypes.create_string_buffer(name.encode())
        try:
            fd = bpf(_RAW_TRACEPOINT_OPEN, struct.pack("<QIIQ", ctypes.addressof(text), prog_fd, 0, 0))
        except OSError as error:
            what = f"cannot attach to the tracepoint {name}"
            if error.errno in (errno.EPERM, errno.EACCES):
                raise permission_problem(what) from error
            why = "this kernel does not have it" if error.errno == errno.ENOENT else str(error)
            raise CaptureProblem(what, why=why, hint="stallscope doctor") from error
        return cls(fd)

    def take(self) -> list[int]:
        """The link's descriptor; the caller closes it now."""
        fds, self._fds = self._fds, []
        return fds

    def close(self) -> None:
        """Detach. A second call does nothing."""
        _close(self.take())


def close_all(entries: Iterable[_Closable], returns: Iterable[_Closable]) -> None:
    """Close many links: all entries, then all returns, so that a call whose entry was seen keeps its return.

    In threads, because each close waits for grace periods of the kernel that can pass for all links at once.
    """
    for group in (entries, returns):
        fds = [fd for link in group for fd in link.take()]
        if len(fds) < 2:
            _close(fds)
            continue
        with ThreadPoolExecutor(min(_MAX_CLOSERS, len(fds))) as threads:
            list(threads.map(_close, [[fd] for fd in fds]))


def _close(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _create(place: _Place, points: list[_Point]) -> int:
    path = ctypes.create_string_buffer(os.fsencode(place.path))
    offsets = (ctypes.c_uint64 * len(points))(*(p.offset for p in points))
    cookies = (ctypes.c_uint64 * len(points))(*(p.cookie for p in points))
    attr = uprobe_multi_attr(place.prog_fd, path, offsets, cookies, place.pid, is_return=place.is_return)
    return bpf(BPF_LINK_CREATE, attr)


def _why_refused(place: _Place, point: _Point, error: OSError) -> str:
    with contextlib.suppress(OSError):
        if point.offset >= Path(place.path).stat().st_size:
            return "the file ends before it"
    return _OF_ONE_OFFSET[error.errno or 0]


def _what(place: _Place) -> str:
    where = f"in pid {place.pid}" if place.pid else "in all processes"
    return f"cannot probe {place.path} {where}"


def _nothing_attached(place: _Place, notes: list[str]) -> CaptureProblem:
    if has_uprobe_multi() is False:
        return CaptureProblem(
            _what(place),
            why="this kernel has no uprobe_multi links",
            hint="use a kernel from 6.6 on; stallscope doctor",
        )
    return CaptureProblem(
        _what(place),
        why=f"none of its {len(notes)} offsets: {notes[0]}",
        hint="end the other tracer, or: stallscope doctor",
    )


_WHY = {
    errno.ENOENT: ("the file is not there", "was the container or the file removed? attach again"),
    errno.EBADF: ("it is no regular file, or the BPF program is not loaded", "check the path; stallscope doctor"),
    errno.E2BIG: ("too many offsets for one link", "this is a defect of stallscope: please report it"),
    errno.EMFILE: ("too many open files", "raise the limit: ulimit -n 65536"),
    errno.ENOMEM: ("the kernel has no memory for it", "free memory, or trace fewer processes"),
}


def _translated(place: _Place, error: OSError) -> StallscopeError:
    if error.errno in (errno.EPERM, errno.EACCES):
        return permission_problem(_what(place))
    if error.errno == errno.ESRCH:
        return TargetProblem(
            f"cannot attach to pid {place.pid}", why="no such process, or it has just ended", hint="list them: ps -e"
        )
    why, hint = _WHY.get(
        error.errno or 0, (f"the kernel refused ({error.strerror}, errno {error.errno})", "stallscope doctor")
    )
    return CaptureProblem(_what(place), why=why, hint=hint)

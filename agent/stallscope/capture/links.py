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
from typing import Protocol

from stallscope.capture.kernel import bpf
from stallscope.capture.linkwords import OF_ONE_OFFSET, LinkPoint, Place, cannot, translated, why_refused
from stallscope.capture.rights import BPF_LINK_CREATE, has_uprobe_multi, permission_problem, uprobe_multi_attr
from stallscope.errors import CaptureProblem

__all__ = ["RawTracepoint", "UprobeLink", "close_all", "close_fds", "distinct", "has_uprobe_multi"]

_RAW_TRACEPOINT_OPEN = 17
_MAX_CLOSERS = 64


def distinct(offsets: Sequence[int], cookies: Sequence[int]) -> list[LinkPoint]:
    """Points with different offsets, the first of equal ones. Raises ValueError when there is none."""
    points: dict[int, LinkPoint] = {}
    for offset, cookie in zip(offsets, cookies, strict=True):
        points.setdefault(offset, LinkPoint(offset, cookie))
    if not points:
        raise ValueError("a link without offsets")
    return list(points.values())


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
        place = Place(prog_fd, path, pid, is_return)
        points = distinct(offsets, cookies)
        link = cls([], [], [])
        try:
            link._add(place, points)
        except BaseException:
            link.close()
            raise
        if not link.offsets:
            raise _nothing_attached(place, link.notes)
        return link

    def _add(self, place: Place, points: list[LinkPoint]) -> None:
        """Link the points; halves while single ones are refused. Pieces stay apart: they share no address."""
        try:
            self._fds.append(_create(place, points))
        except OSError as error:
            if error.errno not in OF_ONE_OFFSET:
                raise translated(place, error) from error
            if len(points) == 1:
                self.notes.append(why_refused(place, points[0], error))
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
        close_fds(self.take())


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
        close_fds(self.take())


def close_all(entries: Iterable[_Closable], returns: Iterable[_Closable]) -> None:
    """Close many links: all entries, then all returns, so that a call whose entry was seen keeps its return.

    In threads, because each close waits for grace periods of the kernel that can pass for all links at once.
    """
    for group in (entries, returns):
        fds = [fd for link in group for fd in link.take()]
        if len(fds) < 2:
            close_fds(fds)
            continue
        with ThreadPoolExecutor(min(_MAX_CLOSERS, len(fds))) as threads:
            list(threads.map(close_fds, [[fd] for fd in fds]))


def close_fds(fds: list[int]) -> None:
    """Close them all, whatever becomes of each."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _create(place: Place, points: list[LinkPoint]) -> int:
    path = ctypes.create_string_buffer(os.fsencode(place.path))
    offsets = (ctypes.c_uint64 * len(points))(*(p.offset for p in points))
    cookies = (ctypes.c_uint64 * len(points))(*(p.cookie for p in points))
    attr = uprobe_multi_attr(place.prog_fd, path, offsets, cookies, place.pid, is_return=place.is_return)
    return bpf(BPF_LINK_CREATE, attr)


def _nothing_attached(place: Place, notes: list[str]) -> CaptureProblem:
    if has_uprobe_multi() is False:
        return CaptureProblem(
            cannot(place),
            why="this kernel has no uprobe_multi links",
            hint="use a kernel from 6.6 on; stallscope doctor",
        )
    return CaptureProblem(
        cannot(place),
        why=f"none of its {len(notes)} offsets: {notes[0]}",
        hint="end the other tracer, or: stallscope doctor",
    )

"""Probes on kernels without uprobe_multi (before 6.6): a perf event each, with a cookie from 5.15 on.

Why so few of them (wire/hook_table.py, FEW): the kernel takes one away in some 0.1 s, nearly all of it under a lock for
all of them, so that threads gain a sixth and a killed tracer's process takes as long. A pid-filtered event does not run
for other processes; a forked child keeps a breakpoint until it hits it for the first time.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from stallscope.capture.kernel import bpf, perf_event_open
from stallscope.capture.links import close_fds
from stallscope.capture.linkwords import OF_ONE_OFFSET, LinkPoint, Place, cannot, translated, why_refused
from stallscope.capture.rights import BPF_LINK_CREATE, capability_held
from stallscope.errors import CaptureProblem, PermissionProblem, StallscopeError

__all__ = ["PerfLink", "uprobe_pmu"]

_PMU = Path("/sys/bus/event_source/devices/uprobe/type")
_ATTR_BYTES = 128
_RETPROBE = 1  # bit 0 of config, /sys/bus/event_source/devices/uprobe/format/retprobe
_BPF_PERF_EVENT = 41
_IOC_ENABLE, _IOC_SET_BPF = 0x2400, 0x40042408


def uprobe_pmu() -> int:
    """Type number of uprobe events. Raises CaptureProblem where this kernel has none."""
    try:
        return int(_PMU.read_text())
    except (OSError, ValueError) as error:
        raise CaptureProblem(
            "cannot probe functions", why="this kernel has no uprobe events", hint="one with CONFIG_UPROBE_EVENTS=y"
        ) from error


class PerfLink:
    """Probes on offsets of one file, a perf event each.

    Attributes:
        offsets: file offsets that are probed.
        notes: one line for each offset that is not.
    """

    def __init__(self) -> None:
        self._fds: list[int] = []
        self.offsets: list[int] = []
        self.notes: list[str] = []

    @classmethod
    def attach(
        cls,
        target: int,
        points: Sequence[LinkPoint],
        programs: Sequence[int],
        pid: int,
        *,
        is_return: bool,
        cookies: bool,
    ) -> PerfLink:
        """Probe the points of a file, in one process or (pid 0) in all.

        Args:
            target: descriptor of the file.
            points: at different offsets; their cookies are passed only with `cookies`.
            programs: a descriptor for each point.

        Raises:
            PermissionProblem: rights are missing; unlike uprobe_multi this needs CAP_SYS_ADMIN.
            TargetProblem: the process is gone.
            CaptureProblem: the file can't be probed, or not one of the points.
        """
        link, kind = cls(), uprobe_pmu()
        try:
            for point, program in zip(points, programs, strict=True):
                link._add(kind, Place(program, f"/proc/self/fd/{target}", pid, is_return), point, cookies)
            if not link.offsets:
                raise _nothing(points, link.notes, pid, target)
        except BaseException:
            link.close()
            raise
        return link

    def _add(self, kind: int, place: Place, point: LinkPoint, cookies: bool) -> None:
        try:
            event = _open(kind, place, point.offset)
            self._fds.append(event)
            # The link's descriptor holds the event too: both have to be closed.
            self._fds += _connect(event, place.prog_fd, point.cookie if cookies else None)
        except OSError as error:
            if error.errno not in OF_ONE_OFFSET:
                raise _problem(place, error) from error
            self.notes.append(why_refused(place, point, error))
            return
        self.offsets.append(point.offset)

    def take(self) -> list[int]:
        """The descriptors; the caller closes them now, 0.1 s a pair."""
        fds, self._fds = self._fds, []
        return fds

    def close(self) -> None:
        """Take the probes away, 0.1 s each. A second call does nothing."""
        close_fds(self.take())


def _open(kind: int, place: Place, offset: int) -> int:
    path = ctypes.create_string_buffer(os.fsencode(place.path))
    head = struct.pack("<IIQ", kind, _ATTR_BYTES, _RETPROBE if place.is_return else 0).ljust(56, b"\0")
    attr = (head + struct.pack("<QQ", ctypes.addressof(path), offset)).ljust(_ATTR_BYTES, b"\0")
    if place.pid:
        return perf_event_open(attr, place.pid, -1)
    # The program runs on every CPU all the same: the number says where the (unread) event would count.
    return perf_event_open(attr, -1, min(os.sched_getaffinity(0)))


def _connect(event: int, program: int, cookie: int | None) -> list[int]:
    """Let the program run at the event's hits; the descriptor of the link, if one is needed. Raises OSError."""
    if cookie is None:
        fcntl.ioctl(event, _IOC_SET_BPF, program)
        fcntl.ioctl(event, _IOC_ENABLE, 0)
        return []
    return [bpf(BPF_LINK_CREATE, struct.pack("<IIIIQ", program, event, _BPF_PERF_EVENT, 0, cookie))]


def _problem(place: Place, error: OSError) -> StallscopeError:
    if error.errno in (errno.EPERM, errno.EACCES) and not capability_held("CAP_SYS_ADMIN"):
        return PermissionProblem(
            cannot(place),
            why="this process lacks CAP_SYS_ADMIN, which uprobe events need where the kernel has no uprobe_multi",
            hint="run it as root: sudo stallscope ...",
        )
    return translated(place, error)


def _nothing(points: Sequence[LinkPoint], notes: list[str], pid: int, target: int) -> CaptureProblem:
    place = Place(-1, f"/proc/self/fd/{target}", pid, False)
    return CaptureProblem(
        cannot(place),
        why=f"none of its {len(points)} offsets: {notes[0] if notes else 'none was given'}",
        hint="end the other tracer, or: stallscope doctor",
    )

"""What a link is about, and the words for what the kernel refuses it with."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import NamedTuple

from stallscope.capture.rights import permission_problem
from stallscope.errors import CaptureProblem, StallscopeError, TargetProblem

__all__ = ["OF_ONE_OFFSET", "LinkPoint", "Place", "cannot", "translated", "why_refused"]

_ENOTSUPP = 524  # the kernel's own, without a name in errno

# Errors that say something about one offset; any other one is about the process, the file or our rights.
OF_ONE_OFFSET = {
    errno.EINVAL: "no instruction can be probed there, or another tracer holds this address with a reference counter "
    "of its own (tools on bcc's Python API do, iovisor/bcc#5236)",
    errno.ENOEXEC: "the bytes there are no instruction that the kernel can probe",
    errno.EIO: "the bytes there could not be read from the file",
    _ENOTSUPP: "the kernel can't probe the instruction there",
    errno.EEXIST: "something else is on that address",
}
_WHY = {
    errno.ENOENT: ("the file is not there", "was the container or the file removed? attach again"),
    errno.EBADF: ("it is no regular file, or the BPF program is not loaded", "check the path; stallscope doctor"),
    errno.E2BIG: ("too many offsets for one link", "this is a defect of stallscope: please report it"),
    errno.EMFILE: ("too many open files", "raise the limit: ulimit -n 65536"),
    errno.ENOMEM: ("the kernel has no memory for it", "free memory, or trace fewer processes"),
}


class LinkPoint(NamedTuple):
    """An offset in bytes in the file, and what the program is given there."""

    offset: int
    cookie: int


class Place(NamedTuple):
    """What all points of one link have in common; pid 0 = all processes."""

    prog_fd: int
    path: str
    pid: int
    is_return: bool


def cannot(place: Place) -> str:
    """First part of an error: what did not work."""
    where = f"in pid {place.pid}" if place.pid else "in all processes"
    return f"cannot probe {place.path} {where}"


def why_refused(place: Place, point: LinkPoint, error: OSError) -> str:
    """A note about one point that the kernel refused with an error of OF_ONE_OFFSET."""
    why = OF_ONE_OFFSET[error.errno or 0]
    with contextlib.suppress(OSError):
        if point.offset >= Path(place.path).stat().st_size:
            why = "the file ends before it"
    return f"{place.path}+{point.offset:#x} is not probed: {why}"


def translated(place: Place, error: OSError) -> StallscopeError:
    """The error for a link that the kernel refused as a whole."""
    if error.errno in (errno.EPERM, errno.EACCES):
        return permission_problem(cannot(place))
    if error.errno == errno.ESRCH:
        return TargetProblem(
            f"cannot attach to pid {place.pid}", why="no such process, or it has just ended", hint="list them: ps -e"
        )
    why, hint = _WHY.get(
        error.errno or 0, (f"the kernel refused ({error.strerror}, errno {error.errno})", "stallscope doctor")
    )
    return CaptureProblem(cannot(place), why=why, hint=hint)

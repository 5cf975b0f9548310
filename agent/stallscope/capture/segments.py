"""Where the segments of shims are: descriptors of the processes that made them, found by looking."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import stat
from collections.abc import Iterator

__all__ = ["UNREADY_NS", "Unready", "candidates", "has_let_go", "has_segment", "lock", "reopen", "start_ticks_of"]

MEMFD = "/memfd:stallscope-segment (deleted)"
INJECTED = "/memfd:stallscope-injected (deleted)"  # nothing comes into it once the library was taken out of the way
_FILE = re.compile(r"/\d{1,10}\.\d{1,20}(?:\.\d{1,2})?\.seg(?: \(deleted\))?")
MAX_FDS = 1 << 16
UNREADY_NS, MAX_UNREADY = 2_000_000_000, 1024


def candidates(pid: int, *, injected: bool = False) -> Iterator[int]:
    """Open descriptors of what may be segments, each on an open file description of its own; the caller closes them.

    `injected`: also those of a library that was put into the running process.

    A forked child holds its parent's segment beside its own: whose each is, its header says. Nothing when the process
    is gone or may not be read.
    """
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            names = [entry.name for entry in itertools.islice(entries, MAX_FDS)]
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            path = f"/proc/{pid}/fd/{name}"
            link = os.readlink(path)
            if _is_segment(link) or (injected and link == INJECTED):
                yield reopen(path)


def has_segment(pid: int) -> bool:
    """Whether the process holds a segment, or what may be one."""
    fds = list(candidates(pid))
    for fd in fds:
        os.close(fd)
    return bool(fds)


def has_let_go(pid: int, file: tuple[int, int], *, injected: bool = False) -> bool:
    """Whether the process has no descriptor of the segment (device, inode) any more; False where that can't be seen."""
    found = set()
    for fd in candidates(pid, injected=injected):
        info = os.fstat(fd)
        found.add((info.st_dev, info.st_ino))
        os.close(fd)
    return file not in found and os.access(f"/proc/{pid}/fd", os.R_OK)


def reopen(path: str) -> int:
    """A description of one's own of the regular file behind a link in /proc. Raises OSError."""
    # O_PATH first: opening what the target put there (a pipe, a device) could block or act.
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        return os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(handle)


def _is_segment(link: str) -> bool:
    return link == MEMFD or _FILE.fullmatch("/" + link.rpartition("/")[2]) is not None


def lock(fd: int) -> bool:
    """Become the one capture that reads this segment; False when another one does. Ends with the descriptor.

    `fd` must be on an open file description of its own: one that was handed over is shared with the process that made
    it, and a lock on that would outlive us.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def start_ticks_of(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; with the pid it names a process for good. None when it is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read(4096).rpartition(b")")[2].split()[19])
    return None


class Unready:
    """Segments that make no sense yet, by (device, inode): those that are found in the making are looked at again."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], tuple[int, bool]] = {}

    def is_due(self, file: tuple[int, int], now: int, *, is_own: bool) -> bool:
        """Whether to tell, once: at once of one's own, of others when they stay as they are."""
        first_ns, told = self._seen.get(file, (now, False))
        is_due = is_own or (now - first_ns > UNREADY_NS and not told)
        if len(self._seen) < MAX_UNREADY or file in self._seen:
            self._seen[file] = (first_ns, told or is_due)
        return is_due

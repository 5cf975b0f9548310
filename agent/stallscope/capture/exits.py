"""How a process ended, also one that is no child of ours: from its zombie, its pidfd, or by taking it in."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import struct

__all__ = ["become_subreaper", "exit_code_of", "has_ended", "is_zombie", "zombie_children"]

PR_SET_CHILD_SUBREAPER = 36
# Since Linux 6.15 a pidfd tells how its process ended once somebody has waited for it (struct pidfd_info, 64 bytes).
_INFO = struct.Struct("<Q52si")
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_WITH_EXIT = 1 << 3


def become_subreaper() -> bool:
    """Processes below us whose parent ends become our children, and not init's; whether the kernel agrees."""
    import ctypes

    return bool(ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def has_ended(pidfd: int) -> bool:
    """Whether the last thread is gone, be it waited for or not."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def exit_code_of(pid: int, pidfd: int) -> int | None:
    """As wait(2) encodes it; None where nobody tells (yet: a parent that waits later may change that).

    A child of ours is waited for.
    """
    with contextlib.suppress(ChildProcessError):
        found, status = os.waitpid(pid, os.WNOHANG)
        return status if found else None
    told = _of_pidfd(pidfd)
    return _of_zombie(pid) if told is None else told


def _of_pidfd(pidfd: int) -> int | None:
    data = bytearray(_INFO.pack(_WITH_EXIT, b"", 0))
    try:
        fcntl.ioctl(pidfd, _GET_INFO, data)
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EINVAL, errno.ESRCH, errno.EPERM):
            return None
        raise
    mask, _ids, code = _INFO.unpack(data)
    return int(code) if mask & _WITH_EXIT else None


def _of_zombie(pid: int) -> int | None:
    """Field 52 of its stat, which the kernel shows to who may trace it, else 0 to everybody."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read(4096).rpartition(b")")[2].split()
        may_look = os.stat(f"/proc/{pid}").st_uid == os.geteuid() or os.geteuid() == 0
        return int(fields[49]) if fields[0] == b"Z" and may_look else None
    except (OSError, ValueError, IndexError):
        return None


def zombie_children() -> set[int]:
    """Children of ours that nobody has waited for."""
    found = set()
    for tid in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{tid}/children") as file:
            found |= {int(word) for word in file.read().split() if is_zombie(int(word))}
    return found


def is_zombie(pid: int) -> bool:
    """Whether its main thread has ended and nobody has waited for it; True also when it is gone altogether."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read(4096).rpartition(b")")[2].split()[0] == b"Z"
    return True

"""Gives up privileges of this process for good: all of them, as parser and aggregator do first, or all but a few."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from collections.abc import Iterable

__all__ = ["PrivilegeDropError", "drop_privileges", "keep_capabilities"]

PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 4, 24, 38, 47
PR_CAP_AMBIENT_RAISE, PR_CAP_AMBIENT_CLEAR_ALL = 2, 4
CAPABILITY_VERSION_3 = 0x20080522


class PrivilegeDropError(RuntimeError):
    """The process still holds, or could regain, a privilege. It must not go on."""


def drop_privileges(
    uid: int, gid: int, *, memory: int | None = None, files: int | None = None, processes: int | None = None
) -> None:
    """Become `uid` without capabilities and without a way back, and check that.

    Import everything first: afterwards this user may not be able to read the modules' folder. /proc/self belongs to
    root from then on (the process is not dumpable), so /proc/self/fd and environ can't be read.

    Args:
        uid: the user to become, not 0. A caller that is not root can only name itself.
        gid: the only group to keep.
        memory: limit of the address space in bytes.
        files: limit of open descriptors.
        processes: limit of processes and threads of that user; 0 forbids to start any.

    Raises:
        PrivilegeDropError: a step failed, or the check found something left.
    """
    if uid == 0 or gid == 0:
        raise PrivilegeDropError("cannot drop privileges to root")
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        _empty_bounding_set(libc)
        _change_user(uid, gid)
        _set_limits({resource.RLIMIT_AS: memory, resource.RLIMIT_NOFILE: files, resource.RLIMIT_NPROC: processes})
    except OSError as problem:
        raise PrivilegeDropError(f"cannot become uid {uid}, gid {gid}: {problem}") from problem
    _clear_capabilities(libc)
    _prctl(libc, PR_SET_NO_NEW_PRIVS, 1)
    _prctl(libc, PR_SET_DUMPABLE, 0)
    _verify(libc, uid, gid)


def keep_capabilities(kept: Iterable[int]) -> None:
    """Hold no other capabilities than those of `kept` that are held now, also after an exec; the user stays.

    Raises:
        PrivilegeDropError: the kernel refused a step.
    """
    wanted = sum(1 << capability for capability in kept)
    libc = ctypes.CDLL(None, use_errno=True)
    header = ctypes.create_string_buffer(struct.pack("<Ii", CAPABILITY_VERSION_3, 0), 8)
    data = ctypes.create_string_buffer(24)
    if libc.capget(header, data) != 0:
        raise PrivilegeDropError(f"capget failed: {os.strerror(ctypes.get_errno())}")
    words = struct.unpack("<6I", data.raw)  # effective, permitted, inheritable: lower half, then the upper half
    held = (words[1] | words[4] << 32) & wanted
    for capability in range(64):
        if not held >> capability & 1:
            libc.prctl(PR_CAPBSET_DROP, *(ctypes.c_ulong(a) for a in (capability, 0, 0, 0)))
    low, high = held & 0xFFFFFFFF, held >> 32
    if libc.capset(header, ctypes.create_string_buffer(struct.pack("<6I", *[low] * 3, *[high] * 3), 24)) != 0:
        raise PrivilegeDropError(f"capset failed: {os.strerror(ctypes.get_errno())}")
    for capability in kept:
        # A user who is not root keeps nothing over an exec but this set; a capability that is not held is refused.
        libc.prctl(PR_CAP_AMBIENT, *(ctypes.c_ulong(a) for a in (PR_CAP_AMBIENT_RAISE, capability, 0, 0)))
    _prctl(libc, PR_SET_NO_NEW_PRIVS, 1)


def _prctl(libc: ctypes.CDLL, option: int, argument: int) -> None:
    """Call prctl; raises PrivilegeDropError."""
    # All five as long: the kernel refuses some options when the upper halves of unused arguments aren't zero.
    if libc.prctl(option, *(ctypes.c_ulong(a) for a in (argument, 0, 0, 0))) != 0:
        raise PrivilegeDropError(f"prctl({option}, {argument}) failed: {os.strerror(ctypes.get_errno())}")


def _empty_bounding_set(libc: ctypes.CDLL) -> None:
    """Drop each capability from the bounding set, where CAP_SETPCAP allows it.

    A failure is no error: with no_new_privs set, nothing can be gained through the bounding set.
    """
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, *(ctypes.c_ulong(a) for a in (capability, 0, 0, 0))) != 0:
            return


def _change_user(uid: int, gid: int) -> None:
    """Set groups, group and user, in the order in which each is still permitted; raises OSError."""
    if os.geteuid() == 0 or (os.getuid(), os.getgid()) != (uid, gid):
        os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _set_limits(limits: dict[int, int | None]) -> None:
    """Set soft and hard limits, never above the hard limit in force; no core file (it would hold target memory)."""
    for kind, limit in {**limits, resource.RLIMIT_CORE: 0}.items():
        if limit is not None:
            hard = resource.getrlimit(kind)[1]
            value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (value, value))


def _clear_capabilities(libc: ctypes.CDLL) -> None:
    """Empty the effective, permitted and inheritable sets; the kernel then empties the ambient set too."""
    header = ctypes.create_string_buffer(struct.pack("<Ii", CAPABILITY_VERSION_3, 0), 8)
    if libc.capset(header, ctypes.create_string_buffer(24)) != 0:
        raise PrivilegeDropError(f"capset failed: {os.strerror(ctypes.get_errno())}")
    libc.prctl(PR_CAP_AMBIENT, *(ctypes.c_ulong(a) for a in (PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)))


def _verify(libc: ctypes.CDLL, uid: int, gid: int) -> None:
    """Check ids and capabilities, and that root can't be regained; raises PrivilegeDropError."""
    if os.getresuid() != (uid, uid, uid) or os.getresgid() != (gid, gid, gid):
        raise PrivilegeDropError(f"ids are still {os.getresuid()}, {os.getresgid()}")
    header = ctypes.create_string_buffer(struct.pack("<Ii", CAPABILITY_VERSION_3, 0), 8)
    held = ctypes.create_string_buffer(24)
    if libc.capget(header, held) != 0 or any(held.raw):
        raise PrivilegeDropError("capabilities are left")
    for regain in (os.setuid, os.setgid):
        try:
            regain(0)
        except PermissionError:
            continue
        raise PrivilegeDropError("root could be regained")

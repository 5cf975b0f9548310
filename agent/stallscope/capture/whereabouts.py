"""Where one thread is, at the price of one small file: what looks at workers many times a second are made of."""

from __future__ import annotations

import itertools
import os
import struct
from typing import NamedTuple

from stallscope.capture.blocked import read_memory, read_up
from stallscope.capture.procfs import clean
from stallscope.capture.syscalls import TAKES_FD, TAKES_PATH, syscall_name

__all__ = ["BUSY", "POLLS", "Whereabouts", "is_in_futex", "pipes_of", "polled_files", "standard_pipes_of", "turns_of",
           "where_is"]  # fmt: skip

BUSY = "running"
FUTEX_COMMAND, FUTEX_WAITS = 127, (0, 9)  # FUTEX_WAIT, FUTEX_WAIT_BITSET; above: flags
POLLS = ("poll", "ppoll")
POLL_FDS, POLLFD = 8, 8  # descriptors that are looked at; bytes of struct pollfd: fd, events, revents
DATA = 0x147  # POLLIN, POLLPRI, POLLOUT, POLLRDNORM, POLLWRNORM: not who only asks whether the other end is closed
MAX_FDS, MAX_TEXT = 512, 256


class Whereabouts(NamedTuple):
    """`syscall`: BUSY while it runs, None while it waits outside of a call (a page fault).

    `files`: what the call's descriptors are open on, of poll(2) at most POLL_FDS; or the path that it was given.
    """

    syscall: str | None
    files: tuple[str, ...] = ()

    @property
    def pipes(self) -> set[int]:
        """Inodes of those that are pipes; a path may call itself what it likes."""
        if self.syscall in TAKES_PATH:
            return set()
        return {inode for file in self.files if (inode := _pipe(file)) is not None}


def where_is(pid: int, tid: int) -> Whereabouts | None:
    """None where the thread has ended or may not be read. No path of the target is opened."""
    try:
        with open(f"/proc/{pid}/task/{tid}/syscall", "rb") as file:
            words = file.read(512).split()
        if words[0] == b"running":
            return Whereabouts(BUSY)
        number, *arguments = int(words[0]), *(int(word, 16) for word in words[1:7])
    except (OSError, ValueError, IndexError):
        return None
    if number < 0:
        return Whereabouts(None)
    name = syscall_name(number)
    return Whereabouts(name, _files(pid, tid, name, arguments))


def is_in_futex(tid: int) -> bool:
    """Whether a thread waits in futex(2) until it is woken, for however long; the GIL is waited for with a limit."""
    try:
        with open(f"/proc/{tid}/syscall", "rb") as file:
            words = file.read(512).split()
        number, operation, limit = int(words[0]), int(words[2], 16) & FUTEX_COMMAND, int(words[4], 16)
    except (OSError, ValueError, IndexError):
        return False
    return syscall_name(number) == "futex" and operation in FUTEX_WAITS and limit == 0


def turns_of(tid: int) -> int:
    """How often a thread has been given a CPU; 0 where the kernel does not count it, or the thread has ended."""
    try:
        with open(f"/proc/{tid}/schedstat", "rb") as file:
            return int(file.read(128).split()[2])
    except (OSError, ValueError, IndexError):
        return 0


def _files(pid: int, tid: int, name: str, arguments: list[int]) -> tuple[str, ...]:
    if len(arguments) < 2:
        return ()
    if name in TAKES_PATH:
        path = read_up(pid, arguments[TAKES_PATH[name]], MAX_TEXT).split(b"\0", 1)[0]
        return (clean(path.decode("utf-8", "replace"))[:MAX_TEXT],) if path else ()
    if name in POLLS:
        return polled_files(pid, tid, arguments)
    if name not in TAKES_FD:
        return ()
    file = _link(f"/proc/{pid}/task/{tid}/fd/{arguments[0] & 0xFFFFFFFF}")
    return () if file is None else (file,)


def polled_files(pid: int, tid: int, arguments: list[int]) -> tuple[str, ...]:
    """What the descriptors that a poll(2) with these arguments waits for data of are open on, of the first POLL_FDS."""
    if arguments[1] <= 0:
        return ()
    (data,) = read_memory(pid, [(arguments[0], POLLFD * min(arguments[1], POLL_FDS))])
    fds = [fd for fd, events, _ in struct.iter_unpack("<iHH", data) if fd >= 0 and events & DATA]
    found = (_link(f"/proc/{pid}/task/{tid}/fd/{fd}") for fd in fds)
    return tuple(file for file in found if file is not None)


def _link(path: str) -> str | None:
    try:
        return clean(os.readlink(path)[:MAX_TEXT])[:MAX_TEXT]
    except OSError:
        return None


def _pipe(file: str) -> int | None:
    digits = file.removeprefix("pipe:[").removesuffix("]")
    return int(digits) if digits != file and digits.isdecimal() and len(digits) < 20 else None


def standard_pipes_of(pid: int) -> set[int]:
    """Inodes of the pipes that its standard streams are."""
    files = (_link(f"/proc/{pid}/fd/{fd}") for fd in range(3))
    return {inode for file in files if file and (inode := _pipe(file)) is not None}


def pipes_of(pid: int) -> set[int]:
    """Inodes of the pipes that a process holds, among its first MAX_FDS descriptors. Empty where it is gone."""
    found = set()
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            names = [entry.name for entry in itertools.islice(entries, MAX_FDS)]
    except OSError:
        return set()
    for name in names:
        file = _link(f"/proc/{pid}/fd/{name}")
        inode = _pipe(file) if file else None
        if inode is not None:
            found.add(inode)
    return found

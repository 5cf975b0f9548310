"""A folder in which shims make their segments: what is there, whose it is, who of them lives. No /proc is needed."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["File", "Folder", "holder_of"]

MAX_FILES, MAX_TOLD = 4096, 32
FINISH_NS = 2_000_000_000
_NAME = re.compile(r"\d{1,10}\.\d{1,20}(?:\.\d{1,2})?\.seg")
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, len, pid


class File(NamedTuple):
    """A segment: `fd` is on a description of its own and becomes the caller's; `uid` owns the file."""

    name: str
    inode: int
    uid: int
    fd: int


def holder_of(fd: int) -> int | None:
    """Who holds the record lock on the file's first byte: his pid here, 0 when he is in another pid namespace.

    None when nobody does. It is the kernel's word (fcntl(2), F_GETLK): a lock is given up with the process.
    """
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    kind, _whence, _start, _len, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else max(0, int(pid))


class Folder:
    """Looks for new segments. Nothing in it is believed: links are not followed, only regular files of the given users
    are opened.

    Args:
        path: the folder; it may not be there yet.
        uids: whose files are read.
        tell: takes what was turned away, in words; each of the first MAX_TOLD once.

    Attributes:
        refused: files that were not read.
    """

    def __init__(self, path: Path, uids: frozenset[int], tell: Callable[[str], None]) -> None:
        self._path, self._uids, self._tell = path, uids, tell
        self._known: dict[int, str] = {}
        self._young: dict[int, int] = {}
        self._is_crowded = False
        self.refused = 0

    def news(self, now_ns: int) -> list[File]:
        """Segments that were not given out before; those of one process in the order in which it made them."""
        try:
            with os.scandir(self._path) as entries:
                there = [(entry.inode(), entry.name) for entry in itertools.islice(entries, MAX_FILES + 1)]
        except OSError:
            return []
        if len(there) > MAX_FILES and not self._is_crowded:
            self._is_crowded = True
            self._refuse(f"there are more than {MAX_FILES} files in it: the rest is not looked at")
        self._forget({inode for inode, _ in there})
        fresh = [(inode, name) for inode, name in there if inode not in self._known and _NAME.fullmatch(name)]
        fresh.sort(key=lambda row: [int(number) for number in row[1].split(".")[:-1]])
        return [file for inode, name in fresh if (file := self._open(name, inode, now_ns)) is not None]

    def _forget(self, there: set[int]) -> None:
        """A number that is free again may be another file's tomorrow."""
        for inode in self._known.keys() - there:
            del self._known[inode]
        for inode in self._young.keys() - there:
            del self._young[inode]

    def _open(self, name: str, inode: int, now_ns: int) -> File | None:
        try:
            file = self._checked(name, inode)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._known[inode] = name
            self._refuse(f"{name} can't be read ({error.strerror}): it has to be its group's, see docs/sidecar.md")
            return None
        if file is None or self._is_finished(file, now_ns):
            self._known[inode] = name
            return file
        os.close(file.fd)
        return None

    def _checked(self, name: str, inode: int) -> File | None:
        # O_PATH first: opening what somebody put there (a pipe, a device) could block or act.
        handle = os.open(self._path / name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            facts = os.fstat(handle)
            if not stat.S_ISREG(facts.st_mode) or facts.st_ino != inode:
                self._refuse(f"{name} is no regular file")
                return None
            if facts.st_uid not in self._uids:
                self._refuse(f"{name} is of uid {facts.st_uid}, who is not read: --uid {facts.st_uid}")
                return None
            fd = os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_CLOEXEC)
            return File(name, inode, facts.st_uid, fd)
        finally:
            os.close(handle)

    def _is_finished(self, file: File, now_ns: int) -> bool:
        """The magic number is written last; one that does not come is somebody else's to judge."""
        first_ns = self._young.setdefault(file.inode, now_ns)
        return any(os.pread(file.fd, 8, 0)) or now_ns - first_ns > FINISH_NS

    def _refuse(self, why: str) -> None:
        self.refused += 1
        if self.refused <= MAX_TOLD:
            self._tell(f"{self._path}: {why}")

    def remove(self, file: File) -> None:
        """Take a file away whose process has ended; one that may not be is left, and not given out again."""
        with contextlib.suppress(OSError):
            if os.lstat(self._path / file.name).st_ino == file.inode:
                os.unlink(self._path / file.name)

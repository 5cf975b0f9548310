"""Bounded reads from a file that somebody else controls."""

from __future__ import annotations

import os
import stat

from stallscope.parser.errors import ParseError

__all__ = ["Source"]

MAX_READ = 64 << 20
MAX_TOTAL = 256 << 20


class Source:
    """Positional reads of one descriptor, each checked against the file's size.

    The file is never mapped: its owner could truncate it meanwhile and end this process with SIGBUS.
    """

    __slots__ = ("fd", "left", "name", "size")

    def __init__(self, fd: int, name: str) -> None:
        """Take a descriptor (not owned) of a regular file.

        Raises:
            ParseError: it is not a regular file.
        """
        info = os.fstat(fd)
        self.fd = fd
        self.name = name
        self.size = info.st_size
        self.left = MAX_TOTAL
        if not stat.S_ISREG(info.st_mode):
            raise self.error("not a regular file")

    def error(self, why: str) -> ParseError:
        """Make the error that names this file; the caller raises it."""
        return ParseError("cannot read ELF file", self.name, why)

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from byte `offset` of the file.

        Raises:
            ParseError: the range lies outside the file, is over 64 MiB, or this request has read 256 MiB.
        """
        if offset < 0 or length < 0 or offset + length > self.size:
            raise self.error(f"range {offset}+{length} lies outside the file of {self.size} bytes")
        if length > MAX_READ or length > self.left:
            raise self.error(f"{length} bytes at {offset} are more than the parser reads")
        self.left -= length
        data = os.pread(self.fd, length, offset)
        if len(data) != length:
            raise self.error(f"short read at {offset}: the file shrank")
        return data

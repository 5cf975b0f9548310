"""The environment that a process has now: copied from where its libc keeps it.

/proc/PID/environ shows the block of the exec for ever; `unsetenv` only takes pointers out of the array that libc's
`environ` points to. A program may have that variable of libc's in its own memory (a copy relocation, as in python3),
and then libc uses it there.
"""

from __future__ import annotations

import os
import re
import struct
from typing import NamedTuple

from stallscope.capture.blocked import read_up
from stallscope.capture.parser_client import ParserClient
from stallscope.capture.procfs import Block, executable_mappings
from stallscope.capture.variables import Variables, address_in
from stallscope.wire.environment import MAX_NAME, MAX_READ

__all__ = ["LIBC", "Environs", "live_words"]

NAMES = ("environ", "__environ")
LIBC = re.compile(r"libc(?:\.so\.6|-2\.\d+\.so|\.so|\.musl-[\w-]+\.so\.1)|ld-musl-[\w-]+\.so\.1")
FIRST, MOST = 2048, 65536  # bytes of the array: so many are read at first, and at most
MAX_OUTSIDE = 512
WORD = MAX_NAME + 1 + MAX_READ + 2


class _Place(NamedTuple):
    """Where `environ` is, while the block of the exec is this one: another exec, other addresses."""

    start: int
    end: int
    at: int | None


class _HeldUp(Exception):
    """The parser did not answer in time."""


class Environs:
    """Finds the variable once for each program that a process runs.

    Args:
        parser: asked once a file.
    """

    def __init__(self, parser: ParserClient) -> None:
        self._variables = Variables(parser, NAMES)
        self._places: dict[int, _Place] = {}

    def words(self, proc: int, parent: int | None, pid: int, block: Block) -> list[bytes] | None:
        """NAME=value strings that the process has now; None where they can't be read."""
        place = self._places.get(proc)
        if place is None or place[:2] != (block.start, block.end):
            try:
                place = self._places[proc] = self._find(parent, pid, block)
            except _HeldUp:
                return None  # the next look asks again
        return None if place.at is None else live_words(pid, place.at, block)

    def forget(self, proc: int) -> None:
        """The process has ended."""
        self._places.pop(proc, None)

    def _find(self, parent: int | None, pid: int, block: Block) -> _Place:
        # A forked child has its parent's memory.
        theirs = self._places.get(parent) if parent is not None else None
        if theirs is not None and theirs[:2] == (block.start, block.end):
            return theirs
        return _Place(block.start, block.end, self._search(pid))

    def _search(self, pid: int) -> int | None:
        try:
            mappings = executable_mappings(pid)
            program = os.stat(f"/proc/{pid}/exe").st_ino
        except OSError:
            return None
        # The loader takes the program's own first. Of two copies of libc the first one loaded lies higher.
        own = [m for m in mappings if m.inode == program][:1]
        libcs = [m for m in mappings if LIBC.fullmatch(m.path.rpartition("/")[2].removesuffix(" (deleted)"))]
        for mapping in [*own, *sorted(libcs, key=lambda m: -m.start)[:2]]:
            objects = self._variables.of(pid, mapping)
            if objects is None:
                raise _HeldUp  # the next file's variable may be there and unused
            found = address_in(objects, mapping, NAMES)
            if found is not None:
                return found
        return None


def live_words(pid: int, at: int, block: Block) -> list[bytes] | None:
    """The strings that the array points to whose address stands at `at`; None where that makes no sense.

    The process runs on meanwhile: what is changed under way is read once more.
    """
    for _ in range(2):
        pointers = _pointers(pid, at)
        if pointers is None:
            return None
        words = _strings(pid, pointers, block)
        if words is not None and _pointers(pid, at) == pointers:
            return words
    return None


def _pointers(pid: int, at: int) -> list[int] | None:
    raw = read_up(pid, at, 8)
    if len(raw) < 8:
        return None
    (array,) = struct.unpack("<Q", raw)
    if not array:
        return []  # clearenv
    for size in (FIRST, MOST):
        data = read_up(pid, array, size)
        found: list[int] = [pointer for (pointer,) in struct.iter_unpack("<Q", data[: len(data) // 8 * 8])]
        if 0 in found:
            return found[: found.index(0)]
    return None


def _strings(pid: int, pointers: list[int], block: Block) -> list[bytes] | None:
    words, left = [], MAX_OUTSIDE
    for pointer in pointers:
        if block.start <= pointer < block.start + len(block.data):
            begin = pointer - block.start
            end = block.data.find(b"\0", begin)
            words.append(block.data[begin : end if end >= 0 else None])
            continue
        left -= 1
        if left < 0:
            return None
        words.append(read_up(pid, pointer, WORD).split(b"\0", 1)[0])
    return words

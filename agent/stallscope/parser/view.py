"""A thread's memory as far as it was copied. What is missing is noted, so that it can be asked for."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from stallscope.parser import elf as e
from stallscope.parser.ehframe import EhFrame
from stallscope.parser.elf import Elf
from stallscope.parser.errors import ParseError
from stallscope.parser.source import Source

__all__ = ["MAX_NEEDS", "Range", "View"]

MAX_NEEDS = 256
ADDRESS_LIMIT = 1 << 47
WORD = struct.Struct("<Q")


class Range(NamedTuple):
    """An executable mapping [start, end). `file`: index of the descriptor handed over, or -1; offset in bytes."""

    start: int
    end: int
    file: int
    offset: int


class View:
    """The stack copy, executable ranges, their files, and memory asked for in earlier rounds.

    Code is read from the file where there is one: no round trip, and a breakpoint in memory does no harm. The words
    a call goes through are only right in memory.
    """

    def __init__(self, sp: int, stack: bytes, ranges: Sequence[Range], sources: Sequence[Source]) -> None:
        self.sp = sp
        self.stack = stack
        self.end = sp + len(stack)
        self.ranges = sorted(ranges)
        self.starts = [r.start for r in self.ranges]
        self.memory: dict[int, bytes] = {}
        self.needs: dict[int, int] = {}
        self._sources = list(sources)
        self._elves: dict[int, Elf | None] = {}
        self._frames: dict[int, EhFrame | None] = {}

    def range_of(self, address: int) -> Range | None:
        """Return the executable range that holds an address, or None."""
        index = bisect_right(self.starts, address) - 1
        return self.ranges[index] if index >= 0 and address < self.ranges[index].end else None

    def stack_word(self, address: int) -> int | None:
        """Return the aligned 8-byte word at a stack address, or None outside the copy."""
        if address & 7 or not self.sp <= address <= self.end - 8:
            return None
        word: int = WORD.unpack_from(self.stack, address - self.sp)[0]
        return word

    def word(self, address: int) -> int | None:
        """Return the 8-byte word at any address; a missing one is noted and None."""
        data = self._memory(address, 8)
        return WORD.unpack(data)[0] if data else None

    def code(self, address: int, length: int) -> bytes | None:
        """Return code bytes, fewer at the end of a range; missing ones are noted and None, as where no code is."""
        where = self.range_of(address)
        if where is None:
            return None
        length = min(length, where.end - address)
        if 0 <= where.file < len(self._sources):
            try:
                return self._sources[where.file].read(address - where.start + where.offset, length)
            except ParseError:
                return None
        return self._memory(address, length)

    def unwind_table(self, where: Range) -> EhFrame | None:
        """Return the unwind table of the file behind a range, or None when it has none or it is damaged."""
        if where.file not in self._frames:
            elf = self.elf(where.file)
            try:
                self._frames[where.file] = EhFrame(elf) if elf else None
            except ParseError:
                self._frames[where.file] = None
        return self._frames[where.file]

    def elf(self, index: int) -> Elf | None:
        """Return the headers of a file handed over, or None when it is damaged or not for x86-64."""
        if index not in self._elves:
            self._elves[index] = self._load(index)
        return self._elves[index]

    def file_address(self, address: int) -> tuple[Range, int] | None:
        """Return (range, virtual address inside its file) of an address in memory, or None without a usable file."""
        where = self.range_of(address)
        elf = self.elf(where.file) if where else None
        if where is None or elf is None:
            return None
        vaddr = elf.vaddr_of(address - where.start + where.offset)
        return None if vaddr is None else (where, vaddr)

    def _load(self, index: int) -> Elf | None:
        if not 0 <= index < len(self._sources):
            return None
        try:
            elf = e.load(self._sources[index])
        except ParseError:
            return None
        return elf if elf.machine == "x86_64" else None

    def _memory(self, address: int, length: int) -> bytes | None:
        """Return copied bytes, or note that they are needed. An empty copy means: can't be read."""
        if self.sp <= address <= self.end - length:
            return self.stack[address - self.sp : address - self.sp + length]
        known = self.memory.get(address)
        if known is not None:
            return known[:length] if len(known) >= length else None
        if 0 < address < ADDRESS_LIMIT - length and len(self.needs) < MAX_NEEDS:
            self.needs[address] = max(length, self.needs.get(address, 0))
        return None

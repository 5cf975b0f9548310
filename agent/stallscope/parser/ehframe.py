"""Finds the one unwind entry of an address through the binary search table of .eh_frame_hdr."""

from __future__ import annotations

import struct

from stallscope.parser import elf as e
from stallscope.parser.cfi import Bytes, Cie, Row, evaluate
from stallscope.parser.elf import Elf
from stallscope.parser.errors import ParseError

__all__ = ["EhFrame"]

TABLE_ENCODING = 0x3B  # datarel sdata4: the only form linkers write, and the only one that can be searched
MAX_ENTRY = 64 << 10
MAX_FUNCTIONS = 16 << 20
MAX_LISTED = 16384


class EhFrame:
    """Unwind rows of one ELF file, looked up one address at a time: .eh_frame as a whole is read only where a program
    has no search table, as static ones do."""

    __slots__ = ("cies", "count", "elf", "entries", "header", "rows", "table")

    def __init__(self, elf: Elf) -> None:
        """Read the header of the search table.

        Raises:
            ParseError: the file has neither such a table, in a known form, nor a section .eh_frame.
        """
        self.elf = elf
        self.rows: dict[int, Row | None] = {}
        self.cies: dict[int, Cie] = {}
        self.entries: list[tuple[int, int]] = []
        self.header = self.table = 0
        segment = elf.first(e.PT_GNU_EH_FRAME)
        if segment is None:
            self._read_section()
            self.count = len(self.entries)
            return
        version, pointer, count, table = elf.at(segment.vaddr, 4)
        if version != 1 or table != TABLE_ENCODING or count != 0x03 or pointer & 0x0F not in (0x03, 0x0B):
            raise elf.source.error("an unknown form of unwind table")
        self.header = segment.vaddr
        self.table = segment.vaddr + 12
        (self.count,) = struct.unpack("<I", elf.at(segment.vaddr + 8, 4))
        if not 0 < self.count <= MAX_FUNCTIONS:
            raise elf.source.error(f"an unwind table of {self.count} functions")

    def _read_section(self) -> None:
        """Make the search table from the section; damage ends it early."""
        section = self.elf.section(b".eh_frame")
        if section is None:
            raise self.elf.source.error("no unwind table")
        at, end = section.vaddr, section.vaddr + section.size
        for _ in range(MAX_LISTED):
            if at + 8 > end:
                break
            try:
                length, back = struct.unpack("<II", self.elf.at(at, 8))
                if length and back:
                    start = self._start(at, back)
                    self.entries.append((start, at))
            except ParseError:
                break
            at += 4 + length
        self.entries.sort()

    def _start(self, address: int, back: int) -> int:
        """Return where the function of an entry starts."""
        cie = self._cie(address + 4 - back)
        body = Bytes(self.elf.at(address + 8, 8))
        return _pointer(body, cie.pointer_encoding, address + 8)

    def row(self, pc: int) -> Row | None:
        """Return the rules at a virtual address, or None where no entry covers it or the entry is damaged."""
        if pc not in self.rows:
            try:
                self.rows[pc] = self._find(pc)
            except ParseError:
                self.rows[pc] = None
        return self.rows[pc]

    def _find(self, pc: int) -> Row | None:
        """Search the table, then read the entry it names."""
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            if self._entry(middle)[0] <= pc:
                low = middle + 1
            else:
                high = middle
        return self._evaluate(self._entry(low - 1)[1], pc) if low else None

    def _entry(self, index: int) -> tuple[int, int]:
        """Return (first address of the function, address of its entry)."""
        if self.entries:
            return self.entries[index]
        start, entry = struct.unpack("<ii", self.elf.at(self.table + index * 8, 8))
        return self.header + start, self.header + entry

    def _evaluate(self, address: int, pc: int) -> Row | None:
        """Read the function's entry and its shared part, and run them up to `pc`."""
        body = self._body(address)
        back = body.uint(4)
        if back == 0:
            raise self.elf.source.error("a search table that names a shared entry")
        cie = self._cie(address + 4 - back)
        start = _pointer(body, cie.pointer_encoding, address + 4)
        length = _pointer(body, cie.pointer_encoding & 0x0F, 0)
        if not start <= pc < start + length:
            return None
        if cie.augmented:
            body.take(body.uleb())
        return evaluate(cie, start, body.data[body.at :], pc)._replace(end=start + length)

    def _body(self, address: int) -> Bytes:
        """Return an entry without its length field, so that byte 0 lies at `address` + 4."""
        (length,) = struct.unpack("<I", self.elf.at(address, 4))
        if not 4 <= length <= MAX_ENTRY:
            raise self.elf.source.error(f"an unwind entry of {length} bytes")
        return Bytes(self.elf.at(address + 4, length))

    def _cie(self, address: int) -> Cie:
        """Return a shared entry."""
        if address not in self.cies:
            self.cies[address] = self._read_cie(address)
        return self.cies[address]

    def _read_cie(self, address: int) -> Cie:
        body = self._body(address)
        if body.uint(4) != 0 or body.uint(1) not in (1, 3):
            raise self.elf.source.error("a damaged shared unwind entry")
        end = body.data.find(b"\0", body.at)
        augmentation = body.take(end - body.at)
        body.take(1)
        code_align, data_align = body.uleb(), body.sleb()
        body.uleb()  # the return address column: one byte or a LEB128 number, 16 in both
        encoding = _augmentation(body, augmentation)
        signal = b"S" in augmentation
        return Cie(code_align, data_align, encoding, bool(augmentation), signal, body.data[body.at :])


def _augmentation(body: Bytes, letters: bytes) -> int:
    """Step over a shared entry's augmentation data; return how addresses are written."""
    if not letters:
        return 0
    if letters[:1] != b"z":
        raise ParseError("cannot read unwind table", "augmentation", "unknown")
    data = Bytes(body.take(body.uleb()))
    encoding = 0
    for letter in letters[1:]:
        if letter == ord("R"):
            encoding = data.uint(1)
        elif letter == ord("L"):
            data.uint(1)
        elif letter == ord("P"):
            _pointer(data, data.uint(1) & 0x0F, 0)
        elif letter not in b"SB":
            break
    return encoding


def _pointer(body: Bytes, encoding: int, base: int) -> int:
    """Read an encoded address; `base` is the address of byte 0 of the body, for pc-relative ones."""
    here = base + body.at
    sizes = {0x00: (8, False), 0x02: (2, False), 0x03: (4, False), 0x04: (8, False)}
    sizes |= {0x0A: (2, True), 0x0B: (4, True), 0x0C: (8, True)}
    if encoding & 0x0F not in sizes or encoding & 0x70 not in (0x00, 0x10):
        raise ParseError("cannot read unwind table", f"pointer encoding {encoding:#x}", "unknown")
    size, signed = sizes[encoding & 0x0F]
    value = body.uint(size, signed=signed)
    return value + here if encoding & 0x70 == 0x10 else value

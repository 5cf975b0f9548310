"""ELF64 little-endian headers: segments, sections, the dynamic table, the build id."""

from __future__ import annotations

import struct
from typing import NamedTuple

from stallscope.parser.errors import ParseError
from stallscope.parser.source import Source

__all__ = ["Elf", "Section", "Segment", "cstring", "load"]

PT_LOAD, PT_DYNAMIC, PT_INTERP, PT_NOTE, PT_GNU_EH_FRAME = 1, 2, 3, 4, 0x6474E550
PF_X = 1
ET_EXEC, ET_DYN = 2, 3
MACHINES = {62: "x86_64", 183: "aarch64"}
DT_NEEDED, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SONAME = 1, 4, 5, 6, 10, 14
DT_GNU_HASH, DT_VERSYM, DT_FLAGS_1 = 0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFFB
DF_1_PIE = 0x08000000
MAX_SEGMENTS, MAX_SECTIONS, MAX_DYNAMIC, MAX_NOTES = 512, 65536, 4096, 65536
MAX_NEEDED, MAX_NAME, MAX_NAMED = 256, 512, 256

_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_PHDR = struct.Struct("<IIQQQQQQ")
_SHDR = struct.Struct("<IIQQQQIIQQ")
_DYN = struct.Struct("<qQ")


class Segment(NamedTuple):
    """One program header; offsets, addresses and sizes in bytes."""

    kind: int
    flags: int
    offset: int
    vaddr: int
    filesz: int
    memsz: int


class Section(NamedTuple):
    """One section header; offsets, addresses and sizes in bytes. `name`: offset in the table of section names."""

    kind: int
    vaddr: int
    offset: int
    size: int
    link: int
    name: int


class Elf:
    """The headers of one ELF file. Nothing in them has been checked but the ranges that were read."""

    __slots__ = (
        "dynamic",
        "kind",
        "loads",
        "machine",
        "names_index",
        "needed_offsets",
        "sections",
        "segments",
        "source",
    )

    def __init__(self, source: Source, kind: int, machine: int, segments: list[Segment]) -> None:
        self.source = source
        self.kind = kind
        self.machine = MACHINES.get(machine, str(machine))
        self.segments = segments
        self.loads = [s for s in segments if s.kind == PT_LOAD]
        self.sections: list[Section] = []
        self.names_index = 0
        self.dynamic: dict[int, int] = {}
        self.needed_offsets: list[int] = []

    def first(self, kind: int) -> Segment | None:
        """Return the first segment of a kind, or None."""
        return next((s for s in self.segments if s.kind == kind), None)

    def section(self, name: bytes) -> Section | None:
        """Return the first section of a name (at most 32 bytes), or None."""
        if not 0 < self.names_index < len(self.sections):
            return None
        names = self.sections[self.names_index]
        wanted = name + b"\0"
        for section in self.sections[:MAX_NAMED]:
            at = names.offset + section.name
            inside = section.name < names.size and at + len(wanted) <= self.source.size
            if inside and self.source.read(at, len(wanted)) == wanted:
                return section
        return None

    def offset_of(self, vaddr: int, *, executable: bool = False) -> int | None:
        """Return the file offset of a virtual address, or None where no (executable) segment holds it."""
        for seg in self.loads:
            if seg.vaddr <= vaddr < seg.vaddr + seg.filesz and (not executable or seg.flags & PF_X):
                offset = seg.offset + vaddr - seg.vaddr
                return offset if offset < self.source.size else None
        return None

    def vaddr_of(self, offset: int) -> int | None:
        """Return the virtual address of a file offset in an executable segment, or None.

        The bytes round a segment's ends are mapped too (whole pages): a page-sized margin would make the answer
        ambiguous, so only the segment itself counts.
        """
        for seg in self.loads:
            if seg.flags & PF_X and seg.offset <= offset < seg.offset + seg.filesz:
                return seg.vaddr + offset - seg.offset
        return None

    def at(self, vaddr: int, length: int) -> bytes:
        """Return `length` bytes of the file at a virtual address.

        Raises:
            ParseError: the address is in no segment, or the range leaves the file.
        """
        offset = self.offset_of(vaddr)
        if offset is None:
            raise self.source.error(f"address {vaddr:#x} is in no loaded segment")
        return self.source.read(offset, length)

    def is_program(self) -> bool:
        """Tell a program (also a position-independent one) from a shared library."""
        if self.kind == ET_EXEC or self.dynamic.get(DT_FLAGS_1, 0) & DF_1_PIE:
            return True
        return self.first(PT_INTERP) is not None and DT_SONAME not in self.dynamic

    def build_id(self) -> str | None:
        """Return the GNU build id as hex digits, or None."""
        for seg in self.segments:
            if seg.kind == PT_NOTE and seg.filesz <= MAX_NOTES:
                found = _build_id(self.source.read(seg.offset, seg.filesz))
                if found:
                    return found
        return None

    def dynamic_string(self, offset: int | None) -> str | None:
        """Return the string at an offset of DT_STRTAB, or None when there is none within 512 bytes."""
        table = self.dynamic.get(DT_STRTAB)
        if table is None or offset is None or offset >= self.dynamic.get(DT_STRSZ, 0):
            return None
        start = self.offset_of(table + offset)
        if start is None:
            return None
        text = cstring(self.source.read(start, min(MAX_NAME, self.source.size - start)), 0)
        return text.decode("ascii", "replace") if text is not None else None

    def needed(self) -> list[str]:
        """Return the names of the libraries this file asks the loader for (at most 256)."""
        names = (self.dynamic_string(o) for o in self.needed_offsets[:MAX_NEEDED])
        return [name for name in names if name]


def cstring(data: bytes, offset: int) -> bytes | None:
    """Return the bytes from `offset` up to the next NUL, or None when there is no NUL."""
    end = data.find(b"\0", offset)
    return data[offset:end] if end >= 0 else None


def load(source: Source) -> Elf:
    """Read the headers of a 64-bit little-endian ELF file.

    Section headers that can't be read are left out, as the dynamic loader never looks at them.

    Raises:
        ParseError: not such a file, or its program headers or dynamic table are damaged.
    """
    head = source.read(0, min(source.size, _EHDR.size))
    if len(head) < _EHDR.size or head[:4] != b"\x7fELF":
        raise source.error("not an ELF file")
    if head[4:6] != b"\x02\x01":
        raise source.error("not a 64-bit little-endian ELF file")
    fields = _EHDR.unpack(head)
    kind, machine, phoff, phentsize, phnum = fields[1], fields[2], fields[5], fields[9], fields[10]
    elf = Elf(source, kind, machine, _segments(source, phoff, phentsize, phnum))
    elf.sections = _sections(source, fields[6], fields[11], fields[12])
    elf.names_index = fields[13]
    _load_dynamic(elf)
    return elf


def _segments(source: Source, offset: int, entsize: int, count: int) -> list[Segment]:
    """Read the program headers; raises ParseError when there are none or over 512."""
    if entsize != _PHDR.size or not 0 < count <= MAX_SEGMENTS:
        raise source.error(f"{count} program headers of {entsize} bytes")
    table = _PHDR.iter_unpack(source.read(offset, count * entsize))
    return [Segment(k, f, off, va, filesz, memsz) for k, f, off, va, _pa, filesz, memsz, _al in table]


def _sections(source: Source, offset: int, entsize: int, count: int) -> list[Section]:
    """Read the section headers; an absent or damaged table gives an empty list."""
    if not offset or entsize != _SHDR.size:
        return []
    try:
        if not count:  # over 65279 sections: the count stands in the size of section 0
            count = _SHDR.unpack(source.read(offset, entsize))[5]
        if count > MAX_SECTIONS:
            return []
        table = _SHDR.iter_unpack(source.read(offset, count * entsize))
    except ParseError:
        return []
    return [Section(k, va, off, size, link, name) for name, k, _f, va, off, size, link, _i, _a, _e in table]


def _load_dynamic(elf: Elf) -> None:
    """Fill `dynamic` (first value a tag) and `needed_offsets`."""
    seg = elf.first(PT_DYNAMIC)
    if seg is None:
        return
    size = min(seg.filesz, MAX_DYNAMIC * _DYN.size)
    for tag, value in _DYN.iter_unpack(elf.source.read(seg.offset, size - size % _DYN.size)):
        if tag == 0:
            return
        if tag == DT_NEEDED:
            elf.needed_offsets.append(value)
        elf.dynamic.setdefault(tag, value)


def _build_id(notes: bytes) -> str | None:
    """Find the GNU build id among ELF notes; None when absent or not 1 to 64 bytes long."""
    at = 0
    while at + 12 <= len(notes):
        namesz, descsz, kind = struct.unpack_from("<III", notes, at)
        desc = at + 12 + (namesz + 3 & ~3)
        if kind == 3 and notes[at + 12 : at + 16] == b"GNU\0" and namesz == 4 and 0 < descsz <= 64:
            return notes[desc : desc + descsz].hex() or None
        at = desc + (descsz + 3 & ~3)
    return None

"""Finds wanted names in an ELF file's symbol tables, reading only those tables."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from stallscope.parser import elf as e
from stallscope.parser.elf import Elf

__all__ = ["Match", "Scan", "Table", "dynamic_table", "full_table", "functions", "scan", "sized_functions"]

STT_NOTYPE, STT_FUNC, STT_GNU_IFUNC = 0, 2, 10
SHT_SYMTAB, SHT_STRTAB, SHT_DYNSYM = 2, 3, 11
SHN_ABS = 0xFFF1
MAX_SYMBOLS = 2_000_000
MAX_STRINGS = 64 << 20
MAX_MATCHES = 65_536
CHUNK = 32_768
STEM = 4

_SYM = struct.Struct("<IBBHQQ")
_GNU_HASH = struct.Struct("<IIII")


class Table(NamedTuple):
    """Where a symbol table and its strings lie: file offsets, `length` symbols of 24 bytes, sizes in bytes."""

    name: str
    offset: int
    length: int
    strings: int
    strings_size: int
    versions: int | None


class Match(NamedTuple):
    """A defined function of a wanted name. `rank`: lower is the better one among several of the same name."""

    rank: int
    value: int
    size: int
    ifunc: bool
    table: str


class Scan:
    """What the tables looked through so far say about the wanted names."""

    __slots__ = ("defined", "imported", "stems", "wanted")

    def __init__(self, wanted: frozenset[str]) -> None:
        self.wanted = {name.encode("ascii", "replace"): name for name in wanted}
        self.stems = frozenset(name[:STEM] for name in self.wanted)
        self.defined: dict[str, Match] = {}
        self.imported: set[str] = set()

    def complete(self) -> bool:
        """Tell whether every wanted name has been found defined."""
        return len(self.defined) == len(self.wanted)


def dynamic_table(elf: Elf) -> Table | None:
    """Locate .dynsym through the dynamic table, as the loader does; None for a file without one.

    Raises:
        ParseError: the table's length can't be found, or it has over two million symbols.
    """
    address, strings = elf.dynamic.get(e.DT_SYMTAB), elf.dynamic.get(e.DT_STRTAB)
    if address is None or strings is None:
        return None
    offset, strings_offset = elf.offset_of(address), elf.offset_of(strings)
    if offset is None or strings_offset is None:
        raise elf.source.error("the dynamic symbol table lies in no loaded segment")
    versions = elf.offset_of(elf.dynamic.get(e.DT_VERSYM, -1))
    count = _dynamic_count(elf, address)
    return _checked(elf, Table("dynsym", offset, count, strings_offset, elf.dynamic.get(e.DT_STRSZ, 0), versions))


def full_table(elf: Elf) -> Table | None:
    """Locate .symtab through the section headers; None for a stripped file.

    Raises:
        ParseError: its string table is not one, or it has over two million symbols.
    """
    section = next((s for s in elf.sections if s.kind == SHT_SYMTAB and s.size), None)
    if section is None:
        return None
    strings = elf.sections[section.link] if section.link < len(elf.sections) else None
    if strings is None or strings.kind != SHT_STRTAB:
        raise elf.source.error("the symbol table has no string table")
    count = section.size // _SYM.size
    return _checked(elf, Table("symtab", section.offset, count, strings.offset, strings.size, None))


def _checked(elf: Elf, table: Table) -> Table:
    """Return the table; raises ParseError where it is larger than the parser looks through."""
    if table.length > MAX_SYMBOLS or table.strings_size > MAX_STRINGS:
        raise elf.source.error(f".{table.name} has {table.length} symbols, {table.strings_size} bytes of names")
    return table


def _dynamic_count(elf: Elf, address: int) -> int:
    """Number of dynamic symbols: by section header where it agrees, else by either hash table."""
    for section in elf.sections:
        if section.kind == SHT_DYNSYM and section.vaddr == address:
            return section.size // _SYM.size
    if e.DT_HASH in elf.dynamic:
        count: int = struct.unpack("<II", elf.at(elf.dynamic[e.DT_HASH], 8))[1]
        return count
    if e.DT_GNU_HASH in elf.dynamic:
        return _gnu_hash_count(elf, elf.dynamic[e.DT_GNU_HASH])
    raise elf.source.error("the dynamic symbol table has no hash table")


def _gnu_hash_count(elf: Elf, address: int) -> int:
    """Number of dynamic symbols: the end of the chain that starts last."""
    buckets, first, bloom, _shift = _GNU_HASH.unpack(elf.at(address, _GNU_HASH.size))
    if buckets > MAX_SYMBOLS or bloom > MAX_SYMBOLS:
        raise elf.source.error(f"a hash table of {buckets} buckets")
    start = address + _GNU_HASH.size + bloom * 8
    last = max(struct.unpack(f"<{buckets}I", elf.at(start, buckets * 4)), default=0)
    if last < first:
        return int(first)
    chain = start + buckets * 4 - first * 4
    while last < MAX_SYMBOLS:
        word = elf.at(chain + last * 4, 4)
        last += 1
        if word[0] & 1:
            return last
    raise elf.source.error("an endless hash chain")


def scan(elf: Elf, table: Table, into: Scan) -> None:
    """Look every symbol of a table up among the wanted names.

    Raises:
        ParseError: the table leaves the file, or over 65536 symbols look like wanted ones.
    """
    strings = elf.source.read(table.strings, table.strings_size)
    versions = _versions(elf, table)
    left = MAX_MATCHES
    for index, entry in _candidates(elf, table, strings, into.stems):
        left -= 1
        if left < 0:
            raise elf.source.error("too many symbols of the wanted names")
        name = into.wanted.get(_plain_name(strings, entry[0]))
        if name is not None:
            hidden = bool(versions) and versions[index] & 0x8000 != 0
            _note(into, name, entry, hidden=hidden, table=table.name)


def _plain_name(strings: bytes, offset: int) -> bytes:
    """Return a symbol's name without its version; .symtab writes it as `name@@VERSION`."""
    return strings[offset : offset + 256].split(b"\0", 1)[0].split(b"@", 1)[0]


def _candidates(
    elf: Elf, table: Table, strings: bytes, stems: frozenset[bytes]
) -> Iterator[tuple[int, tuple[int, int, int, int, int, int]]]:
    """Yield (index, symbol) for symbols whose first four letters are wanted: the one test each symbol pays for."""
    for start in range(0, table.length, CHUNK):
        length = min(CHUNK, table.length - start) * _SYM.size
        chunk = elf.source.read(table.offset + start * _SYM.size, length)
        for index, entry in enumerate(_SYM.iter_unpack(chunk), start):
            name = entry[0]
            if strings[name : name + STEM] in stems:
                yield index, entry


def _versions(elf: Elf, table: Table) -> tuple[int, ...]:
    """Return the version index of each symbol, or nothing where the file has no (readable) versions."""
    if table.versions is None or table.versions + table.length * 2 > elf.source.size:
        return ()
    words: tuple[int, ...] = struct.unpack(f"<{table.length}H", elf.source.read(table.versions, table.length * 2))
    return words


def _note(into: Scan, name: str, entry: tuple[int, int, int, int, int, int], *, hidden: bool, table: str) -> None:
    """Record one symbol of a wanted name: defined, imported, or neither (data, absolute, empty)."""
    _name, info, _other, section, value, size = entry
    kind, binding = info & 15, info >> 4
    if section == 0 or value == 0:
        if section == 0 and kind in (STT_NOTYPE, STT_FUNC):
            into.imported.add(name)
        return
    if kind not in (STT_FUNC, STT_GNU_IFUNC) or section == SHN_ABS:
        return
    # One name at several addresses: old versions are hidden, a file-local function may share the name.
    rank = 4 * (table != "dynsym") + 2 * hidden + (binding == 0)
    known = into.defined.get(name)
    if known is None or rank < known.rank:
        into.defined[name] = Match(rank, value, size, kind == STT_GNU_IFUNC, table)


def functions(elf: Elf, table: Table) -> Iterator[tuple[int, int, bytes]]:
    """Yield (address, size in bytes, name) of every defined function of a table."""
    for value, size, name in sized_functions(elf, table):
        yield value, size, name()


def sized_functions(elf: Elf, table: Table) -> Iterator[tuple[int, int, Callable[[], bytes]]]:
    """Yield (address, size in bytes, what reads its name) of every defined function of a table."""
    strings = elf.source.read(table.strings, table.strings_size)
    for start in range(0, table.length, CHUNK):
        length = min(CHUNK, table.length - start) * _SYM.size
        for name, info, _other, section, value, size in _SYM.iter_unpack(
            elf.source.read(table.offset + start * _SYM.size, length)
        ):
            if info & 15 == STT_FUNC and section and value:
                yield value, size, partial(_plain_name, strings, name)

"""The members of one struct, from the DWARF (version 2 to 5, 32-bit) of an ELF file.

A full reader takes seconds and hundreds of megabytes. Here the outermost entries of the first units are stepped over,
until one is the struct: at most 8 MiB of .debug_info and 100,000 entries. Names by index (DW_FORM_strx) and compressed
sections are not read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from stallscope.parser.elf import Elf, cstring

__all__ = ["Layout", "layout_of"]

# DWARF 5 standard, section 7.5.
UNIT_COMPILE = 1
TAG_MEMBER, TAG_STRUCTURES = 0x0D, (0x02, 0x13)  # class_type, structure_type
AT_SIBLING, AT_NAME, AT_BYTE_SIZE, AT_LOCATION = 0x01, 0x03, 0x0B, 0x38
FORM_STRING, FORM_SDATA, FORM_STRP, FORM_UDATA, FORM_REF4, FORM_IMPLICIT = 0x08, 0x0D, 0x0E, 0x0F, 0x13, 0x21
FIXED = {0x05: 2, 0x06: 4, 0x07: 8, 0x0B: 1, 0x0C: 1, 0x0E: 4, 0x10: 4, 0x11: 1, 0x12: 2, 0x13: 4, 0x14: 8, 0x17: 4,
         0x19: 0, 0x1C: 4, 0x1D: 4, 0x1E: 16, 0x1F: 4, 0x20: 8, 0x21: 0, 0x24: 8, 0x25: 1, 0x26: 2, 0x27: 3, 0x28: 4,
         0x29: 1, 0x2A: 2, 0x2B: 3, 0x2C: 4}  # fmt: skip
NUMBERS = (0x05, 0x06, 0x07, 0x0B, FORM_REF4)
ULEBS = (FORM_SDATA, FORM_UDATA, 0x15, 0x1A, 0x1B, 0x22, 0x23)
BLOCKS = {0x0A: 1, 0x03: 2, 0x04: 4}
BLOCK_ULEB = (0x09, 0x18)

MAX_INFO, MAX_STRINGS, MAX_ABBREVIATIONS = 8 << 20, 32 << 20, 16 << 20
MAX_UNITS, MAX_CODES, MAX_ENTRIES, MAX_SEEN = 4096, 65_536, 20_000, 100_000

_Attribute = tuple[int, int, int]  # name, form, value of an implicit constant


class Layout(NamedTuple):
    """A struct: its size and the offset of each member with a name, in bytes."""

    size: int
    members: dict[str, int]


class _Abbreviation(NamedTuple):
    tag: int
    has_children: bool
    attributes: list[_Attribute]


class _Unit(NamedTuple):
    start: int
    first: int
    end: int
    abbreviations: int
    address_bytes: int


class _Cursor:
    """Reads on from a position of .debug_info or .debug_abbrev. Raises ParseError at its end."""

    def __init__(self, data: bytes, at: int, end: int, elf: Elf) -> None:
        self.data, self.at, self.end, self._elf = data, at, min(end, len(data)), elf

    def take(self, length: int) -> bytes:
        """The next bytes."""
        if length > self.end - self.at:
            raise self._elf.source.error("debug information ends in the middle of an entry")
        self.at += length
        return self.data[self.at - length : self.at]

    def number(self, length: int) -> int:
        """An integer of so many bytes."""
        return int.from_bytes(self.take(length), "little")

    def uleb(self) -> int:
        """A ULEB128 of at most 10 bytes; of an SLEB128 only the length is right."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.number(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise self._elf.source.error("a number of more than 10 bytes in the debug information")

    def string(self) -> bytes:
        """Up to the next NUL."""
        end = self.data.find(b"\0", self.at, self.end)
        if end < 0:
            raise self._elf.source.error("a string without an end in the debug information")
        return self.take(end + 1 - self.at)[:-1]


class _Reader:
    def __init__(self, elf: Elf, info: bytes, abbreviations: bytes, strings: bytes) -> None:
        self._elf, self._info, self._abbreviations, self._strings = elf, info, abbreviations, strings
        self._tables: dict[int, dict[int, _Abbreviation]] = {}
        self._left = MAX_SEEN

    def find(self, name: bytes, member: str) -> Layout | None:
        """The first definition of a struct of that name that has that member."""
        for unit in self._units():
            for start in self._outermost(unit, name + b"\0"):
                found = self._struct(unit, start)
                if found and member in found.members:
                    return found
            if self._left <= 0:
                break
        return None

    def _outermost(self, unit: _Unit, name: bytes) -> Iterator[int]:
        """Where the structs of that name begin that stand in no other entry."""
        cursor, depth = _Cursor(self._info, unit.first, unit.end, self._elf), 0
        table = self._table(unit.abbreviations)
        while cursor.at < cursor.end and self._left > 0:
            self._left -= 1
            start, code = cursor.at, cursor.uleb()
            if code == 0:
                depth -= 1
                continue
            abbreviation = table.get(code)
            if abbreviation is None:
                return
            values = self._values(cursor, abbreviation, unit)
            named = values.get(AT_NAME)
            is_whole = depth == 1 and abbreviation.tag in TAG_STRUCTURES and abbreviation.has_children
            if is_whole and named is not None and self._strings.startswith(name, named):
                yield start
            sibling = values.get(AT_SIBLING)
            if abbreviation.has_children and depth and sibling is not None and unit.start + sibling > cursor.at:
                cursor.at = unit.start + sibling
            else:
                depth += abbreviation.has_children

    def _units(self) -> Iterator[_Unit]:
        at = 0
        for _ in range(MAX_UNITS):
            if at + 12 > len(self._info):
                return
            (length, version) = struct.unpack_from("<IH", self._info, at)
            if length >= 0xFFFFFFF0 or not 2 <= version <= 5:
                return
            head, (abbreviations, address_bytes) = 11, struct.unpack_from("<IB", self._info, at + 6)
            if version == 5:
                head, (kind, address_bytes, abbreviations) = 12, struct.unpack_from("<BBI", self._info, at + 6)
            if version < 5 or kind == UNIT_COMPILE:
                yield _Unit(at, at + head, at + 4 + length, abbreviations, address_bytes)
            at += 4 + length

    def _table(self, offset: int) -> dict[int, _Abbreviation]:
        if offset not in self._tables:
            self._tables[offset] = self._read_table(offset)
        return self._tables[offset]

    def _read_table(self, offset: int) -> dict[int, _Abbreviation]:
        cursor = _Cursor(self._abbreviations, offset, len(self._abbreviations), self._elf)
        table: dict[int, _Abbreviation] = {}
        while len(table) < MAX_CODES and (code := cursor.uleb()):
            tag, has_children = cursor.uleb(), cursor.number(1) == 1
            attributes: list[_Attribute] = []
            while len(attributes) < 256:
                name, form = cursor.uleb(), cursor.uleb()
                value = cursor.uleb() if form == FORM_IMPLICIT else 0
                if not name and not form:
                    break
                attributes.append((name, form, value))
            table[code] = _Abbreviation(tag, has_children, attributes)
        return table

    def _struct(self, unit: _Unit, start: int) -> Layout | None:
        cursor = _Cursor(self._info, start, unit.end, self._elf)
        table, depth = self._table(unit.abbreviations), 0
        members: dict[str, int] = {}
        size: int | None = None
        for _ in range(MAX_ENTRIES):
            code = cursor.uleb()
            if code == 0:
                depth -= 1
                if depth <= 0:
                    break
                continue
            abbreviation = table.get(code)
            if abbreviation is None:
                return None
            values = self._values(cursor, abbreviation, unit)
            name, place = values.get(AT_NAME), values.get(AT_LOCATION)
            if depth == 0:
                size = values.get(AT_BYTE_SIZE)
            elif depth == 1 and abbreviation.tag == TAG_MEMBER and name is not None and place is not None:
                members.setdefault(self._text(name), place)
            depth += abbreviation.has_children
        return Layout(size, members) if size is not None else None

    def _text(self, name: int) -> str:
        return (cstring(self._strings[name : name + 256], 0) or b"").decode("ascii", "replace")

    def _values(self, cursor: _Cursor, abbreviation: _Abbreviation, unit: _Unit) -> dict[int, int]:
        """Attribute -> number; a name is its offset in .debug_str."""
        values: dict[int, int] = {}
        for attribute, form, implicit in abbreviation.attributes:
            value = self._value(cursor, form, unit)
            if form == FORM_IMPLICIT:
                value = implicit
            if value is not None and (attribute != AT_NAME or form == FORM_STRP):
                values[attribute] = value
        return values

    def _value(self, cursor: _Cursor, form: int, unit: _Unit) -> int | None:
        if form == FORM_STRP or form in NUMBERS:
            return cursor.number(FIXED[form])
        if form in FIXED:
            cursor.take(FIXED[form])
        elif form in ULEBS:
            value = cursor.uleb()
            return value if form == FORM_UDATA or (form == FORM_SDATA and value < 64) else None
        elif form == FORM_STRING:
            cursor.string()
        elif form in BLOCKS:
            cursor.take(cursor.number(BLOCKS[form]))
        elif form in BLOCK_ULEB:
            cursor.take(cursor.uleb())
        elif form == 0x01:
            cursor.take(unit.address_bytes)
        else:
            raise self._elf.source.error(f"debug information of form {form:#x}")
        return None


def layout_of(elf: Elf, name: str, member: str) -> Layout | None:
    """Members of the first struct `name` that has a member `member`; None where the file's DWARF does not tell.

    Raises:
        ParseError: the debug information is damaged.
    """
    parts: list[bytes] = []
    limits = ((b".debug_info", MAX_INFO), (b".debug_abbrev", MAX_ABBREVIATIONS), (b".debug_str", MAX_STRINGS))
    for section_name, limit in limits:
        section = elf.section(section_name)
        if section is None or not section.size:
            return None
        parts.append(elf.source.read(section.offset, min(section.size, limit)))
    try:
        return _Reader(elf, *parts).find(name.encode("ascii"), member)
    except struct.error as error:
        raise elf.source.error("debug information of an impossible size") from error

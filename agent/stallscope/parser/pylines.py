"""The request "lines": which source line an instruction of a Python code object belongs to, by its line table.

Three formats: co_lnotab up to CPython 3.9 (Objects/lnotab_notes.txt), PEP 626's table in 3.10, and location entries
with column numbers from 3.11 on (Objects/locations.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stallscope.parser.errors import ParseError

__all__ = ["find_lines", "line_at"]

MAX_TABLES, MAX_TABLE_BYTES, MAX_LINE = 64, 1 << 20, 1 << 31
NO_LINE_310 = -128


def find_lines(request: dict[str, Any]) -> dict[str, Any]:
    """Answer the request: `tables` holds [minor version, first line, instruction's offset in bytes, table].

    Returns:
        lines: for each of them the line, 0 where the instruction has none, -1 where the table does not reach it.

    Raises:
        ParseError: too many tables, or one that is too long.
    """
    tables = request["tables"]
    if len(tables) > MAX_TABLES or any(len(table) > MAX_TABLE_BYTES for *_, table in tables):
        raise ParseError("cannot tell lines", "line tables", "too many or too long")
    return {"lines": [_sane(minor, first, at, table) for minor, first, at, table in tables]}


def _sane(minor: int, first: int, at: int, table: bytes) -> int:
    """`line_at` for tables that may be anything."""
    try:
        line = line_at(minor, first, at, table)
    except IndexError:
        return -1
    return line if 0 <= line < MAX_LINE else -1


def line_at(minor: int, first: int, at: int, table: bytes) -> int:
    """The line of the instruction at byte offset `at`, 0 without one, -1 outside the table.

    Raises:
        IndexError: the table is cut off.
    """
    if minor <= 9:
        return _line_by_lnotab(table, first, at)
    entries = _entries_310(table, first) if minor == 10 else _entries_311(table, first)
    for end, line in entries:
        if at < end:
            return line if line is not None else 0
    return -1


def _line_by_lnotab(table: bytes, first: int, at: int) -> int:
    """Pairs (bytes of code, signed lines); the last line reaches to the end of the code."""
    reached, line = 0, first
    for index in range(0, len(table) - 1, 2):
        reached += table[index]
        if reached > at:
            break
        line += _signed(table[index + 1])
    return line


def _signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def _entries_310(table: bytes, first: int) -> Iterator[tuple[int, int | None]]:
    """(end offset in bytes, line) of pairs (bytes of code, signed lines)."""
    end, line = 0, first
    for index in range(0, len(table) - 1, 2):
        end += table[index]
        delta = _signed(table[index + 1])
        if delta != NO_LINE_310:
            line += delta
        yield end, None if delta == NO_LINE_310 else line


def _entries_311(table: bytes, first: int) -> Iterator[tuple[int, int | None]]:
    """(end offset in bytes, line) of location entries; kinds as in Objects/locations.md."""
    at, end, line = 0, 0, first
    while at < len(table):
        kind, units = table[at] >> 3 & 15, (table[at] & 7) + 1
        at += 1
        end += 2 * units
        if kind in (13, 14):  # line only; line and columns
            delta, at = _signed_varint(table, at)
            line += delta
            for _ in range(3 * (kind == 14)):
                _, at = _varint(table, at)
        elif kind >= 10 and kind != 15:  # one line form
            line += kind - 10
            at += 2
        elif kind != 15:  # short form
            at += 1
        yield end, None if kind == 15 else line


def _varint(table: bytes, at: int) -> tuple[int, int]:
    """(value, where it ends): six bits a byte, the lowest first. Raises IndexError."""
    value = shift = 0
    while True:
        byte = table[at]
        at += 1
        value |= (byte & 63) << shift
        shift += 6
        if not byte & 64 or shift > 36:
            return value, at


def _signed_varint(table: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(table, at)
    return -(value >> 1) if value & 1 else value >> 1, at

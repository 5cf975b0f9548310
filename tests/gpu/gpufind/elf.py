"""What a shared library defines, and what stands at the start of each function."""

from __future__ import annotations

import mmap
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_DYNSYM, _LOAD = 11, 1
_FUNCTIONS = (2, 10)  # STT_FUNC, STT_GNU_IFUNC
ENDBR64 = bytes.fromhex("f30f1efa")


class Export(NamedTuple):
    """A defined function: where it lies in the file, and its first bytes."""

    name: str
    offset: int
    first: bytes

    @property
    def probe_offset(self) -> int:
        """Where a probe is cheap: behind endbr64, as stallscope does it."""
        return self.offset + 4 if self.first.startswith(ENDBR64) else self.offset


def exports(path: str) -> dict[str, Export]:
    """Functions in the dynamic symbol table, by name.

    Raises:
        OSError: the file can't be read.
        ValueError: it is no 64-bit little-endian ELF file with section headers.
    """
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is no 64-bit little-endian ELF file")
        segments = list(_segments(data))
        return {name: _export(data, segments, name, value) for name, value in _functions(data)}


def _table(data: mmap.mmap, at: int, entry_size: int, count: int, shape: struct.Struct) -> Iterator[tuple[int, ...]]:
    for index in range(count):
        yield shape.unpack_from(data, at + index * entry_size)


def _segments(data: mmap.mmap) -> Iterator[tuple[int, int, int]]:
    (at,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    for kind, _, offset, address, _, file_size, _, _ in _table(data, at, size, count, _SEGMENT):
        if kind == _LOAD:
            yield address, offset, file_size


def _functions(data: mmap.mmap) -> Iterator[tuple[str, int]]:
    (at,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = list(_table(data, at, size, count, _SECTION))
    for section in (s for s in sections if s[1] == _DYNSYM):
        names_at = sections[section[6]][4]
        for name, info, _, index, value, _ in _table(data, section[4], section[9], section[5] // section[9], _SYMBOL):
            if index and value and info & 15 in _FUNCTIONS:
                start = names_at + name
                yield data[start : data.find(b"\0", start)].decode(), value


def _export(data: mmap.mmap, segments: list[tuple[int, int, int]], name: str, value: int) -> Export:
    for address, offset, size in segments:
        if address <= value < address + size:
            at = value - address + offset
            return Export(name, at, data[at : at + 8])
    raise ValueError(f"{name} lies outside the file")


def first_instruction(first: bytes) -> str:
    """What an x86-64 function starts with, as far as a uprobe's cost depends on it."""
    if first.startswith(ENDBR64):
        return f"endbr64, then {first_instruction(first[4:])}"
    if first and 0x50 <= first[0] <= 0x57:
        return "push"
    if len(first) > 1 and first[0] == 0x41 and 0x50 <= first[1] <= 0x57:
        return "push"
    if first.startswith(bytes.fromhex("0f1f440000")):
        return "nop5"
    return "jmp" if first[:1] in (b"\xe9", b"\xeb") or first[:2] == b"\xff\x25" else "other"


def instruction_classes(found: Iterable[Export]) -> dict[str, list[str]]:
    """Names by first instruction, the commonest class first."""
    classes: defaultdict[str, list[str]] = defaultdict(list)
    for export in found:
        classes[first_instruction(export.first)].append(export.name)
    order = Counter({kind: len(names) for kind, names in classes.items()})
    return {kind: sorted(classes[kind]) for kind, _ in order.most_common()}

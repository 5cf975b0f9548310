"""Loads the prebuilt BPF object by bpf(2) alone: no libbpf, no LLVM, 0.1 s.

The object is ours (`clang -target bpf` of probes/stallscope.bpf.c) and decides what runs in the kernel: a file that
someone else could have written is refused. The reader knows what that compiler emits for that source, no more.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stallscope.capture.kernel import bpf
from stallscope.errors import CaptureProblem

__all__ = ["UPROBE_MULTI", "BpfObject", "MapSpec", "ProgramSpec", "load_object", "load_program", "read_object"]

_MAP_CREATE, _PROG_LOAD = 0, 5
_TRIES = 5
_KPROBE, _RAW_TRACEPOINT = 2, 17
UPROBE_MULTI = 48
_R_BPF_64_64 = 1
_PSEUDO_MAP_FD = 1
_SHF_EXEC = 4
_SHT_PROGBITS, _SHT_SYMTAB, _SHT_REL = 1, 2, 9
_STT_FUNC = 2
_LOG_BYTES = 1 << 20
_MAX_OBJECT_BYTES = 16 << 20


class MapSpec(NamedTuple):
    """A map as its BTF describes it; sizes in bytes, type and flags as in linux/bpf.h."""

    type: int
    key_size: int
    value_size: int
    max_entries: int
    flags: int


class ProgramSpec(NamedTuple):
    """A program: its section, its instructions, and (byte offset of an instruction, map name) where a map goes in."""

    section: str
    code: bytes
    map_uses: tuple[tuple[int, str], ...]


class BpfObject(NamedTuple):
    """All of an object file that is used."""

    maps: dict[str, MapSpec]
    programs: dict[str, ProgramSpec]
    license: bytes


class _Section(NamedTuple):
    name: str
    type: int
    flags: int
    offset: int
    size: int
    link: int
    info: int


class _Symbol(NamedTuple):
    name: str
    kind: int
    section: int
    value: int
    size: int


@dataclass
class _Elf:
    data: bytes
    sections: list[_Section]
    symbols: list[_Symbol]

    def content(self, section: _Section) -> bytes:
        return self.data[section.offset : section.offset + section.size]

    def named(self, name: str) -> bytes:
        return next((self.content(s) for s in self.sections if s.name == name), b"")


def _text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def _read_elf(data: bytes) -> _Elf:
    if data[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", data, 18) != (247,):
        raise ValueError("not a little-endian BPF object")
    (table,) = struct.unpack_from("<Q", data, 40)
    count, names_at = struct.unpack_from("<HH", data, 60)
    raw = [struct.unpack_from("<IIQQQQIIQQ", data, table + 64 * i) for i in range(count)]
    names = data[raw[names_at][4] :]
    sections = [_Section(_text(names, r[0]), r[1], r[2], r[4], r[5], r[6], r[7]) for r in raw]
    elf = _Elf(data, sections, [])
    for section in (s for s in sections if s.type == _SHT_SYMTAB):
        strings = elf.content(sections[section.link])
        for name, info, _, index, value, size in struct.iter_unpack("<IBBHQQ", elf.content(section)):
            elf.symbols.append(_Symbol(_text(strings, name), info & 15, index, value, size))
    return elf


# Of BTF only what a map definition is made of.
_INT, _PTR, _ARRAY, _STRUCT, _UNION, _ENUM, _TYPEDEF = 1, 2, 3, 4, 5, 6, 8
_QUALIFIERS = (_TYPEDEF, 9, 10, 11, 18)  # typedef, volatile, const, restrict, type tag
_FUNC_PROTO, _VAR, _DATASEC, _DECL_TAG, _ENUM64 = 13, 14, 15, 17, 19
_ITEM_BYTES = {_STRUCT: 12, _UNION: 12, _ENUM: 8, _FUNC_PROTO: 8, _DATASEC: 12, _ENUM64: 12}
_FIXED_BYTES = {_INT: 4, _ARRAY: 12, _VAR: 4, _DECL_TAG: 4}


class _BtfType(NamedTuple):
    name: str
    kind: int
    size_or_type: int
    items: bytes


class _Btf:
    """Types by number; number 0 is void."""

    def __init__(self, data: bytes) -> None:
        magic, _, _, header, types, types_size, strings, strings_size = struct.unpack_from("<HBBIIIII", data)
        if magic != 0xEB9F:
            raise ValueError("no BTF in it")
        self._strings = data[header + strings : header + strings + strings_size]
        self.types = [_BtfType("", 0, 0, b""), *self._read(data[header + types : header + types + types_size])]

    def _read(self, data: bytes) -> Iterator[_BtfType]:
        at = 0
        while at < len(data):
            name, info, size_or_type = struct.unpack_from("<III", data, at)
            kind, count = info >> 24 & 31, info & 0xFFFF
            length = _FIXED_BYTES.get(kind, 0) + _ITEM_BYTES.get(kind, 0) * count
            yield _BtfType(_text(self._strings, name), kind, size_or_type, data[at + 12 : at + 12 + length])
            at += 12 + length

    def _plain(self, number: int) -> _BtfType:
        found = self.types[number]
        while found.kind in _QUALIFIERS:
            found = self.types[found.size_or_type]
        return found

    def size_of(self, number: int) -> int:
        """Bytes that a value of the type takes."""
        found = self._plain(number)
        if found.kind == _PTR:
            return 8
        if found.kind == _ARRAY:
            return int.from_bytes(found.items[8:12], "little") * self.size_of(int.from_bytes(found.items[:4], "little"))
        return found.size_or_type

    def members(self, number: int) -> dict[str, int]:
        """Type numbers of a struct's members by name."""
        items = struct.iter_unpack("<III", self._plain(number).items)
        return {_text(self._strings, name): kind for name, kind, _ in items}

    def pointee(self, number: int) -> int:
        """Type number behind a pointer."""
        return self._plain(number).size_or_type

    def integer(self, number: int) -> int:
        """What __uint(name, value) hides: value is the length of an array behind a pointer."""
        array = self._plain(self.pointee(number))
        return int.from_bytes(array.items[8:12], "little")


def _map_spec(btf: _Btf, number: int) -> MapSpec:
    members = btf.members(number)
    sizes = [btf.size_of(btf.pointee(members[m])) if m in members else 0 for m in ("key", "value")]
    values = {m: btf.integer(members[m]) if m in members else 0 for m in ("type", "max_entries", "map_flags")}
    return MapSpec(values["type"], sizes[0], sizes[1], values["max_entries"], values["map_flags"])


def _map_specs(data: bytes) -> dict[str, MapSpec]:
    btf = _Btf(data)
    # In the file a DATASEC's variables are BTF type numbers; the trailing underscore is the dialect's (dialect.h).
    section = next(t for t in btf.types if t.kind == _DATASEC and t.name == ".maps")
    variables = [btf.types[number] for number, _, _ in struct.iter_unpack("<III", section.items)]
    return {v.name.removesuffix("_"): _map_spec(btf, v.size_or_type) for v in variables}


def _map_uses(elf: _Elf, index: int) -> list[tuple[int, str]]:
    uses = []
    for relocations in (s for s in elf.sections if s.type == _SHT_REL and s.info == index):
        for offset, info in struct.iter_unpack("<QQ", elf.content(relocations)):
            symbol = elf.symbols[info >> 32]
            if info & 0xFFFFFFFF != _R_BPF_64_64 or elf.sections[symbol.section].name != ".maps":
                raise ValueError(f"a reference to {symbol.name or 'a section'}, which is no map")
            uses.append((offset, symbol.name.removesuffix("_")))
    return uses


def _program_specs(elf: _Elf) -> dict[str, ProgramSpec]:
    programs = {}
    for index, section in enumerate(elf.sections):
        if section.type != _SHT_PROGBITS or not section.flags & _SHF_EXEC or not section.size:
            continue
        code, uses = elf.content(section), _map_uses(elf, index)
        for s in (s for s in elf.symbols if s.section == index and s.kind == _STT_FUNC):
            own = tuple((at - s.value, name) for at, name in uses if s.value <= at < s.value + s.size)
            programs[s.name] = ProgramSpec(section.name, code[s.value : s.value + s.size], own)
    return programs


def _trusted_bytes(path: Path) -> bytes:
    # Checked on the opened file, not on the path: what is checked is what is read.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_uid not in (0, os.geteuid()) or info.st_mode & stat.S_IWOTH:
            raise CaptureProblem(
                f"cannot load the BPF object {path}",
                why=f"uid {info.st_uid} owns it, mode {stat.S_IMODE(info.st_mode):04o}: others could have written it",
                hint=f"build it yourself (`make build`), or make it root's: chown root {path} && chmod 644 {path}",
            )
        return file.read(_MAX_OBJECT_BYTES)


def read_object(path: Path) -> BpfObject:
    """Maps and programs of the object file.

    Raises:
        CaptureProblem: not there, not trustworthy, or not what our compiler writes.
    """
    try:
        elf = _read_elf(_trusted_bytes(path))
        programs = _program_specs(elf)
        return BpfObject(_map_specs(elf.named(".BTF")), programs, elf.named("license").rstrip(b"\0"))
    except OSError as error:
        raise CaptureProblem(
            f"cannot read the BPF object {path}", why=error.strerror or str(error), hint="build it: make build"
        ) from error
    except (ValueError, IndexError, KeyError, StopIteration, struct.error) as error:
        raise CaptureProblem(
            f"cannot read the BPF object {path}",
            why=f"it is damaged ({error})",
            hint="build it again: make clean build",
        ) from error


def _kernel_name(name: str) -> bytes:
    return name.encode()[:15]


def create_map(name: str, spec: MapSpec) -> int:
    """Descriptor of a new map. Raises OSError."""
    sizes = struct.pack("<IIII", spec.type, spec.key_size, spec.value_size, spec.max_entries)
    attr = sizes + struct.pack("<III16s36x", spec.flags, 0, 0, _kernel_name(name))
    return bpf(_MAP_CREATE, attr)


def load_program(name: str, code: bytes, kind: int, attach_type: int, license_text: bytes) -> int:
    """Descriptor of a loaded program.

    Raises:
        OSError: the kernel refused; its text ends with what the verifier said, if it said anything.
    """
    instructions = ctypes.create_string_buffer(code, len(code))
    text = ctypes.create_string_buffer(license_text)
    head = struct.pack("<IIQQ", kind, len(code) // 8, ctypes.addressof(instructions), ctypes.addressof(text))

    def load(log_level: int, log_bytes: int, log_at: int) -> int:
        tail = struct.pack("<IIQII16sII64x", log_level, log_bytes, log_at, 0, 0, _kernel_name(name), 0, attach_type)
        for _ in range(_TRIES - 1):
            with suppress(BlockingIOError):  # EAGAIN: a signal came while the verifier was at work
                return bpf(_PROG_LOAD, head + tail)
        return bpf(_PROG_LOAD, head + tail)

    # A second try for the log: asked for at once it slows each load down.
    try:
        return load(0, 0, 0)
    except OSError as first:
        log = ctypes.create_string_buffer(_LOG_BYTES)
        try:
            return load(1, _LOG_BYTES, ctypes.addressof(log))
        except OSError:
            said = log.value.decode(errors="replace").strip()[-1500:]
            raise OSError(first.errno, f"{name}: {first.strerror}" + (f"\n{said}" if said else "")) from first


def _with_maps(program: ProgramSpec, maps: Mapping[str, int]) -> bytes:
    code = bytearray(program.code)
    for offset, name in program.map_uses:
        code[offset + 1] = code[offset + 1] & 0x0F | _PSEUDO_MAP_FD << 4
        struct.pack_into("<I", code, offset + 4, maps[name])
    return bytes(code)


def _kind_of(section: str, uprobes: int) -> tuple[int, int]:
    if section.startswith("raw_tracepoint/"):
        return _RAW_TRACEPOINT, 0
    if section.partition("/")[0] == "uprobe":
        return _KPROBE, uprobes
    raise ValueError(f"section {section}: no such kind of program")


def load_object(
    path: Path, sizes: Mapping[str, int], uprobes: int = UPROBE_MULTI
) -> tuple[dict[str, int], dict[str, int], dict[str, str]]:
    """Load all programs and maps; returns descriptors by program, by map, and each program's section.

    Args:
        sizes: max_entries by map name where the object's own shall not count (rings: bytes).
        uprobes: expected attach type of the probe programs: UPROBE_MULTI for those links, 0 for perf events.

    Raises:
        CaptureProblem: the file can't be used.
        OSError: the kernel refused; nothing stays open.
    """
    found = read_object(path)
    maps: dict[str, int] = {}
    programs: dict[str, int] = {}
    try:
        for name, spec in found.maps.items():
            maps[name] = create_map(name, spec._replace(max_entries=sizes.get(name, spec.max_entries)))
        for name, program in found.programs.items():
            code = _with_maps(program, maps)
            programs[name] = load_program(name, code, *_kind_of(program.section, uprobes), found.license)
    except BaseException:
        for fd in (*maps.values(), *programs.values()):
            os.close(fd)
        raise
    return programs, maps, {name: p.section for name, p in found.programs.items()}

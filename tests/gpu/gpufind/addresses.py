"""Whether cuGetProcAddress hands out the addresses that libcuda exports."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

from gpufind.channel import Channel, Unavailable
from gpufind.elf import exports
from gpufind.hooks import base_name, hooked_names, mapped_libraries
from gpufind.raw import Library, open_driver

_FLAGS = {"default": 0, "legacy": 1, "per-thread": 2}
_VERSIONS = (7000, 12000, 13000)


class _Mapping(NamedTuple):
    start: int
    end: int
    offset: int
    path: str


def _mappings() -> list[_Mapping]:
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        start, end = (int(edge, 16) for edge in fields[0].split("-"))
        found.append(_Mapping(start, end, int(fields[2], 16), fields[5] if len(fields) > 5 else "anonymous memory"))
    return found


def _where(address: int, maps: list[_Mapping]) -> tuple[str, int]:
    for m in maps:
        if m.start <= address < m.end:
            return m.path, address - m.start + m.offset
    return "nowhere", address


def _look_up(cuda: Library, name: str, version: int, flags: int) -> int:
    found, status = ctypes.c_void_p(), ctypes.c_int()
    arguments = (name.encode(), ctypes.byref(found), ctypes.c_int(version), ctypes.c_uint64(flags))
    if hasattr(cuda.cdll, "cuGetProcAddress_v2"):
        code = cuda.call("cuGetProcAddress_v2", *arguments, ctypes.byref(status))
    else:
        code = cuda.call("cuGetProcAddress", *arguments)
    return (found.value or 0) if code == 0 else 0


def addresses(channel: Channel) -> None:
    """One row a base name, version and flag: the export it is, or the place where it lies."""
    cuda = open_driver(channel.options)
    path = next((p for p, kind in mapped_libraries().items() if kind == "CUDA"), "")
    if not path:
        raise Unavailable("libcuda is not among the mapped files")
    by_offset: dict[int, list[str]] = {}
    for export in exports(path).values():
        by_offset.setdefault(export.offset, []).append(export.name)
    names = sorted({base_name(name) for name in hooked_names("CUDA")})
    channel.fact("addresses", [row for name in names for row in _rows(cuda, name, path, by_offset)])
    channel.fact("dlsym", _dlsym_agrees(cuda, path, by_offset))


def _rows(cuda: Library, name: str, path: str, by_offset: dict[int, list[str]]) -> list[dict[str, Any]]:
    rows, maps = [], _mappings()
    for flag_name, flags in _FLAGS.items():
        for version in _VERSIONS:
            address = _look_up(cuda, name, version, flags)
            where, offset = _where(address, maps) if address else ("not found", 0)
            same = sorted(by_offset.get(offset, [])) if where == path else []
            row = {"name": name, "flags": flag_name, "version": version}
            rows.append({**row, "exports": same, "file": where, "offset": offset})
    return rows


def _dlsym_agrees(cuda: Library, path: str, by_offset: dict[int, list[str]]) -> dict[str, Any]:
    """Whether dlsym gives what the symbol table says; an indirect function would differ."""
    other, maps = {}, _mappings()
    names = [name for name in hooked_names("CUDA") if hasattr(cuda.cdll, name)]
    for name in names:
        address = ctypes.cast(cuda.cdll[name], ctypes.c_void_p).value or 0
        where, offset = _where(address, maps)
        if where != path or name not in by_offset.get(offset, []):
            other[name] = f"{where}+{offset:#x}"
    return {"asked": len(names), "elsewhere": other}

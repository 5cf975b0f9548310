"""The compiled stub libraries and programs, and where their functions lie."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

__all__ = ["BUILD", "StubLibrary", "build_libraries", "build_program"]

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build" / "bench"
_FLAGS = ["-O2", "-std=gnu11", "-Wall", "-Wextra"]
# -fno-ipa-icf: or gcc would make one function of the identical ones.
_STUB_FLAGS = ["-fno-omit-frame-pointer", "-fno-ipa-icf", "-falign-functions=64", "-fPIC", "-shared"]
_PUSH = 0x55


@dataclass
class StubLibrary:
    """A library of byte-identical functions.

    Attributes:
        offsets: file offset of each function.
        addresses: its address relative to where the library is loaded.
    """

    path: Path
    offsets: list[int]
    addresses: list[int]


def _compile(words: list[str]) -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    subprocess.run(["gcc", *_FLAGS, *words], check=True)


def build_program(name: str, *, as_library: bool = False) -> Path:
    """Compiles bench/NAME.c; as a library its `main` can be called. Raises CalledProcessError."""
    out = BUILD / (f"lib{name}.so" if as_library else name)
    _compile([str(HERE / f"{name}.c"), *(["-shared", "-fPIC"] if as_library else []), "-o", str(out), "-ldl"])
    return out


def build_libraries(count: int) -> list[StubLibrary]:
    """That many copies of one library, each a file of its own. Raises CalledProcessError."""
    first = BUILD / "libstub0.so"
    _compile([*_STUB_FLAGS, "-fcf-protection=none", str(HERE / "stubs.c"), "-o", str(first)])
    paths = [first, *(BUILD / f"libstub{i}.so" for i in range(1, count))]
    for path in paths[1:]:
        shutil.copy(first, path)
    return [_read(path) for path in paths]


def _read(path: Path) -> StubLibrary:
    with path.open("rb") as file:
        elf = ELFFile(file)
        table = elf.get_section_by_name(".dynsym")
        assert isinstance(table, SymbolTableSection)
        symbols = sorted((s.name, s["st_value"], s["st_size"]) for s in table.iter_symbols() if s.name.startswith("f_"))
        offsets = [next(iter(elf.address_offsets(value))) for _, value, _ in symbols]
        _check(path, offsets, [size for _, _, size in symbols])
    return StubLibrary(path, offsets, [value for _, value, _ in symbols])


def _check(path: Path, offsets: list[int], sizes: list[int]) -> None:
    data = path.read_bytes()
    bodies = {data[at : at + size] for at, size in zip(offsets, sizes, strict=True)}
    if len(bodies) != 1 or len(set(offsets)) != len(offsets) or bodies.pop()[0] != _PUSH:
        raise RuntimeError(f"{path}: the functions are not byte-identical, distinct, and begun by a push")

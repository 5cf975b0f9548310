"""What the library needs and gives: it goes into strangers' processes."""

from __future__ import annotations

import re
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection
from shim_kit import SHIM

from stallscope.wire.hook_table import HOOKS

GETTERS = {"cuGetProcAddress", "cuGetProcAddress_v2", "cudaGetDriverEntryPoint", "cudaGetDriverEntryPoint_ptsz",
           "cudaGetDriverEntryPointByVersion", "cudaGetDriverEntryPointByVersion_ptsz"}  # fmt: skip
LOADER = {"dlsym", "dlvsym", "execve", "execv", "execvp", "execvpe", "execl", "execlp", "execle", "fexecve", "execveat",
          "posix_spawn", "posix_spawnp"}  # fmt: skip
# A hooked function must not come back to us, allocate, lock or print.
NEVER = re.compile(
    r"malloc|calloc|realloc|free|mutex|rwlock|sem_|printf|dlopen|dlerror|exit|abort|signal|setenv|getenv"
)


def dynamic(path: Path, tag: str) -> list[str]:
    with path.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".dynamic")
        assert isinstance(section, DynamicSection)
        return [getattr(entry, tag[3:].lower(), "") for entry in section.iter_tags() if entry.entry.d_tag == tag]


def symbols(path: Path, *, defined: bool) -> set[str]:
    with path.open("rb") as file:
        table = ELFFile(file).get_section_by_name(".dynsym")
        assert isinstance(table, SymbolTableSection)
        return {s.name for s in table.iter_symbols() if s.name and (s["st_shndx"] != "SHN_UNDEF") == defined}


def test_it_needs_libc_only() -> None:
    """Threads were a library of their own before glibc 2.34."""
    assert set(dynamic(SHIM, "DT_NEEDED")) <= {"libc.so.6", "libpthread.so.0", "libdl.so.2"}
    assert not dynamic(SHIM, "DT_RPATH") + dynamic(SHIM, "DT_RUNPATH")


def test_no_symbol_is_newer_than_glibc_2_17() -> None:
    """So that it loads where old frameworks run."""
    with SHIM.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".gnu.version_r")
        assert isinstance(section, GNUVerNeedSection)
        names = [v.name for _, versions in section.iter_versions() for v in versions]
    numbers = [tuple(map(int, name.removeprefix("GLIBC_").split("."))) for name in names]
    assert max(numbers) <= (2, 17)


def test_it_exports_what_it_interposes() -> None:
    """And nothing else. A second name of NCCL's functions begins with p."""
    hooks = {hook.name for hook in HOOKS} | {"p" + hook.name for hook in HOOKS if hook.library == "NCCL"}
    assert symbols(SHIM, defined=True) - PLUGIN == hooks | GETTERS | LOADER


PLUGIN = {f"ncclProfiler_v{version}" for version in (3, 4, 5, 6)}


def test_it_calls_nothing_that_waits() -> None:
    """No allocation and no lock of libc, not even on the way of a first call."""
    assert not [name for name in symbols(SHIM, defined=False) if NEVER.search(name)]

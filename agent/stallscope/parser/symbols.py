"""The request "symbols": which wanted functions a file defines, and where a probe on each one goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stallscope.parser import elf as e
from stallscope.parser.elf import Elf
from stallscope.parser.errors import ParseError
from stallscope.parser.extras import digest, hull, mentioned
from stallscope.parser.ncclcomm import GET_VERSION, nccl_version
from stallscope.parser.source import Source
from stallscope.parser.symtab import Match, Scan, Table, dynamic_table, full_table, scan

__all__ = ["find_symbols"]

ENDBR64 = b"\xf3\x0f\x1e\xfa"
MAX_NAMES = 4096


def find_symbols(
    source: Source, names: list[str], words: Sequence[str] = (), prefixes: Sequence[str] = ()
) -> dict[str, Any]:
    """Answer the request for one file (the keys are described in docs of `capture.parser_client.ElfSymbols`).

    Args:
        words: texts to look for in the file's loaded data.
        prefixes: how the other functions of a library begin that was linked into this file with its own functions
            side by side; names that begin so and are found in .symtab are where its `hull` starts.

    A damaged .symtab is a note, not an error: the loader never reads it, and .dynsym is still right.

    Raises:
        ParseError: the headers or the dynamic symbol table are damaged; more than 4096 names.
    """
    if len(names) > MAX_NAMES:
        raise source.error(f"{len(names)} names asked for")
    elf = e.load(source)
    found = Scan(frozenset(names))
    table = dynamic_table(elf)
    if table is not None:
        scan(elf, table, found)
    notes: list[str] = []
    full = _full_table(elf, notes)
    if full is not None and not found.complete():
        _scan_full(elf, full, found, notes)
    answer = _answer(elf, found, stripped=full is None, notes=notes)
    answer["digest"] = digest(elf, [table, full]) if not names else None
    answer["words"] = mentioned(elf, words)
    answer["nccl_version"] = nccl_version(elf, found) if GET_VERSION in found.defined else None
    answer["hull"] = hull(elf, full, found, prefixes) if full is not None and prefixes else None
    return answer


def _full_table(elf: Elf, notes: list[str]) -> Table | None:
    """Locate .symtab; damage becomes a note."""
    try:
        return full_table(elf)
    except ParseError as problem:
        notes.append(problem.why)
        return None


def _scan_full(elf: Elf, table: Table, found: Scan, notes: list[str]) -> None:
    """Look through .symtab; damage becomes a note."""
    try:
        scan(elf, table, found)
    except ParseError as problem:
        notes.append(problem.why)


def _answer(elf: Elf, found: Scan, *, stripped: bool, notes: list[str]) -> dict[str, Any]:
    """Put the findings into the shape of the answer."""
    symbols: dict[str, list[int | str]] = {}
    rejected: dict[str, str] = {}
    for name, match in sorted(found.defined.items()):
        placed = _place(elf, match)
        if isinstance(placed, str):
            rejected[name] = placed
        else:
            symbols[name] = placed
    return {
        "build_id": elf.build_id(),
        "soname": elf.dynamic_string(elf.dynamic.get(e.DT_SONAME)),
        "needed": elf.needed(),
        "machine": elf.machine,
        "kind": "program" if elf.is_program() else "library",
        "symbols": symbols,
        "rejected": rejected,
        "imported": sorted(found.imported - found.defined.keys()),
        "exec_segments": [[s.vaddr, s.filesz, s.offset] for s in elf.loads if s.flags & e.PF_X],
        "stripped": stripped,
        "defined_any": bool(symbols),
        "notes": notes,
    }


def _place(elf: Elf, match: Match) -> list[int | str] | str:
    """Return [probe_offset, symbol_offset, size, vaddr, table], or why no probe can stand there."""
    if match.ifunc:
        return "ifunc"  # the symbol is a resolver: it runs once, the function itself is elsewhere
    offset = elf.offset_of(match.value, executable=True)
    if offset is None:
        return "outside"
    size = _bounded_size(elf, match)
    probe = offset
    # A probe on endbr64 itself is refused or emulated slowly by some kernels: stand behind it.
    if elf.machine == "x86_64" and offset + 4 < elf.source.size and elf.source.read(offset, 4) == ENDBR64:
        probe = offset + 4
    return [probe, offset, size, match.value, match.table]


def _bounded_size(elf: Elf, match: Match) -> int:
    """Cut a symbol's size at the end of its segment, so that nobody later computes with 2^63."""
    for seg in elf.loads:
        if seg.vaddr <= match.value < seg.vaddr + seg.filesz:
            return min(match.size, seg.vaddr + seg.filesz - match.value)
    return 0

"""The request "objects": where a file's variables of some names lie."""

from __future__ import annotations

import struct
from typing import Any

from stallscope.parser import elf as e
from stallscope.parser.elf import Elf
from stallscope.parser.source import Source
from stallscope.parser.symtab import Table, dynamic_table, full_table

__all__ = ["find_objects"]

STT_OBJECT, SHN_ABS = 1, 0xFFF1
CHUNK, MAX_SEARCHED = 32_768, 400_000
_SYM = struct.Struct("<IBBHQQ")


def find_objects(source: Source, names: list[str]) -> dict[str, Any]:
    """Answer the request for one file.

    Returns:
        objects {name: [vaddr, size in bytes]} of those that it defines itself, a copy of a library's variable in a
        program included; exec_segments as in "symbols", from which follows where the file was loaded.

    Raises:
        ParseError: the headers or the dynamic symbol table are damaged.
    """
    elf = e.load(source)
    wanted = {name.encode("ascii", "replace"): name for name in names}
    found: dict[str, list[int]] = {}
    table = dynamic_table(elf)
    if table is not None:
        _scan(elf, table, wanted, found)
    # Only a static program has them elsewhere; what is linked with libraries has them in .dynsym, or in a library.
    if not found and not elf.needed_offsets:
        full = full_table(elf)
        if full is not None and full.length <= MAX_SEARCHED:
            _scan(elf, full, wanted, found)
    segments = [[s.vaddr, s.filesz, s.offset] for s in elf.loads if s.flags & e.PF_X]
    return {"objects": found, "exec_segments": segments}


def _scan(elf: Elf, table: Table, wanted: dict[bytes, str], found: dict[str, list[int]]) -> None:
    """Add the defined variables of a table; raises ParseError where it leaves the file."""
    strings = elf.source.read(table.strings, table.strings_size)
    longest = max(map(len, wanted), default=0) + 1
    for start in range(0, table.length, CHUNK):
        length = min(CHUNK, table.length - start) * _SYM.size
        chunk = elf.source.read(table.offset + start * _SYM.size, length)
        for at, info, _other, section, value, size in _SYM.iter_unpack(chunk):
            if info & 15 != STT_OBJECT or not section or section == SHN_ABS or not value:
                continue
            name = strings[at : at + longest + 1].split(b"\0", 1)[0].split(b"@", 1)[0]
            if name in wanted and _is_inside(elf, value, size):
                found.setdefault(wanted[name], [value, size])


def _is_inside(elf: Elf, vaddr: int, size: int) -> bool:
    """Whether the variable lies in a loaded segment: usually behind what the file holds of it, in .bss."""
    return any(s.vaddr <= vaddr and vaddr + size <= s.vaddr + s.memsz for s in elf.loads)

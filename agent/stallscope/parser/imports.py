"""The request "imports": which of some functions a file gets from others, and which files those may be."""

from __future__ import annotations

from typing import Any

from stallscope.parser.elf import load
from stallscope.parser.source import Source
from stallscope.parser.symtab import Scan, dynamic_table, scan

__all__ = ["find_imports"]


def find_imports(source: Source, names: list[str]) -> dict[str, Any]:
    """Answer {imported: names it uses and does not define, needed: names of the libraries it is linked with}.

    Raises:
        ParseError: the headers or the dynamic symbol table are damaged.
    """
    elf = load(source)
    found, table = Scan(frozenset()), dynamic_table(elf)
    if table is not None:
        # A hundred times faster than looking at each symbol. A linker may let names share their ends: no NUL before.
        strings = source.read(table.strings, table.strings_size)
        found = Scan(frozenset(name for name in names if name.encode("ascii", "replace") + b"\0" in strings))
        if found.wanted:
            scan(elf, table, found)
    return {"imported": sorted(found.imported - found.defined.keys()), "needed": elf.needed()}

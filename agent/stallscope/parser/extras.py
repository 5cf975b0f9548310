"""What else the request "symbols" can tell of a file: a digest of its tables, words it holds, a library inside it."""

from __future__ import annotations

import bisect
from _blake2 import blake2b  # not through hashlib, which loads 4 MB of OpenSSL into every parser
from collections.abc import Sequence

from stallscope.parser.elf import PT_DYNAMIC, Elf
from stallscope.parser.symtab import Scan, Table, functions

__all__ = ["digest", "hull", "mentioned"]

HEAD_BYTES = 64 + 512 * 56
SYMBOL_BYTES = 24
BLOCK = 1 << 20
MAX_SEARCHED = 64 << 20
MAX_FUNCTIONS = 400_000


def digest(elf: Elf, tables: Sequence[Table | None]) -> str:
    """Hash of everything that an answer about names is made of, except the code at the functions themselves.

    A build id alone is what the file says of itself: anybody can write a file with the id of another.
    """
    found = blake2b(elf.source.read(0, min(elf.source.size, HEAD_BYTES)), digest_size=32)
    dynamic = elf.first(PT_DYNAMIC)
    parts = [(dynamic.offset, dynamic.filesz)] if dynamic is not None else []
    for table in tables:
        if table is not None:
            parts += [(table.offset, table.length * SYMBOL_BYTES), (table.strings, table.strings_size)]
            parts += [(table.versions, table.length * 2)] if table.versions is not None else []
    for offset, length in parts:
        found.update(b"%d %d;" % (offset, length) + elf.source.read(offset, length))
    return found.hexdigest()


def mentioned(elf: Elf, words: Sequence[str]) -> list[str]:
    """Which words stand in the file's loaded data as whole C strings; the first 64 MiB are looked through."""
    wanted = {word: b"\0" + word.encode("ascii", "replace") + b"\0" for word in words}
    left, tail = MAX_SEARCHED, b""
    keep = max((len(text) for text in wanted.values()), default=0)
    for segment in elf.loads if wanted else []:
        at, end = segment.offset, min(segment.offset + segment.filesz, elf.source.size)
        while at < end and left > 0 and wanted:
            block = tail + elf.source.read(at, min(BLOCK, end - at, left))
            wanted = {word: text for word, text in wanted.items() if text not in block}
            at += len(block) - len(tail)
            left -= len(block) - len(tail)
            tail = block[-keep:]
    return sorted(set(words) - wanted.keys())


def hull(elf: Elf, table: Table, found: Scan, prefixes: Sequence[str]) -> list[int] | None:
    """File offsets [from, to) of a library that was linked into the file.

    From the first to the last of the wanted functions whose names begin with one of the prefixes, and on to either
    side as long as the neighbours' names do: the linker puts the functions of an archive side by side.
    """
    starts = tuple(prefix.encode("ascii", "replace") for prefix in prefixes)
    known = [match for name, match in found.defined.items() if name.startswith(tuple(prefixes))]
    known = [match for match in known if match.table == "symtab"]
    if not known or table.length > MAX_FUNCTIONS:
        return None
    low, high = min(match.value for match in known), max(match.value + match.size for match in known)
    near = sorted(functions(elf, table))
    first, last = bisect.bisect_left(near, (low,)), bisect.bisect_left(near, (high,)) - 1
    while first > 0 and near[first - 1][2].startswith(starts):
        first -= 1
    while last + 1 < len(near) and near[last + 1][2].startswith(starts):
        last += 1
    low, high = min(low, near[first][0]), max(high, near[last][0] + near[last][1])
    begin, end = elf.offset_of(low, executable=True), elf.offset_of(high - 1, executable=True)
    return [begin, end + 1] if begin is not None and end is not None and begin <= end else None

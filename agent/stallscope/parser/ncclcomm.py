"""The request "nccl_comm": where a file's NCCL has the rank in ncclComm, and its counters; and NCCL's version.

In this order: the table of known builds, the file's DWARF, the machine code of three getters. In every version
`nRanks` and `cudaDev` follow the rank; what else is read lies at fixed distances before it (aggregate/identity.py).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from stallscope.parser import elf as e
from stallscope.parser.dwarf import layout_of
from stallscope.parser.elf import Elf
from stallscope.parser.errors import ParseError
from stallscope.parser.fields import CODE_BYTES, loaded_and_stored, stored_constants
from stallscope.parser.nccl_offsets import BY_BUILD_ID, FUNCTIONS, SEQUENCES_KEPT
from stallscope.parser.source import Source
from stallscope.parser.symtab import Scan, dynamic_table, full_table, scan

__all__ = ["GET_VERSION", "find_comm", "nccl_version"]

GET_VERSION = "ncclGetVersion"
GETTERS = ("ncclCommUserRank", "ncclCommCount", "ncclCommCuDevice")
MIN_AT, MAX_AT = 0x100, 16 << 20
MAX_SEARCHED = 16 << 20
WORDS = re.compile(rb"NCCL version (\d{1,2}\.\d{1,2}\.\d{1,2})[+ ]")
FIRST_CODE, LAST_CODE = 20900, 99999  # from 2.9 on: 10000 * major + 100 * minor + patch


class _Found(NamedTuple):
    by: str
    rank_at: int
    seq_at: int | None


def find_comm(source: Source) -> dict[str, Any]:
    """Answer the request: {by, rank_at, seq_at, functions, version}, None for what could not be found out.

    Raises:
        ParseError: no ELF file, or its dynamic symbols are damaged.
    """
    elf = e.load(source)
    found = _getters(elf)
    version = nccl_version(elf, found)
    place = _by_table(elf) or _by_dwarf(elf) or _by_code(elf, found)
    kept = version is not None and tuple(map(int, version.split("."))) >= SEQUENCES_KEPT
    return {
        "by": place.by if place else None,
        "rank_at": place.rank_at if place else None,
        "seq_at": place.seq_at if place and kept else None,
        "functions": FUNCTIONS,
        "version": version,
    }


def _getters(elf: Elf) -> Scan:
    found = Scan(frozenset((*GETTERS, GET_VERSION)))
    table = dynamic_table(elf)
    if table is not None:
        scan(elf, table, found)
    full = None if found.complete() else full_table(elf)
    if full is not None:
        scan(elf, full, found)
    return found


def nccl_version(elf: Elf, found: Scan) -> str | None:
    """ "2.27.5": what `ncclGetVersion` stores, else what the library's words say; None where neither tells."""
    codes = {c for c in stored_constants(_code(elf, found, GET_VERSION), elf.machine) if FIRST_CODE <= c <= LAST_CODE}
    if len(codes) == 1:
        code = codes.pop()
        return f"{code // 10000}.{code // 100 % 100}.{code % 100}"
    words = elf.section(b".rodata")
    if words is None or words.offset > elf.source.size:
        return None
    data = elf.source.read(words.offset, min(words.size, MAX_SEARCHED, elf.source.size - words.offset))
    told = {match[1].decode() for match in WORDS.finditer(data)}
    return told.pop() if len(told) == 1 else None


def _code(elf: Elf, found: Scan, name: str) -> bytes:
    match = found.defined.get(name)
    offset = elf.offset_of(match.value, executable=True) if match else None
    if match is None or offset is None:
        return b""
    return elf.source.read(offset, min(match.size or CODE_BYTES, CODE_BYTES, elf.source.size - offset))


def _is_possible(rank_at: int) -> bool:
    return MIN_AT < rank_at < MAX_AT and rank_at % 4 == 0


def _by_table(elf: Elf) -> _Found | None:
    known = BY_BUILD_ID.get(elf.build_id() or "")
    return _Found("table", known[1], known[2]) if known else None


def _by_dwarf(elf: Elf) -> _Found | None:
    """Damaged debug information is none: the loader never reads it."""
    try:
        layout = layout_of(elf, "ncclComm", "rank")
    except ParseError:
        return None
    if layout is None:
        return None
    at, seq = layout.members, layout.members.get("seqNumber")
    rank = at["rank"]
    if not _is_possible(rank) or (at.get("nRanks"), at.get("cudaDev")) != (rank + 4, rank + 8):
        return None
    return _Found("dwarf", rank, seq if seq is not None and seq % 8 == 0 and MIN_AT < seq < MAX_AT else None)


def _by_code(elf: Elf, found: Scan) -> _Found | None:
    """The three getters must agree: one field right behind the other."""
    ranks, sizes, devices = (loaded_and_stored(_code(elf, found, name), elf.machine) for name in GETTERS)
    fitting = [at for at in ranks if _is_possible(at) and at + 4 in sizes and at + 8 in devices]
    return _Found("code", fitting[0], None) if len(fitting) == 1 else None

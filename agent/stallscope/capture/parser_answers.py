"""Checks what the parser answers. The parser reads hostile bytes, so it may be in somebody else's hands."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = [
    "CommPlace", "ElfSymbols", "Imports", "Inferred", "InferredFrame", "Objects", "ParserFailed", "Symbol",
    "check_comm", "check_frames", "check_imports", "check_inferred", "check_lines", "check_needs",
    "check_objects", "check_symbols",
]  # fmt: skip

ADDRESS_LIMIT = 1 << 47
MAX_SEGMENTS, MAX_NEEDED, MAX_NOTES, MAX_FRAMES, MAX_NEEDS, MAX_NEED_BYTES = 512, 256, 8, 64, 256, 64
BUILD_ID = re.compile(r"(?:[0-9a-f]{2}){1,64}")
DIGEST = re.compile(r"[0-9a-f]{64}")
MACHINE = re.compile(r"[a-z0-9_]{1,16}")
VERSION = re.compile(r"\d{1,2}\.\d{1,2}\.\d{1,2}")
MAX_LINE = 1 << 31
MIN_FIELD, MAX_FIELD, MAX_FUNCTIONS = 0x100, 16 << 20, 8
MAX_NATIVES, MAX_FUNCTION_NAME = 256, 512


class ParserFailed(Exception):
    """The parser refused an input, broke a rule, or died. `died`: it was the process, not the input."""

    def __init__(self, what: str, obj: str, why: str, *, died: bool = False) -> None:
        super().__init__(f"{what}: {obj}: {why}")
        self.what = what
        self.object = obj
        self.why = why
        self.died = died


class Symbol(NamedTuple):
    """A defined function. Offsets in the file, `size` in bytes (0 = not said), `vaddr` before relocation.

    `probe_offset` is `symbol_offset`, or 4 more behind an endbr64. `table`: "dynsym" or "symtab".
    """

    probe_offset: int
    symbol_offset: int
    size: int
    vaddr: int
    table: str


class ElfSymbols(NamedTuple):
    """What a file defines of the names asked for.

    Attributes:
        kind: "program" or "library".
        rejected: name -> why no probe can stand there ("ifunc", "outside").
        imported: names the file only uses.
        exec_segments: (vaddr, bytes in the file, file offset) of executable segments.
        stripped: it has no .symtab, so a static runtime in it can't be seen by name.
        notes: what of it could not be read.
        digest: of its headers and symbol tables, when no names were asked for: equal ones give equal answers.
        words: which of the words asked for stand in its data.
        hull: file offsets [from, to) of the library that was linked into it, None where nothing tells.
        nccl_version: "2.27.5" of an NCCL, where `ncclGetVersion` was among the names.
    """

    build_id: str | None
    soname: str | None
    needed: list[str]
    machine: str
    kind: str
    symbols: dict[str, Symbol]
    rejected: dict[str, str]
    imported: list[str]
    exec_segments: list[tuple[int, int, int]]
    stripped: bool
    defined_any: bool
    notes: list[str]
    digest: str | None
    words: list[str]
    hull: tuple[int, int] | None
    nccl_version: str | None = None


class CommPlace(NamedTuple):
    """Where a file's NCCL keeps what tells a communicator.

    Attributes:
        by: "table", "dwarf", "code", or None: not found.
        rank_at: offset of the rank in ncclComm, bytes.
        seq_at: offset of seqNumber, None where it is unknown or not always counted.
        functions: how many counters of 8 bytes stand there.
        version: "2.27.5", None where the file does not tell.
    """

    by: str | None
    rank_at: int
    seq_at: int | None
    functions: int
    version: str | None


class Imports(NamedTuple):
    """Of the names asked for, those that a file uses and does not define; and the libraries it is linked with."""

    imported: frozenset[str]
    needed: list[str]


class Objects(NamedTuple):
    """Variables that a file defines: name -> address before relocation; `exec_segments` as in `ElfSymbols`."""

    vaddrs: dict[str, int]
    exec_segments: list[tuple[int, int, int]]


class InferredFrame(NamedTuple):
    """A hooked call under way: stack address of its return address, that address, and the evidence.

    `evidence` is "call_site" (the call before the return address goes to the hook) or "unwound".
    """

    hook_id: int
    slot_addr: int
    return_addr: int
    evidence: str


class Inferred(NamedTuple):
    """Hooked calls a thread is inside, outermost first. `known_to`: below this stack address lies no other."""

    frames: list[InferredFrame]
    known_to: int


class NativeFrame(NamedTuple):
    """A frame of machine code: an address inside the call that goes further inwards, the index of its file among those
    handed over (-1: none), and that address in the file."""

    pc: int
    file: int
    vaddr: int


class Natives(NamedTuple):
    """Frames, innermost first; `is_whole`: up to the thread's outermost one."""

    frames: list[NativeFrame]
    is_whole: bool


def _wrong(what: str) -> ParserFailed:
    return ParserFailed("the parser's answer is refused", what, "out of bounds", died=True)


def number(value: object, low: int, high: int, what: str) -> int:
    """Return an integer in [low, high); raises ParserFailed for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < high:
        raise _wrong(what)
    return value


def text(value: object, limit: int, what: str) -> str:
    """Return a string of at most `limit` characters with unprintable ones replaced; raises ParserFailed."""
    if not isinstance(value, str) or len(value) > limit:
        raise _wrong(what)
    return "".join(c if c.isprintable() else "?" for c in value)


def items(value: object, limit: int, what: str, width: int | None = None) -> list[Any]:
    """Return a list of at most `limit` members, each a list of `width` if given; raises ParserFailed."""
    if not isinstance(value, list) or len(value) > limit:
        raise _wrong(what)
    if width is not None and any(not isinstance(v, list) or len(v) != width for v in value):
        raise _wrong(what)
    return value


def _one_of(value: object, allowed: Iterable[str], what: str) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise _wrong(what)
    return value


def _mapping(value: object, names: frozenset[str], what: str) -> dict[str, Any]:
    """Return a map whose keys were all asked for; raises ParserFailed."""
    if not isinstance(value, dict) or not value.keys() <= names:
        raise _wrong(what)
    return value


def check_symbols(
    answer: dict[str, Any], names: frozenset[str], file_size: int, words: frozenset[str] = frozenset()
) -> ElfSymbols:
    """Check an answer to "symbols": only names asked for, all offsets inside the file; raises ParserFailed."""
    symbols = _mapping(answer.get("symbols"), names, "symbols")
    rejected = _mapping(answer.get("rejected"), names, "rejected")
    build_id, soname = answer.get("build_id"), answer.get("soname")
    if build_id is not None and not (isinstance(build_id, str) and BUILD_ID.fullmatch(build_id)):
        raise _wrong("build_id")
    machine = text(answer.get("machine"), 16, "machine")
    if not MACHINE.fullmatch(machine):
        raise _wrong("machine")
    checked = {name: _symbol(value, file_size) for name, value in symbols.items()}
    return ElfSymbols(
        build_id=build_id,
        soname=None if soname is None else text(soname, 512, "soname"),
        needed=_needed(answer),
        machine=machine,
        kind=_one_of(answer.get("kind"), ("program", "library"), "kind"),
        symbols=checked,
        rejected={n: _one_of(why, ("ifunc", "outside"), "rejected") for n, why in rejected.items()},
        imported=_imported(answer, names),
        exec_segments=_segments(answer.get("exec_segments"), file_size),
        stripped=answer.get("stripped") is True,
        defined_any=bool(checked),
        notes=[text(n, 500, "notes") for n in items(answer.get("notes"), MAX_NOTES, "notes")],
        digest=_digest(answer.get("digest")),
        words=[_one_of(w, words, "words") for w in items(answer.get("words"), len(words), "words")],
        hull=_hull(answer.get("hull"), file_size),
        nccl_version=_version(answer.get("nccl_version")),
    )


def _version(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not VERSION.fullmatch(value):
        raise _wrong("version")
    return value


def check_imports(answer: dict[str, Any], names: frozenset[str]) -> Imports:
    """Check an answer to "imports": only names asked for; raises ParserFailed."""
    return Imports(frozenset(_imported(answer, names)), _needed(answer))


def _imported(answer: dict[str, Any], names: frozenset[str]) -> list[str]:
    return [_one_of(n, names, "imported") for n in items(answer.get("imported"), len(names), "imported")]


def _needed(answer: dict[str, Any]) -> list[str]:
    return [text(n, 512, "needed") for n in items(answer.get("needed"), MAX_NEEDED, "needed")]


def _digest(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not DIGEST.fullmatch(value):
        raise _wrong("digest")
    return value


def _hull(value: object, file_size: int) -> tuple[int, int] | None:
    if value is None:
        return None
    ((low, high),) = items([value], 1, "hull", 2)
    low = number(low, 0, file_size, "hull")
    return low, number(high, low + 1, file_size + 1, "hull")


def _symbol(value: object, file_size: int) -> Symbol:
    probe, symbol, size, vaddr, table = items([value], 1, "symbols", 5)[0]
    symbol = number(symbol, 0, file_size, "symbol_offset")
    probe = number(probe, symbol, min(symbol + 5, file_size), "probe_offset")
    if probe not in (symbol, symbol + 4):
        raise _wrong("probe_offset")
    size = number(size, 0, file_size - symbol + 1, "size")
    vaddr = number(vaddr, 1, 1 << 64, "vaddr")
    return Symbol(probe, symbol, size, vaddr, _one_of(table, ("dynsym", "symtab"), "table"))


def _segments(value: object, file_size: int) -> list[tuple[int, int, int]]:
    """A truncated file's segments may reach past its end: only their start must lie inside."""
    limit = 1 << 64
    return [
        (number(v, 0, limit, "vaddr"), number(s, 0, limit, "filesz"), number(o, 0, limit, "offset"))
        for v, s, o in items(value, MAX_SEGMENTS, "exec_segments", 3)
        if isinstance(o, int) and o < file_size
    ]


def check_needs(value: object) -> list[tuple[int, int]]:
    """Check the (address, bytes) ranges the parser asks for; raises ParserFailed."""
    rows = items(value, MAX_NEEDS, "need", 2)
    return [(number(a, 1, ADDRESS_LIMIT, "need"), number(n, 1, MAX_NEED_BYTES + 1, "need")) for a, n in rows]


def check_frames(value: object, hooks: frozenset[int], sp: int, stack: bytes) -> list[InferredFrame]:
    """Check inferred frames: hooks that were asked for, slots inside the stack that hold just that address."""
    frames = [InferredFrame(*row) for row in items(value, MAX_FRAMES, "frames", 4)]
    for frame in frames:
        slot = number(frame.slot_addr, sp, sp + len(stack) - 7, "slot")
        word = int.from_bytes(stack[slot - sp : slot - sp + 8], "little")
        if slot & 7 or number(frame.hook_id, 0, 1 << 32, "hook") not in hooks or frame.return_addr != word:
            raise _wrong("frames")
        number(frame.return_addr, 0, 1 << 64, "return address")
        _one_of(frame.evidence, ("call_site", "unwound"), "evidence")
    return frames


def check_inferred(answer: dict[str, Any], hooks: frozenset[int], sp: int, stack: bytes) -> Inferred:
    """Check an answer about a thread's stack."""
    frames = check_frames(answer.get("frames"), hooks, sp, stack)
    return Inferred(frames, number(answer.get("known_to"), 0, 1 << 64, "known to"))


def check_natives(answer: dict[str, Any], files: int) -> Natives:
    """Check an answer to "natives", about so many files; raises ParserFailed."""
    frames = []
    for pc, index, vaddr in items(answer.get("frames"), MAX_NATIVES, "frames", 3):
        number(index, -1, files, "file")
        frames.append(NativeFrame(number(pc, 0, 1 << 64, "pc"), index, number(vaddr, 0, ADDRESS_LIMIT, "vaddr")))
    is_whole = answer.get("is_whole")
    if not isinstance(is_whole, bool):
        raise _wrong("is_whole")
    return Natives(frames, is_whole)


def check_names(answer: dict[str, Any], count: int) -> list[str | None]:
    """Check an answer to "names": one for each address, at most 512 characters; raises ParserFailed."""
    names = answer.get("names")
    if not isinstance(names, list) or len(names) != count:
        raise _wrong("names")
    return [None if name is None else text(name, MAX_FUNCTION_NAME, "names") for name in names]


def check_comm(answer: dict[str, Any]) -> CommPlace:
    """Check an answer about ncclComm; raises ParserFailed."""
    by, seq_at = answer.get("by"), answer.get("seq_at")
    functions = number(answer.get("functions"), 0, MAX_FUNCTIONS + 1, "functions")
    version = _version(answer.get("version"))
    if by is None:
        return CommPlace(None, 0, None, functions, version)
    rank_at = number(answer.get("rank_at"), MIN_FIELD, MAX_FIELD, "rank_at")
    if seq_at is not None:
        seq_at = number(seq_at, MIN_FIELD, MAX_FIELD, "seq_at")
    return CommPlace(_one_of(by, ("table", "dwarf", "code"), "by"), rank_at, seq_at, functions, version)


def check_objects(answer: dict[str, Any], names: frozenset[str], file_size: int) -> Objects:
    """Check an answer to "objects": only names asked for; raises ParserFailed."""
    rows = _mapping(answer.get("objects"), names, "objects")
    vaddrs = {}
    for name, row in rows.items():
        vaddr, size = items(row, 2, "objects")
        number(size, 0, 1 << 32, "size")
        vaddrs[name] = number(vaddr, 1, ADDRESS_LIMIT, "vaddr")
    return Objects(vaddrs, _segments(answer.get("exec_segments"), file_size))


def check_lines(answer: dict[str, Any], count: int) -> list[int]:
    """Check an answer to "lines": one for each table; raises ParserFailed."""
    lines = items(answer.get("lines"), count, "lines")
    if len(lines) != count:
        raise _wrong("lines")
    return [number(line, -1, MAX_LINE, "lines") for line in lines]

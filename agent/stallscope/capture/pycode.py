"""Names and lines of Python frames, read from the code objects in the target's memory.

A code object may have been freed since it was seen, and another one may lie there. So each is checked three ways: its
signature is the one that the BPF program (probes/python.h) took during the call; it is alive (the first words of a
freed block are overwritten by the allocator); and it still is when all has been read. What fails is unknown.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from stallscope.capture.blocked import read_memory
from stallscope.capture.parser_client import ParserClient, ParserFailed
from stallscope.capture.procfs import clean
from stallscope.capture.pyconfig import Python
from stallscope.capture.pylayout import TABLE_BYTES

__all__ = ["CodeReader", "CodeWords", "Place", "PyFrame", "signature"]

MASK = (1 << 64) - 1
MAX_PLACES = 1 << 14
MAX_TEXT, MAX_NAME = 4096, 512
MAX_TABLE = 1 << 16
OBJECT_BYTES = 16  # reference count and type
BYTES_HEAD = 32  # struct PyBytesObject before its bytes: count, type, size, hash
STR_HEAD = 40  # count, type, length, hash, state


class PyFrame(NamedTuple):
    """A frame as BPF saw it (struct wire_py_frame)."""

    code: int
    instr: int
    sig: int


class Place(NamedTuple):
    """File, line (None: the instruction has none) and function."""

    file: str
    line: int | None
    function: str


class CodeWords(NamedTuple):
    """What was copied of a code object, all checked."""

    first_line: int
    file: str
    name: str
    table: bytes


class _Gone(Exception):
    """The code object is not there any more, or makes no sense."""


def _factor(j: int) -> int:
    """The j-th output of splitmix64, made odd, as in probes/python.h."""
    z = (j + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return (z ^ z >> 31) | 1


_CODE = _factor(0)
_NUMBERED = [_factor(j + 1) for j in range(7)]
_MORE = [*_NUMBERED, *(_factor(j + 20) for j in range(7, 11))]
_TABLE = [_factor(j + 11) for j in range(10)]


def signature(code: int, block: bytes, table: bytes) -> int:
    """As in probes/python.h.

    Args:
        code: its address.
        block: the seven words of a code object that has a number, eleven of one that has none.
        table: 88 bytes of the line table's object from its size on, or b"" where the version does without.
    """
    words = struct.unpack(f"<{len(block) // 8}Q", block)
    total: int = code * _CODE + sum(w * f for w, f in zip(words, _MORE, strict=False))
    if table:
        size, _cached_hash, *rest = struct.unpack("<11Q", table)
        inside = (w & _inside(size - 8 * j) for j, w in enumerate(rest))
        total += sum(w * f for w, f in zip((size, *inside), _TABLE, strict=True))
    return (total & MASK) >> 32


def _inside(left: int) -> int:
    """Mask of a word's bytes that lie inside a table of which so many are left."""
    return MASK if left >= 8 else (1 << 8 * left) - 1 if left > 0 else 0


class CodeReader:
    """Resolves frames of one image of one process, and remembers.

    Attributes:
        python: its interpreter.
    """

    def __init__(self, pid: int, python: Python, parser: ParserClient) -> None:
        self._pid, self.python, self._parser = pid, python, parser
        self._places: dict[PyFrame, Place] = {}

    def places(self, frames: Sequence[PyFrame]) -> list[Place | None]:
        """One for each frame, None where its code object is gone or can't be read."""
        new = [frame for frame in dict.fromkeys(frames) if frame not in self._places]
        if len(self._places) + len(new) > MAX_PLACES:
            self._places.clear()
            new = list(dict.fromkeys(frames))
        self._learn([(frame, words) for frame in new if (words := self._words(frame)) is not None])
        return [self._places.get(frame) for frame in frames]

    def sign(self, code: int) -> int:
        """Signature of a code object that is known to live; 0 where there is none."""
        layout = self.python.layout
        try:
            return self._signature(code, self._exactly(code + layout.code_block, layout.code_bytes))
        except _Gone:
            return 0

    def _learn(self, read: list[tuple[PyFrame, CodeWords]]) -> None:
        if not read:
            return
        unit, minor = self.python.layout.unit, self.python.minor
        try:
            lines = self._parser.lines([(minor, w.first_line, f.instr * unit, w.table) for f, w in read])
        except ParserFailed:
            return  # unknown this time; another stack with these frames asks again
        for (frame, words), line in zip(read, lines, strict=True):
            if line >= 0:
                self._places[frame] = Place(words.file, line or None, words.name)

    def _words(self, frame: PyFrame) -> CodeWords | None:
        try:
            return self._read(frame)
        except _Gone:
            return None

    def _read(self, frame: PyFrame) -> CodeWords:
        layout = self.python.layout
        block, whole = self._code(frame)
        first_line = int.from_bytes(whole[layout.first_line : layout.first_line + 4], "little")
        file, name = (int.from_bytes(whole[at : at + 8], "little") for at in (layout.file, layout.name))
        words = CodeWords(first_line, self._text(file, MAX_TEXT), self._text(name, MAX_NAME), self._table(block))
        if self._code(frame)[0] != block:
            raise _Gone
        return words

    def _code(self, frame: PyFrame) -> tuple[bytes, bytes]:
        """(its signed words, its first bytes), alive and of that signature. Raises _Gone."""
        layout = self.python.layout
        whole = self._exactly(frame.code, layout.table + 8)
        self._check_alive(whole, self.python.code_type)
        block = whole[layout.code_block : layout.code_block + layout.code_bytes]
        if self._signature(frame.code, block) != frame.sig:
            raise _Gone
        return block, whole

    def _signature(self, code: int, block: bytes) -> int:
        if not self.python.layout.has_table:
            return signature(code, block, b"")
        table = int.from_bytes(block[-8:], "little")
        # BPF copies all or nothing, too.
        return signature(code, block, self._exactly(table + 16, TABLE_BYTES))

    def _table(self, block: bytes) -> bytes:
        address = int.from_bytes(block[-8:], "little")
        head = self._exactly(address, BYTES_HEAD)
        self._check_alive(head, self.python.bytes_type)
        size = int.from_bytes(head[16:24], "little")
        if size > MAX_TABLE:
            raise _Gone
        return self._exactly(address + BYTES_HEAD, size) if size else b""

    def _check_alive(self, head: bytes, kind: int) -> None:
        """By its type and reference count: in a freed block the allocator's list stands there. Raises _Gone."""
        count, found = struct.unpack_from("<QQ", head)
        # From 3.12 on the low half counts, and 3.14 keeps flags in the highest 16 bits.
        flags = count >> 48 if self.python.minor >= 14 else 0
        if found != kind or not count & 0xFFFFFFFF or count - (flags << 48) >> 32:
            raise _Gone

    def _text(self, address: int, limit: int) -> str:
        """A str object; raises _Gone where none is there."""
        head = self._exactly(address, STR_HEAD)
        self._check_alive(head, self.python.str_type)
        length, state = int.from_bytes(head[16:24], "little"), int.from_bytes(head[32:36], "little")
        width, is_compact, is_ascii = state >> 2 & 7, state >> 5 & 1, state >> 6 & 1
        if not is_compact or width not in (1, 2, 4) or length > 1 << 20:
            raise _Gone
        layout = self.python.layout
        length = min(length, limit)
        data = self._exactly(address + (layout.text if is_ascii else layout.wide_text), length * width)
        encoding = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}[width]
        return clean(data.decode(encoding, "replace"))[:limit]

    def _exactly(self, address: int, length: int) -> bytes:
        if not length:
            return b""
        (data,) = read_memory(self._pid, [(address, length)])
        if len(data) != length:
            raise _Gone
        return data

"""The tables of call sites and of Python configurations (native/wire.h, wire_site and wire_python)."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from typing import NamedTuple

from stallscope.capture._drain import ffi, lib
from stallscope.capture.pycode import PyFrame
from stallscope.capture.pyconfig import Python
from stallscope.capture.rings import Ctl, Table

__all__ = ["FSBASE", "FULL", "MAX_FRAMES", "NO_THREAD", "SITE_BYTES", "UNREADABLE", "Machine", "Site", "SiteTable",
           "Times", "entries_of", "python_words", "site_of", "times_of"]  # fmt: skip

FSBASE, TAKEN, FULL = 40, 41, 42  # enum wire_ctl
READY, NO_THREAD, UNREADABLE, DEEP = 1, 2, 4, 8  # enum wire_site_flag
MAX_FRAMES = 32
ENTRY = 0x80000000  # WIRE_PY_ENTRY
_HEAD = struct.Struct("<QIIHHIIIQ")
_FRAME = struct.Struct("<QII")
SITE_BYTES = ffi.sizeof("struct wire_site")
_TIME_AT = ffi.offsetof("struct wire_site", "time")
_TIME = struct.Struct("<3Q")
_STACK_HEAD = struct.Struct("<5Q")
_STACK_BYTES = ffi.sizeof("struct wire_stack")
_PYTHON_WORDS = ffi.sizeof("struct wire_python") // 8
_CHUNK_ROWS = 16  # the fewest that fill pages
_CHUNK_BYTES = _CHUNK_ROWS * SITE_BYTES
assert _CHUNK_BYTES % mmap.ALLOCATIONGRANULARITY == 0 and lib.WIRE_SITES % _CHUNK_ROWS == 0


class Site(NamedTuple):
    """One row. `flags` as enum wire_site_flag; frames innermost first, those between Python frames left out.

    `what`: enum wire_class, the copy that its calls are, or wait for. `is_cut`: outer frames are missing. `entries`: so
    many frames were called by C code, each at that many frames from the innermost one on, as far as frames tell (the
    shim does not say it). `stack`: row of the table of stacks + 1, 0 = none.
    """

    row: int
    flags: int
    what: int
    pid: int
    slot: int
    hook: int
    tid: int
    frames: list[PyFrame]
    is_cut: bool
    entries: list[int]
    stack: int


class Times(NamedTuple):
    """Calls of a site that returned: how many, their total, longest and when that one began; (bucket, count) pairs;
    after how many of them nothing was queued, and for how long until something was."""

    calls: int
    total_ns: int
    max_ns: int
    max_at_ns: int
    buckets: list[int]


class Machine(NamedTuple):
    """A copy of a thread's stack, from the entry of a function on: its words from `sp`, where the return address is."""

    sp: int
    bp: int
    stack: bytes


def entries_of(slots: Sequence[tuple[bool, bool]]) -> list[int]:
    """Where C code called Python: how many frames there are up to that.

    Args:
        slots: (whether it is a Python frame, whether C code called it) each, innermost first.
    """
    found, frames = [], 0
    for is_python, is_entry in slots:
        frames += is_python
        if is_entry or not is_python:
            found.append(frames)
    return found


def site_of(data: bytes, row: int) -> Site | None:
    """What a struct wire_site says; None while it is being written."""
    flags, pid, slot, hook, stack, count, _image, tid, _at = _HEAD.unpack_from(data)
    if not flags & READY:
        return None
    slots = [_FRAME.unpack_from(data, _HEAD.size + 16 * i) for i in range(min(count, lib.WIRE_PY_FRAMES))]
    frames = [PyFrame(code, instr & ~ENTRY, sig) for code, instr, sig in slots if code]
    is_cut = bool(flags & (UNREADABLE | DEEP)) or len(frames) > MAX_FRAMES
    what = flags >> lib.WIRE_SITE_CLASS_SHIFT & 15
    entries = entries_of([(code > 0, bool(instr & ENTRY)) for code, instr, _ in slots])
    return Site(row, flags, what, pid, slot, hook, tid, frames[:MAX_FRAMES], is_cut, entries, stack)


def times_of(data: bytes | mmap.mmap, at: int = 0) -> Times:
    """The times of the struct wire_site at an offset. The number is read first: what is added meanwhile comes the next
    time."""
    calls, total_ns, max_ns = _TIME.unpack_from(data, at + _TIME_AT)
    hist = struct.unpack_from(f"<{lib.WIRE_BUCKETS}I", data, at + _TIME_AT + _TIME.size)
    pairs = [number for index, count in enumerate(hist) if count for number in (index, count)]
    return Times(calls, total_ns, max_ns, _HEAD.unpack_from(data, at)[-1], pairs)


def python_words(pid: int, image: int, python: Python) -> bytes:
    """A struct wire_python: how to walk the frames of a process."""
    at = python.layout
    words = (pid, image, python.tss_at, at.thread_id, at.frame, at.cframe, at.frame_bytes, at.previous, at.code,
             at.instr, at.owner, at.shim_owner, at.instr_base, int(at.instr_base > 0), at.code_block,
             at.code_bytes, int(at.has_table), at.chunk, at.state_bytes, at.entry, at.entry_bit, at.number,
             int(at.number > 0), 0)  # fmt: skip
    return struct.pack(f"<{2 * _PYTHON_WORDS}I", *words)


class SiteTable:
    """Rows are claimed by BPF programs, and given back here when their process has ended.

    Args:
        maps: map name -> descriptor; stay their owner's.
    """

    def __init__(self, maps: dict[str, int], ctl: Ctl) -> None:
        self._ctl = ctl
        self._keys = Table(maps["site_keys"], 1, lib.WIRE_SITES)
        self._idles = Table(maps["idles"], 2, lib.WIRE_SITES)
        self._pythons = Table(maps["pythons"], _PYTHON_WORDS, lib.WIRE_PROCS)
        self._key_map = mmap.mmap(maps["site_keys"], 8 * lib.WIRE_SITES, mmap.MAP_SHARED, mmap.PROT_READ)
        self._key_words = memoryview(self._key_map).cast("Q")
        self._sites_fd, self._stacks_fd = maps["sites"], maps["stacks"]
        self._chunks: dict[int, mmap.mmap] = {}

    def taken(self) -> int:
        """How many rows were taken so far: grows when there is a new one."""
        return self._ctl.get(TAKEN)

    def used(self) -> list[int]:
        """Rows in use."""
        return [row for row, key in enumerate(self._key_words.tolist()) if key]

    def _place(self, row: int) -> tuple[mmap.mmap, int]:
        """The pages that hold a row, and where in them: the kernel counts all pages of a mapping as ours at once."""
        chunk, index = divmod(row, _CHUNK_ROWS)
        if chunk not in self._chunks:
            self._chunks[chunk] = mmap.mmap(self._sites_fd, _CHUNK_BYTES, offset=chunk * _CHUNK_BYTES)
        return self._chunks[chunk], index * SITE_BYTES

    def site(self, row: int) -> Site | None:
        """One row; None while it is being written."""
        pages, begin = self._place(row)
        return site_of(pages[begin : begin + _TIME_AT], row)

    def take_stack(self, number: int) -> Machine | None:
        """The copy of the stack that a site names, whose row is free then. None where there is none."""
        if not 0 < number <= lib.WIRE_STACKS:
            return None
        with mmap.mmap(self._stacks_fd, _STACK_BYTES, offset=(number - 1) * _STACK_BYTES) as row:
            _busy, sp, bp, begin, pages = _STACK_HEAD.unpack_from(row)
            end = _STACK_HEAD.size + min(pages, lib.WIRE_STACK_PAGES) * 4096
            data = row[_STACK_HEAD.size + sp - begin : end] if begin <= sp < begin + 4096 else b""
            row[:8] = bytes(8)
        return Machine(sp, bp, data) if len(data) >= 8 else None

    def calls(self, row: int) -> int:
        """How many calls returned."""
        pages, begin = self._place(row)
        return int.from_bytes(pages[begin + _TIME_AT : begin + _TIME_AT + 8], "little")

    def times(self, row: int) -> Times:
        """All of that."""
        return times_of(*self._place(row))

    def idle(self, row: int) -> tuple[int, int]:
        """After how many calls nothing was queued until something was, and for how long in all, ns."""
        return self._idles.word(row, 0), self._idles.word(row, 1)

    def free(self, row: int) -> None:
        """Give a row back; nobody may write it any more."""
        for word in range(2):
            self._idles.set_word(row, word, 0)
        pages, begin = self._place(row)
        pages[begin : begin + SITE_BYTES] = bytes(SITE_BYTES)
        self._keys.set_word(row, 0, 0)
        chunk = row // _CHUNK_ROWS
        if not any(self._key_words[chunk * _CHUNK_ROWS : (chunk + 1) * _CHUNK_ROWS]):
            self._chunks.pop(chunk).close()  # a mapping and a descriptor each

    def configure(self, slot: int, pid: int, image: int, python: Python) -> None:
        """Let BPF walk the frames of a process."""
        pairs = struct.unpack(f"<{_PYTHON_WORDS}Q", python_words(pid, image, python))
        self._pythons.set_word(slot, 0, 0)  # whose it is comes last: nobody uses half of one
        for index in reversed(range(_PYTHON_WORDS)):
            self._pythons.set_word(slot, index, pairs[index])

    def forget(self, slot: int) -> None:
        """Walk no frames of that process any more."""
        self._pythons.set_word(slot, 0, 0)

    def close(self) -> None:
        """Unmap."""
        self._key_words.release()
        for mapped in (self._key_map, *self._chunks.values()):
            mapped.close()
        for table in (self._keys, self._idles, self._pythons):
            table.close()

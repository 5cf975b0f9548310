"""Which communicators a process uses, and what NCCL keeps in them: copied, not understood (aggregate/commdata.py does).

The table that numbers operations (native/wire.h, wire_comm) names every communicator that a call was made on, also of
one that is older than the capture. A new one is read a look later, when the record of its creation has been sent; it is
read again while it looks unfinished (inside a group, its fields are set at the end), and whenever a creation returned,
since a new one may lie at the address of a destroyed one.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stallscope.capture.blocked import read_memory
from stallscope.capture.parser_client import CommPlace, ParserClient, ParserFailed
from stallscope.capture.rings import InflightRow
from stallscope.capture.target import LinkedLibrary, Target
from stallscope.wire.frames import Kind
from stallscope.wire.hook_table import BY_ID

__all__ = ["MADE", "SPREAD", "TAKEN", "CommReader", "CommTable"]

Send = Callable[[Kind, dict[str, Any]], None]

# native/wire.h: enum wire_ctl, struct wire_comm.
TAKEN, MADE = 11, 12
SPREAD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
ADDRESS_LIMIT = 1 << 57
MAX_RANKS = 1 << 16

PERIOD_NS = 200_000_000
BEFORE, BYTES = 24, 64  # what is copied: from so many bytes before the rank on
NEW_A_LOOK, READ_A_LOOK = 4096, 64
MAX_TRIES = 9  # with twice the pause each time, a minute
SAMPLES, SAMPLED_NS = 8, 5_000_000_000
ENOUGH = 3  # for a vote
TOLD_AT = (1, ENOUGH, SAMPLES)
MAX_UNREAD = 3
MAX_FILES = 256
FREE_EVERY_NS, PASSED_NS = 1_000_000_000, 10_000_000_000
UNKNOWN = CommPlace(None, 0, None, 0, None)


class CommTable(Protocol):
    """The communicators that calls were made on, as native/wire.h has them."""

    def ctl(self, index: int) -> int:
        """How many rows are TAKEN, how many communicators were MADE."""

    def keys(self) -> list[int]:
        """The key of every row, 0 where it is free."""

    def next(self, row: int) -> int:
        """How many operations were numbered there."""

    def free(self, row: int) -> None:
        """Give it back: its process has ended."""

    def inflight(self) -> list[InflightRow]:
        """Threads that are inside a call now."""


@dataclass
class _Entry:
    """One communicator of one process; `row` is its place in the table.

    Attributes:
        due_ns: when to read it, while it is in `CommReader._due`.
        told: what the last frame said (start, data).
        counted: how many operations had been numbered at the last look.
        samples: [our number, NCCL's counters..]; `sampled_ns` when the first was taken; `unread`: how often there was
            nothing to read.
    """

    row: int
    target: Target
    pointer: int
    due_ns: int
    tries: int = 0
    told: tuple[bytes, bytes] | None = None
    place: CommPlace = UNKNOWN
    counted: int = 0
    samples: list[list[int]] = field(default_factory=list)
    sampled_ns: int | None = None
    unread: int = 0


class CommReader:
    """Sends COMM frames; `look` costs two loads when nothing is new.

    Attributes:
        frees: whether rows of ended processes are given back, as is needed where there is no end.

    Args:
        table: asked for new communicators.
        parser: asked once for each file that has an NCCL.
        send: takes frames.
        read: copies target memory; tests give their own.
        samples: whether NCCL's counters are wanted: not where every operation since the creation was numbered.
    """

    def __init__(
        self, table: CommTable, parser: ParserClient, send: Send,
        read: Callable[[int, list[tuple[int, int]]], list[bytes]] = read_memory, *, samples: bool = True,
    ) -> None:  # fmt: skip
        self._table, self._parser, self._send, self._read = table, parser, send, read
        self._wants_samples = samples
        self._entries: dict[int, _Entry] = {}
        self._due: dict[int, _Entry] = {}
        self._unsampled: dict[int, _Entry] = {}
        self._passed: dict[int, int] = {}
        self.frees = False
        self._freed = 0
        self._next_free_ns = 0
        self._files: dict[tuple[int, ...], CommPlace] = {}
        self._taken = self._made = 0
        self._next_ns = 0
        self._turn = 0

    def look(self, targets: Sequence[Target], now: int) -> None:
        """Find new communicators, read those that are due, sample their counters; at most five times a second."""
        if now < self._next_ns:
            return
        self._next_ns = now + PERIOD_NS
        taken, made = self._table.ctl(TAKEN), self._table.ctl(MADE)
        if made != self._made:
            self._made = made
            for entry in self._entries.values():
                self._read_soon(entry, now)
        if taken != self._taken:
            self._find(targets, now)
            self._taken = len(self._entries) + len(self._passed) + self._freed
        if self.frees and now >= self._next_free_ns:
            self._next_free_ns = now + FREE_EVERY_NS
            self._free_ended(targets, now)
        if self._due:
            self._read_due(now)
        if self._unsampled:
            self._sample_some(now)

    def _read_soon(self, entry: _Entry, now: int) -> None:
        entry.due_ns, entry.tries = now + PERIOD_NS // 2, 0
        self._due[entry.row] = entry

    def tell_again(self, now: int) -> None:
        """To a reader who was told nothing: what is known at once, and NCCL's counters as they are from now on."""
        for entry in list(self._entries.values()):
            if entry.target.ended:
                if not self.frees:
                    self._forget(entry)
                continue
            entry.samples, entry.sampled_ns, entry.unread = [], None, 0
            if entry.told is not None:
                self._tell(entry, now)
            if self._wants_samples and _is_finished((entry.told or (b"", b""))[1]) and entry.place.seq_at is not None:
                self._unsampled[entry.row] = entry

    def _find(self, targets: Sequence[Target], now: int) -> None:
        keys = self._table.keys()
        fresh = [(row, key) for row, key in enumerate(keys) if key and row not in self._entries]
        fresh = [(row, key) for row, key in fresh if row not in self._passed]
        for row, key in fresh[:NEW_A_LOOK]:
            owner = self._owner(targets, key)
            if owner is None:
                self._passed[row] = now
            else:
                self._entries[row] = _Entry(row, *owner, due_ns=now)
                self._read_soon(self._entries[row], now)

    def _free_ended(self, targets: Sequence[Target], now: int) -> None:
        ended = [entry for entry in self._entries.values() if entry.target.ended]
        for entry in ended:
            self._forget(entry)
        old = [row for row, since_ns in self._passed.items() if now - since_ns > PASSED_NS]
        rows = {*(entry.row for entry in ended), *old}
        keys = self._table.keys() if rows else []
        for row in rows:
            del self._passed[row]
            if self._owner(targets, keys[row]) is None:  # its process ended, or came and went between two looks
                self._table.free(row)
                self._freed += 1
            else:  # it came since, or was let go and is traced again
                self._taken = -1

    def _owner(self, targets: Sequence[Target], key: int) -> tuple[Target, int] | None:
        """Whose key that is: addresses are below 2^57, other processes' keys rarely look like one."""
        found: tuple[Target, int] | None = None
        for target in targets:
            pointer = (key - target.pid * SPREAD) & _MASK
            if not 0 < pointer < ADDRESS_LIMIT:
                continue
            if found is None or (found[1] % 8, found[1]) > (pointer % 8, pointer):
                found = target, pointer
        return found

    def _read_due(self, now: int) -> None:
        due = [entry for entry in self._due.values() if entry.due_ns <= now]
        for entry in due[:READ_A_LOOK]:
            self._read_one(entry, now)

    def _read_one(self, entry: _Entry, now: int) -> None:
        if entry.target.ended:
            self._forget(entry)
            return
        counted = self._table.next(entry.row)
        place, start, data = self._fitting(entry)
        is_other = entry.told is not None and ((start, data) != entry.told or counted < entry.counted)
        entry.counted = counted
        entry.tries += 1
        is_done = _is_finished(data) or entry.tries >= MAX_TRIES
        entry.due_ns = now + (PERIOD_NS << entry.tries) - PERIOD_NS // 2
        if is_done:
            del self._due[entry.row]
        # What is not finished yet may still become it; a reader takes the last frame.
        if entry.told is None or is_other:
            entry.place, entry.told = place, (start, data)
            entry.samples, entry.sampled_ns, entry.unread = [], None, 0
            self._tell(entry, now)
        is_countable = self._wants_samples and _is_finished(data) and place.seq_at is not None
        if is_countable and len(entry.samples) < SAMPLES:
            self._unsampled[entry.row] = entry

    def _forget(self, entry: _Entry) -> None:
        for table in (self._entries, self._due, self._unsampled):
            table.pop(entry.row, None)
        self._passed[entry.row] = self._next_ns

    def _fitting(self, entry: _Entry) -> tuple[CommPlace, bytes, bytes]:
        """The library whose offsets make sense of the memory, else the first; and the memory."""
        found: list[tuple[CommPlace, bytes, bytes]] = []
        for place in self._places(entry.target):
            start, data = b"", b""
            if place.by is not None:
                ranges = [(entry.pointer, 8), (entry.pointer + place.rank_at - BEFORE, BYTES)]
                start, data = self._read(entry.target.pid, ranges)
            if _is_finished(data):
                return place, start, data
            found.append((place, start, data))
        return found[0] if found else (UNKNOWN, b"", b"")

    def _places(self, target: Target) -> list[CommPlace]:
        libraries = [lib for lib in target.linked.values() if lib.library == "NCCL" and lib.fd >= 0]
        return [self._place(library) for library in libraries]

    def _place(self, library: LinkedLibrary) -> CommPlace:
        try:
            info = os.fstat(library.fd)
        except OSError:
            return UNKNOWN
        key = (info.st_dev, info.st_ino, info.st_mtime_ns, info.st_size)
        if key not in self._files:
            if len(self._files) >= MAX_FILES:
                self._files.clear()
            self._files[key] = self._ask(library.fd)
        return self._files[key]

    def _ask(self, fd: int) -> CommPlace:
        """A file that the parser can't read is as good as one that tells nothing."""
        try:
            return self._parser.nccl_comm(fd)
        except ParserFailed:
            return UNKNOWN

    def _tell(self, entry: _Entry, now: int) -> None:
        start, data = entry.told or (b"", b"")
        place = entry.place
        self._send(
            Kind.COMM,
            {"at_ns": now, "proc": entry.target.proc, "pointer": entry.pointer, "by": place.by,
             "rank_at": place.rank_at, "start": start, "data": data, "version": place.version,
             "samples": list(entry.samples)},
        )  # fmt: skip

    def _sample_some(self, now: int) -> None:
        wanted = list(self._unsampled.values())
        self._turn = (self._turn + READ_A_LOOK) % len(wanted) if len(wanted) > READ_A_LOOK else 0
        busy = _Busy(self._table.inflight())
        for entry in (wanted[self._turn :] + wanted)[: min(READ_A_LOOK, len(wanted))]:
            self._sample(entry, now, busy)
            if _has_enough(entry, now):
                self._unsampled.pop(entry.row, None)

    def _sample(self, entry: _Entry, now: int, busy: _Busy) -> None:
        """NCCL counts at the launch, we at the entry: only where no call is under way are the two comparable."""
        before = self._table.next(entry.row)
        place = entry.place
        if entry.target.ended:
            self._forget(entry)
            return
        if place.seq_at is None or busy.has(entry.target.pid, entry.pointer):
            return
        (words,) = self._read(entry.target.pid, [(entry.pointer + place.seq_at, 8 * place.functions)])
        entry.unread += not words
        if not words or self._table.next(entry.row) != before:
            return
        entry.samples.append([before, *struct.unpack(f"<{place.functions}Q", words)])
        entry.sampled_ns = entry.sampled_ns or now
        if len(entry.samples) in TOLD_AT:
            self._tell(entry, now)


class _Busy:
    """Calls under way: on a communicator, or of a group, which may launch on any."""

    def __init__(self, rows: list[InflightRow]) -> None:
        self._words: set[tuple[int, int]] = set()
        self._groups: set[int] = set()
        for row in rows:
            for frame in row.frames:
                hook = BY_ID.get(frame.hook)
                if hook is not None and hook.library == "NCCL":
                    self._words.update((row.tgid, word) for word in frame.a)
                    if hook.kind == "group":
                        self._groups.add(row.tgid)

    def has(self, tgid: int, pointer: int) -> bool:
        """Whether a call of that process may be about that communicator."""
        return tgid in self._groups or (tgid, pointer) in self._words


def _has_enough(entry: _Entry, now: int) -> bool:
    if len(entry.samples) >= SAMPLES or entry.unread >= MAX_UNREAD:
        return True
    has_few = len(entry.samples) < ENOUGH or entry.sampled_ns is None
    return not has_few and now - (entry.sampled_ns or 0) >= SAMPLED_NS


def _is_finished(data: bytes) -> bool:
    """Whether a hash, a rank and a size stand there."""
    if len(data) != BYTES:
        return False
    key, rank, nranks = struct.unpack_from("<Qii", data, BEFORE - 8)
    return bool(key and 0 <= rank < nranks <= MAX_RANKS)

"""The shared memory of a process with libstallscope.so in it (native/shim/segment.h); read by native/drain/segment.c.

The memory belongs to the traced program: whatever it holds can give wrong numbers or `BadSegment`, never a fault.
"""

from __future__ import annotations

import enum
import mmap
import os
import time
from types import TracebackType
from typing import Any, NamedTuple

from stallscope.capture._drain import ffi, lib
from stallscope.capture.procfs import clean
from stallscope.capture.rings import MAX_UIDS, REC_BYTES, UID_BYTES, Drained, InflightRow, SlotChanges, inflight_rows
from stallscope.capture.segsites import SiteRows

__all__ = [
    "GPU_AT_WORK",
    "GPU_EVENTS",
    "GPU_NO_EVENTS",
    "GPU_NO_PATH",
    "GPU_OFF",
    "GPU_OLD",
    "GPU_RISK",
    "GPU_SLOW",
    "GPU_TAKEN",
    "BadSegment",
    "Clock",
    "Comm",
    "Header",
    "Mode",
    "Segment",
    "SegmentThread",
    "Who",
]  # fmt: skip

LONG_NS = 200_000
_ALL = 0xFFFFFFFF
_TAP = 4
_LOSSES = ("overwritten", "vital_full", "no_ring", "busy", "stale", "no_comm", "unwrapped", "hello", "corrupt",
           "comms_made", "history")  # fmt: skip
_MAX_COMMS = 1024
_UNTOLD = ("unmatched", "untold", "exhausted", "busy", "unbound")  # enum seg_gpu_figure
GPU_TAKEN, GPU_OLD, GPU_NO_PATH, GPU_OFF, GPU_RISK, GPU_SLOW = 1, 2, 3, 5, 6, 7  # native/shim/gpu.h
GPU_EVENTS, GPU_NO_EVENTS, GPU_AT_WORK = 8, 9, 16
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SETTLE_S = 0.02
_LINES = 4096  # SEG_LINES in native/drain/drain.h
_TOLERATED_NS = 2_000


class BadSegment(ValueError):
    """It is no segment that can be read; the text says what is wrong with it."""


class Mode(enum.IntEnum):
    """How much a call costs: FULL reads the counter twice, LITE once in calls that only enqueue, MIN in one of many."""

    FULL = 0
    LITE = 1
    MIN = 2


class Who(NamedTuple):
    """What a process says of itself, for a reader that can't look at its /proc; `ranks`: RANK and its like.

    `pid_ns`: inode of its pid namespace, 0 where unknown; `is_locked`: a record lock on its file tells that it lives.
    """

    is_locked: bool
    ppid: int
    pid_ns: int
    name: str
    cmdline: list[str]
    ranks: dict[str, str]


class Header(NamedTuple):
    """What the process wrote when it made the segment.

    Attributes:
        pid: as the process itself sees it, in its pid namespace; after a fork another process may hold the descriptor.
        start_ticks: field 22 of its /proc/PID/stat.
        counter, mono_ns, real_ns: its counter, CLOCK_MONOTONIC and CLOCK_REALTIME at one moment.
        ticks_per_s: its estimate of the counter's rate.
        hooks: ids of the functions that the library has wrappers of.
        readers: how many have taken records from it before.
        is_mapped: a sealed memfd; else a file.
    """

    version: int
    pid: int
    uid: int
    start_ticks: int
    counter: int
    mono_ns: int
    real_ns: int
    ticks_per_s: int
    hooks: frozenset[int]
    mode: Mode
    readers: int
    is_mapped: bool
    who: Who


class SegmentThread(NamedTuple):
    """One thread; `calls` are those of all threads that had its block."""

    tid: int
    alive: bool
    calls: int


class Comm(NamedTuple):
    """One communicator of the process; absent knowledge is None.

    `next`: operations numbered so far; `last`: hook, element count, datatype and reduction of the newest one;
    `uid`: 128 bytes.
    """

    pointer: int
    next: int
    last: tuple[int, int, int, int] | None
    rank: int | None
    nranks: int | None
    errors: int
    made_by: int | None
    uid: bytes | None


class Clock:
    """Raw counter -> CLOCK_MONOTONIC, for all segments of this machine.

    A counter value gives the same instant whenever it is converted: the records of one call, and a look at it while it
    lasts, are told to be one call by that. So a new reading changes only what is yet to come.

    Attributes:
        error_ns: how far a converted instant of the last second may be off.
    """

    def __init__(self) -> None:
        self._c = ffi.new("struct seg_clock *")
        first = self._pair()
        time.sleep(_SETTLE_S)
        self._last = self._pair()
        self.error_ns = first[2] + self._last[2]
        self._rate = self._rate_since(first)
        self._leads_back = True  # known from 20 ms only
        self._add(first[0], first[1], self._rate)

    def recalibrate(self) -> None:
        """Take another reading; once a second. Where the line is off, the next one leads back within a second."""
        before, self._last = self._last, self._pair()
        counter, mono_ns, width_ns = self._last
        off_ns = mono_ns - self.to_ns(counter)
        self.error_ns = width_ns + before[2] + abs(off_ns)
        self._rate = self._rate_since(before)
        if abs(off_ns) > width_ns + _TOLERATED_NS or self._leads_back:
            # Within a second, but never by more than a tenth: an instant must not lie before an earlier one.
            back = max(-0.1, min(0.1, off_ns / 1e9)) if abs(off_ns) > width_ns else 0
            self._leads_back = abs(off_ns) > width_ns
            self._add(counter, self.to_ns(counter), int(self._rate * (1 + back)))

    def _rate_since(self, before: tuple[int, int, int]) -> int:
        ticks, span_ns = self._last[0] - before[0], self._last[1] - before[1]
        if ticks <= 0 or span_ns <= 0:
            raise OSError("the machine's counter does not advance")
        return (span_ns << 32) // ticks

    def _add(self, counter: int, mono_ns: int, rate: int) -> None:
        """A line from here on. When there is no room, the older half goes, and with it what hours ago was told."""
        lines, count = self._c.line, self._c.count
        if count == _LINES:
            kept = _LINES // 2
            ffi.memmove(lines, lines + kept, kept * ffi.sizeof("struct seg_line"))
            count = kept
        lines[count].counter, lines[count].mono_ns, lines[count].ns_per_tick = counter, mono_ns, rate
        self._c.count = count + 1

    @staticmethod
    def _pair() -> tuple[int, int, int]:
        counter, mono_ns = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        width = lib.segment__pair(counter, mono_ns)
        return int(counter[0]), int(mono_ns[0]), int(width)

    def to_ns(self, ticks: int) -> int:
        """CLOCK_MONOTONIC of a counter value."""
        return int(lib.segment__clock_ns(self._c, ticks))

    @property
    def c(self) -> Any:
        """For the C side."""
        return self._c


class Segment(SiteRows):
    """One process's segment. One reader at a time; a later one is told what happened since the one before stopped.

    Args:
        fd: the memfd or file, opened for reading and writing; stays the caller's.

    Raises BadSegment for anything that is not a whole segment of this version, OSError as the kernel says.
    """

    def __init__(self, fd: int) -> None:
        out, why = ffi.new("struct segment **"), ffi.new("char **")
        result = lib.segment__open(fd, out, why)
        self._object: Any = None
        if result and why[0]:
            raise BadSegment(ffi.string(why[0]).decode())
        if result:
            raise OSError(-result, f"segment: {os.strerror(-result)}")
        self._object = out[0]
        self._bytes = mmap.mmap(-1, ffi.sizeof("struct counters_delta"))
        self._delta = ffi.cast("struct counters_delta *", ffi.from_buffer(self._bytes))
        self._batch = ffi.new("struct ring_batch *")
        self._keep: list[Any] = []
        self._recs = self._uids = memoryview(b"")
        self._rows = ffi.new("struct wire_row[]", 256)
        self.header = self._read_header()

    @property
    def _c(self) -> Any:
        if self._object is None:
            raise ValueError("Segment is closed")
        return self._object

    def _read_header(self) -> Header:
        facts = ffi.new("struct segment_facts *")
        lib.segment__facts(self._c, facts)
        hooks = frozenset(i for i in range(400) if facts.hooks[i // 64] >> i % 64 & 1)
        mode = Mode(min(facts.settings & 3, 2))
        return Header(
            version=int(facts.version), pid=int(facts.pid), uid=int(facts.uid), start_ticks=int(facts.start_ticks),
            counter=int(facts.counter), mono_ns=int(facts.mono_ns), real_ns=int(facts.real_ns),
            ticks_per_s=int(facts.ticks_per_s), hooks=hooks, mode=mode, readers=int(facts.readers),
            is_mapped=bool(facts.is_mapped), who=_who(facts),
        )  # fmt: skip

    def _room_for(self, max_records: int) -> None:
        max_uids = min(max_records, MAX_UIDS)
        maps = [mmap.mmap(-1, max_records * REC_BYTES), mmap.mmap(-1, max_uids * UID_BYTES)]
        self._recs, self._uids = (memoryview(m) for m in maps)
        self._keep = [ffi.from_buffer("uint8_t[]", m) for m in maps]
        self._batch.recs, self._batch.uids = self._keep
        self._batch.max_recs, self._batch.max_uids = max_records, max_uids

    def drain(self, slot: int, tgid: int, clock: Clock, max_records: int = 16384) -> Drained:
        """Records that came since, vital ones first; at most `max_records` and MAX_UIDS with an id.

        Both counts 0 = nothing there now. Times are CLOCK_MONOTONIC by `clock`. The views are overwritten by the next
        drain.
        """
        if max_records < 1:
            raise ValueError(f"max_records {max_records}")
        if self._batch.max_recs != max_records:
            self._room_for(max_records)
        result = lib.segment__drain(self._c, clock.c, slot, tgid, self._batch)
        if result < 0:
            raise OSError(-result, f"segment drain: {os.strerror(-result)}")
        recs, uids = self._batch.n_recs, self._batch.n_uids
        return Drained(self._recs[: recs * REC_BYTES], recs, self._uids[: uids * UID_BYTES], uids)

    def pending(self) -> int:
        """Records that no drain has taken yet, overwritten ones included."""
        return int(lib.segment__pending(self._c))

    def counts(self, *, is_over: bool = False) -> SlotChanges:
        """Rows that are not what they were at the last call, summed over all threads; values are cumulative.

        They are those of the records that were drained: a call whose record still waits in a ring is not counted yet,
        one that is under way is. What was overwritten before the first look is `filtered`, what was later is `lost`,
        and when the process has ended (`is_over`) so is what it died over.
        """
        d = self._delta
        result = lib.segment__counts(self._c, is_over, d)
        if result < 0:
            raise OSError(-result, f"segment counts: {os.strerror(-result)}")
        counts = bytes(ffi.buffer(d.counts, d.n_counts * ffi.sizeof("struct wire_count")))
        times = bytes(ffi.buffer(d.times, d.n_times * ffi.sizeof("struct wire_time")))
        return SlotChanges(list(d.hooks[0 : d.n_counts]), counts, list(d.timed[0 : d.n_times]), times)

    def inflight(
        self, clock: Clock, slot: int = 0, tgid: int = 0, *, as_counted: bool = False
    ) -> list[InflightRow]:  # fmt: skip
        """Threads that are inside a hooked call now, or were when `counts` looked last; stack pointers are 0."""
        pid = tgid or self.header.pid
        count = lib.segment__inflight(self._c, clock.c, slot, pid, as_counted, self._rows, 256)
        return inflight_rows(bytes(ffi.buffer(self._rows, count * ffi.sizeof("struct wire_row"))))

    def losses(self) -> dict[str, int]:
        """What was turned away so far, by place.

        overwritten and vital_full: records; no_ring, busy, stale: calls without a record; no_comm: operations without a
        number; unwrapped: function pointers handed out as they were; hello: the socket could not be told; corrupt:
        times something made no sense; comms_made: communicators created, no loss; history: calls whose records were
        overwritten before the first look, no loss; deep: 0, calls are recorded however deep they nest.
        """
        out = ffi.new("uint64_t[]", lib.SEGMENT_LOSSES)
        lib.segment__losses(self._c, out)
        return {**dict(zip(_LOSSES, map(int, out), strict=True)), "deep": 0}

    def come_late(self, most: int) -> None:
        """Before the first `drain`: leave out launches, copies and short waits but the newest `most` of each thread."""
        lib.segment__come_late(self._c, most)

    def hold(self) -> None:
        """Go on as its reader without taking anything; `drain` does it, too.

        For five seconds no record of NCCL, of an error or of a long wait is overwritten that was not taken.
        """
        lib.segment__hold(self._c)

    def whole_since_ns(self, clock: Clock) -> int:
        """From when on no vital record had been overwritten at the first look; 0: from the beginning."""
        return int(lib.segment__whole_since(self._c, clock.c))

    @property
    def gpu(self) -> int:
        """Who tells what the GPU begins: GPU_EVENTS pairs of events, from GPU_AT_WORK on NCCL; else why nobody does."""
        return int(lib.segment__gpu(self._c))

    def gpu_untold(self) -> dict[str, int]:
        """Operations without a witness of the GPU so far, by reason.

        unmatched: NCCL queued it and no call explains it (a graph); untold: the other way round; exhausted: too many of
        its communicator were waiting; busy: turned away by a lock; unbound: communicators, not operations.
        """
        out = ffi.new("uint64_t[]", len(_UNTOLD))
        lib.segment__gpu_untold(self._c, out)
        return dict(zip(_UNTOLD, map(int, out), strict=True))

    def set_mode(self, mode: Mode, one_in: float = 1.0, *, tap: bool = False, long_ns: int = LONG_NS) -> None:
        """Change how calls are recorded, at once.

        Args:
            mode: see Mode.
            one_in: record one in so many launches, copies and short waits.
            tap: record every call that tells of completion.
            long_ns: waits from this duration on are always recorded.
        """
        threshold = _ALL if one_in <= 1 else max(1, round((1 << 32) / one_in) - 1)
        lib.segment__set(self._c, int(mode) | (_TAP if tap else 0) | threshold << 32, long_ns)

    def threads(self) -> list[SegmentThread]:
        """Every thread that has, or had last, a block."""
        out = ffi.new("struct segment_thread[]", 256)
        count = lib.segment__threads(self._c, out, 256)
        return [SegmentThread(t.tid, t.state == 1, int(t.calls)) for t in out[0:count]]

    def comms(self) -> list[Comm]:
        """The communicators that the process created or used, also those from before this reader came."""
        out = ffi.new("struct segment_comm[]", _MAX_COMMS)
        count = lib.segment__comms(self._c, out, _MAX_COMMS)
        return [_comm(row) for row in out[0:count]]

    def close(self) -> None:
        """Unmap; may be called twice."""
        opened, self._object = self._object, None
        if opened is not None:
            lib.segment__close(opened)

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _who(facts: Any) -> Who:
    words = bytes(ffi.buffer(facts.cmdline, facts.cmdline_bytes)).rstrip(b"\0")
    cmdline = [clean(word.decode("utf-8", "replace")) for word in words.split(b"\0")] if words else []
    name = clean(ffi.string(facts.name, 16).decode("utf-8", "replace"))
    ranks = {key: str(value) for key, value in zip(_RANKS, map(int, facts.ranks), strict=True) if value >= 0}
    return Who(bool(facts.who_flags & 1), int(facts.ppid), int(facts.pid_ns), name, cmdline, ranks)


def _comm(row: Any) -> Comm:
    used = row.last_hook != 0
    last = (int(row.last_hook), int(row.last_count), row.last_type & 0xFFFFFFFF, row.last_type >> 32) if used else None
    known = row.nranks > 0
    return Comm(
        int(row.comm), int(row.next), last, int(row.rank) if known and row.rank >= 0 else None,
        int(row.nranks) if known else None, int(row.errors), int(row.made_by) or None,
        bytes(ffi.buffer(row.uid)) if row.has_uid else None,
    )  # fmt: skip

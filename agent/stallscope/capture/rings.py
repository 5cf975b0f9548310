"""Typed views on the BPF rings and maps; the work is done in native/drain/ without numpy and with few resident pages.

Every class maps what a descriptor names and leaves the descriptor to its owner. `close()` may be called twice; anything
else on a closed view raises ValueError. OSError carries what the kernel said about the mapping. One thread at a time.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

from stallscope.capture._drain import ffi, lib

__all__ = ["Conf", "Ctl", "Drained", "Frame", "InflightRow", "Ranges", "Ring", "Rows", "Slot", "SlotChanges",
           "SlotCounters", "Slots", "Spans", "Table", "Thread", "inflight_rows"]  # fmt: skip

REC_BYTES, UID_BYTES, ROW_BYTES = 104, 232, 416
MAX_UIDS = 1024
_ROW_HEAD = struct.Struct("<QIIIIQ")
_FRAME = struct.Struct("<QQQIBBH8Q")
_NEVER_EMPTY = (1 << 64) - 1


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(-result, f"{what}: {os.strerror(-result)}")
    return result


class _View:
    """One opened C object and its end."""

    _closer = ""
    _type = ""

    def __init__(self, opener: str, *arguments: int) -> None:
        out = ffi.new(f"{self._type} **")
        self._object: Any = None
        _check(getattr(lib, opener)(*arguments, out), opener)
        self._object = out[0]

    @property
    def _c(self) -> Any:
        if self._object is None:
            raise ValueError(f"{type(self).__name__} is closed")
        return self._object

    def close(self) -> None:
        """Unmap."""
        opened, self._object = self._object, None
        if opened is not None:
            getattr(lib, self._closer)(opened)

    def __enter__(self) -> _View:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Drained(NamedTuple):
    """One batch: `wire_rec` and `wire_uid_rec`, back to back. The views are overwritten by the next drain."""

    recs: memoryview
    n_recs: int
    uids: memoryview
    n_uids: int


class Ring(_View):
    """A BPF ring buffer.

    Args:
        fd: the map; must stay open as long as the ring is read.
        size: its data bytes, a power of two.
    """

    _type, _closer = "struct ring", "ring__close"

    def __init__(self, fd: int, size: int) -> None:
        super().__init__("ring__open", fd, size)
        self._fd = fd
        self._batch = ffi.new("struct ring_batch *")
        self._keep: list[Any] = []
        self._recs = self._uids = memoryview(b"")

    def _room_for(self, max_records: int) -> None:
        """Buffers by mmap: what no record was ever copied to does not count in the resident size."""
        max_uids = min(max_records, MAX_UIDS)
        maps = [mmap.mmap(-1, max_records * REC_BYTES), mmap.mmap(-1, max_uids * UID_BYTES)]
        self._recs, self._uids = (memoryview(m) for m in maps)
        self._keep = [ffi.from_buffer("uint8_t[]", m) for m in maps]
        self._batch.recs, self._batch.uids = self._keep
        self._batch.max_recs, self._batch.max_uids = max_records, max_uids

    def drain(self, max_records: int = 16384) -> Drained:
        """Take what is there, in order, at most `max_records` and at most MAX_UIDS with an id; frees their space.

        Ends at a record that is reserved and not yet submitted. Both counts 0 = nothing there now.
        """
        if max_records < 1:
            raise ValueError(f"max_records {max_records}")
        if self._batch.max_recs != max_records:
            self._room_for(max_records)
        _check(lib.ring__drain(self._c, self._batch), "ring drain")
        recs, uids = self._batch.n_recs, self._batch.n_uids
        return Drained(self._recs[: recs * REC_BYTES], recs, self._uids[: uids * UID_BYTES], uids)

    @property
    def consumed_bytes(self) -> int:
        """How far it has been read since it was made; with `pending_bytes` the position of the newest record."""
        return int(lib.ring__consumed(self._c))

    @property
    def pending_bytes(self) -> int:
        """Bytes between the two positions, heads and reserved records included."""
        return int(lib.ring__pending(self._c))

    @property
    def skipped(self) -> int:
        """Records whose size is that of neither struct; they were dropped."""
        return int(lib.ring__skipped(self._c))

    @property
    def corrupt(self) -> int:
        """How often positions or lengths made no sense, and everything pending was dropped."""
        return int(lib.ring__corrupt(self._c))

    def fileno(self) -> int:
        """For poll; readable while there is something to drain."""
        return self._fd


class Frame(NamedTuple):
    """One call in flight; `a` = arguments 0..5 and two stack words; `site` = row of its call site + 1, 0 = none."""

    hook: int
    ts_ns: int
    n: int
    flags: int
    a: tuple[int, ...]
    cookie: int
    sp: int
    site: int = 0


class InflightRow(NamedTuple):
    """One thread inside at least one call; `frames` outermost first, `depth` may exceed their number."""

    tgid: int
    tid: int
    slot: int
    calls: int
    depth: int
    frames: list[Frame]


class Thread(NamedTuple):
    """One thread that made a hooked call; `calls` counts entries."""

    tid: int
    slot: int
    calls: int


def _frame(row: bytes, index: int) -> Frame:
    ts_ns, sp, cookie, n, flags, _pick, site, *a = _FRAME.unpack_from(row, _ROW_HEAD.size + index * _FRAME.size)
    return Frame(cookie & 0xFFF, ts_ns, n, flags, tuple(a), cookie, sp, site)


def _inflight_row(row: bytes) -> InflightRow:
    owner, _seq, depth, slot, _reserved, calls = _ROW_HEAD.unpack_from(row)
    frames = [_frame(row, index) for index in range(min(depth, lib.WIRE_DEPTH))]
    return InflightRow(owner >> 32, owner & 0xFFFFFFFF, slot, calls, depth, frames)


def inflight_rows(data: bytes) -> list[InflightRow]:
    """`wire_row` structs back to back, unpacked."""
    return [_inflight_row(data[at : at + ROW_BYTES]) for at in range(0, len(data), ROW_BYTES)]


class Rows(_View):
    """The thread table, read while its threads run."""

    _type, _closer = "struct rows", "rows__close"

    def __init__(self, fd: int) -> None:
        super().__init__("rows__open", fd)
        self._threads = ffi.new("struct rows_thread[]", 0)
        self._bytes = mmap.mmap(-1, lib.WIRE_ROWS * ffi.sizeof("struct wire_row"))
        self._out = ffi.from_buffer("struct wire_row[]", self._bytes)

    def inflight_bytes(self) -> bytes:
        """Consistent copies of the rows with calls in flight: `wire_row` back to back."""
        count = lib.rows__inflight(self._c, self._out, lib.WIRE_ROWS)
        return bytes(ffi.buffer(self._out, count * ffi.sizeof("struct wire_row")))

    def inflight(self) -> list[InflightRow]:
        """Threads that are inside a paired call now."""
        return inflight_rows(self.inflight_bytes())

    def rows_of_tgid(self, tgid: int) -> list[Thread]:
        """Threads of one process that have a row."""
        if not len(self._threads):
            self._threads = ffi.new("struct rows_thread[]", lib.WIRE_ROWS)
        count = lib.rows__of_tgid(self._c, tgid, self._threads, lib.WIRE_ROWS)
        return [Thread(t.tid, t.slot, t.calls) for t in self._threads[0:count]]

    def thread_calls(self, tgid: int, tid: int) -> int | None:
        """Entries of this thread into hooks; None = it has no row: no call yet, or the table is full."""
        calls = ffi.new("uint64_t *")
        return int(calls[0]) if lib.rows__calls(self._c, tgid, tid, calls) else None

    def release(self, tgid: int) -> int:
        """Free the rows of a process that was taken out of the filter while alive; how many.

        Only when no probe of it is linked any more: its threads must not be writing.
        """
        return int(lib.rows__release(self._c, tgid))

    @property
    def torn(self) -> int:
        """Rows left out of `inflight` because their thread wrote in each of 100 tries."""
        return int(lib.rows__torn(self._c))


class SlotChanges(NamedTuple):
    """What changed: ids, and `wire_count` or `wire_time` back to back in the same order. Values are cumulative."""

    hooks: list[int]
    counts: bytes
    time_ids: list[int]
    times: bytes


class SlotCounters(_View):
    """Counts and times, one process slot at a time."""

    _type, _closer = "struct counters", "counters__close"

    def __init__(self, counts_fd: int, times_fd: int) -> None:
        super().__init__("counters__open", counts_fd, times_fd)
        self._bytes = mmap.mmap(-1, ffi.sizeof("struct counters_delta"))
        self._delta = ffi.cast("struct counters_delta *", ffi.from_buffer(self._bytes))

    def changed(self, slot: int) -> SlotChanges:
        """Rows that are not what they were at the last call for this slot; at first, all that are not zero."""
        d = self._delta
        _check(lib.counters__changed(self._c, slot, d), f"counters of slot {slot}")
        counts = bytes(ffi.buffer(d.counts, d.n_counts * ffi.sizeof("struct wire_count")))
        times = bytes(ffi.buffer(d.times, d.n_times * ffi.sizeof("struct wire_time")))
        return SlotChanges(list(d.hooks[0 : d.n_counts]), counts, list(d.timed[0 : d.n_times]), times)

    def zero(self, slot: int) -> None:
        """Forget a slot whose process has ended, before it is freed."""
        _check(lib.counters__zero(self._c, slot), f"zero slot {slot}")


class Table(_View):
    """An array map of rows of whole words."""

    _type, _closer = "struct table", "table__close"

    def __init__(self, fd: int, row_words: int, rows: int) -> None:
        super().__init__("table__open", fd, row_words, rows)
        self._value = ffi.new("uint64_t *")

    def _get(self, row: int, word: int = 0) -> int:
        _check(lib.table__get(self._c, row, word, self._value), f"row {row}")
        return int(self._value[0])

    def _set(self, row: int, word: int, value: int) -> None:
        _check(lib.table__set(self._c, row, word, value), f"row {row}")

    set_word = _set


class Ctl(Table):
    """Losses and settings by `enum wire_ctl`."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, 1, lib.WIRE_CTL_SIZE)

    def get(self, index: int) -> int:
        """One counter or setting."""
        return self._get(index)

    def set(self, index: int, value: int) -> None:
        """Change a setting, at once."""
        self._set(index, 0, value)


class Conf(Table):
    """Sampling thresholds by hook: 0 = never by chance, 2**32 - 1 = always; and whose call sites are looked up."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, 1, lib.WIRE_HOOKS)

    def get(self, hook: int) -> int:
        """The hook's threshold."""
        return self._get(hook) & 0xFFFFFFFF

    def set(self, hook: int, threshold: int) -> None:
        """Change it, at once. Raises ValueError outside 32 bits."""
        if not 0 <= threshold < 1 << 32:
            raise ValueError(f"threshold {threshold}")
        self._set(hook, 0, self._get(hook) >> 32 << 32 | threshold)

    def look_up_sites(self, hook: int, *, on: bool = True) -> None:
        """From now on, where the process has a Python that is known."""
        self._set(hook, 0, on << 32 | self.get(hook))


class Ranges(Table):
    """Address ranges of the probed runtimes of each process slot, at most WIRE_RANGES."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, 2 * lib.WIRE_RANGES, lib.WIRE_PROCS)

    def set(self, slot: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Replace them all: [from, to). Raises ValueError when there are too many.

        A range is out of use while it changes, so that no program sees half of one.
        """
        if len(ranges) > lib.WIRE_RANGES:
            raise ValueError(f"{len(ranges)} ranges, {lib.WIRE_RANGES} fit")
        for index in range(lib.WIRE_RANGES):
            start, end = ranges[index] if index < len(ranges) else (0, 0)
            self._set(slot, index, _NEVER_EMPTY)
            self._set(slot, lib.WIRE_RANGES + index, end)
            self._set(slot, index, start)

    def get(self, slot: int) -> list[tuple[int, int]]:
        """Those that are not empty."""
        n = lib.WIRE_RANGES
        pairs = [(self._get(slot, i), self._get(slot, n + i)) for i in range(n)]
        return [pair for pair in pairs if pair[0] < pair[1]]


class Spans(Table):
    """How far the runtime's text reaches around its probe points, by file number and hook."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, 2, lib.WIRE_FILES * lib.WIRE_HOOKS)

    def set(self, file: int, hook: int, before: int, after: int) -> None:
        """Bytes before and after the probe point. Raises OSError outside the table."""
        row = file * lib.WIRE_HOOKS + hook
        self._set(row, 0, before)
        self._set(row, 1, after)


class Slot(NamedTuple):
    """A process slot in use; `dead`: its process has ended."""

    slot: int
    tgid: int
    dead: bool


class Slots(Table):
    """Who has which process slot. Programs claim them too, for forked children."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, 3, lib.WIRE_PROCS)

    def all(self) -> list[Slot]:
        """Those in use."""
        owners = ((slot, self._get(slot)) for slot in range(1, lib.WIRE_PROCS))
        return [Slot(slot, tgid, bool(self._get(slot, 1))) for slot, tgid in owners if tgid]

    def claim(self, tgid: int) -> int | None:
        """A free slot for this process, None when there is none. Does not look whether it has one already."""
        slot = int(lib.table__claim(self._c, tgid))
        return slot if slot > 0 else None

    def find(self, tgid: int) -> int | None:
        """The slot of this process."""
        return next((slot for slot in range(1, lib.WIRE_PROCS) if self._get(slot) == tgid), None)

    def free(self, slot: int) -> None:
        """Give a slot back; its counters must be zero by then."""
        for word in (2, 1, 0):
            self._set(slot, word, 0)

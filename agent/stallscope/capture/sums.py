"""Counters of a process that runs one program after another, each with a segment of its own; and calls cut short."""

from __future__ import annotations

import struct

from stallscope.capture.rings import InflightRow, SlotChanges
from stallscope.wire.hook_table import BY_ID

__all__ = ["Sums", "abandoned"]

_COUNT = struct.Struct("<8Q")
_TIME = struct.Struct("<3Q160I")
_REC = struct.Struct("<QQIIHBBHBBIi8Q")
_ABANDONED, _ENTERED, _VITAL = 3, 2, 2
_U32 = (1 << 32) - 1


class Sums:
    """Adds what earlier programs of the process counted. `wire_count` and `wire_time` as native/wire.h has them."""

    def __init__(self) -> None:
        self._before: dict[int, bytes] = {}
        self._before_timed: dict[int, bytes] = {}
        self._now: dict[int, bytes] = {}
        self._now_timed: dict[int, bytes] = {}

    def add(self, changed: SlotChanges) -> SlotChanges:
        """The same rows over all programs."""
        self._now.update(zip(changed.hooks, _split(changed.counts, _COUNT.size), strict=True))
        self._now_timed.update(zip(changed.time_ids, _split(changed.times, _TIME.size), strict=True))
        if not self._before and not self._before_timed:
            return changed
        counts = [_counts(self._before.get(hook), self._now[hook]) for hook in changed.hooks]
        times = [_times(self._before_timed.get(number), self._now_timed[number]) for number in changed.time_ids]
        return SlotChanges(changed.hooks, b"".join(counts), changed.time_ids, b"".join(times))

    def close(self) -> None:
        """A program is over; the next one's counters come on top of what it counted."""
        self._before.update({hook: _counts(self._before.get(hook), row) for hook, row in self._now.items()})
        timed = {number: _times(self._before_timed.get(number), row) for number, row in self._now_timed.items()}
        self._before_timed.update(timed)
        self._now.clear()
        self._now_timed.clear()


def _split(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def _counts(one: bytes | None, other: bytes) -> bytes:
    if one is None:
        return other
    return _COUNT.pack(*(a + b for a, b in zip(_COUNT.unpack(one), _COUNT.unpack(other), strict=True)))


def _times(one: bytes | None, other: bytes) -> bytes:
    if one is None:
        return other
    n, total, longest, *hist = _TIME.unpack(one)
    n2, total2, longest2, *hist2 = _TIME.unpack(other)
    both = (min(a + b, _U32) for a, b in zip(hist, hist2, strict=True))
    return _TIME.pack(n + n2, total + total2, max(longest, longest2), *both)


def abandoned(row: InflightRow, pid: int, slot: int, at_ns: int) -> list[bytes]:
    """`wire_rec` of each call that a thread was inside of when it was gone: BPF writes them itself, a shim can't."""
    records = []
    for depth, frame in enumerate(row.frames):
        hook = BY_ID.get(frame.hook)
        entered = _ENTERED if hook is not None and hook.cookie >> 32 & _VITAL else 0
        records.append(
            _REC.pack(
                frame.ts_ns, max(0, at_ns - frame.ts_ns), pid, row.tid, frame.hook, _ABANDONED, frame.flags | entered,
                slot, depth, 0, frame.n, 0, *frame.a,
            )
        )  # fmt: skip
    return records

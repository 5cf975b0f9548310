"""A segment in a list, and who holds it: for tests of what reads segments."""

from __future__ import annotations

import os
import struct
from types import SimpleNamespace
from typing import Any

from stallscope.capture.procfs import Facts
from stallscope.capture.rings import Drained, Frame, InflightRow, SlotChanges
from stallscope.capture.segment import BadSegment, Mode, SegmentThread
from stallscope.capture.segments import start_ticks_of
from stallscope.capture.target import Target
from stallscope.wire.frames import Kind
from stallscope.wire.hook_table import BY_NAME

LAUNCH, REDUCE = BY_NAME["cudaLaunchKernel"].id, BY_NAME["ncclAllReduce"].id
NO_CHANGES = SlotChanges([], b"", [], b"")


def count_row(calls: int, lost: int = 0) -> bytes:
    """A `wire_count`."""
    return struct.pack("<8Q", calls, 0, 0, lost, 0, 0, 0, 0)


def time_row(n: int, total: int, longest: int, bucket: int) -> bytes:
    """A `wire_time` whose calls were all of one length."""
    hist = [0] * 160
    hist[bucket] = n
    return struct.pack("<3Q160I", n, total, longest, *hist)


class FakeSegment:
    """As the core's Segment. `contents` by the inode of the file behind the descriptor."""

    contents: dict[int, FakeSegment] = {}  # noqa: RUF012 - emptied by each test

    def __init__(self, fd: int) -> None:
        planned = self.contents.get(os.fstat(fd).st_ino)
        if planned is None:
            raise BadSegment("no magic")
        self.__dict__.update(planned.__dict__)
        self.closed = False
        planned.opened = self

    @classmethod
    def plan(cls, fd: int, pid: int | None = None, ticks: int | None = None, **more: Any) -> FakeSegment:
        """What a file will turn out to hold."""
        made = cls.__new__(cls)
        pid = os.getpid() if pid is None else pid
        ticks = start_ticks_of(os.getpid()) if ticks is None else ticks
        header = SimpleNamespace(
            pid=pid, start_ticks=ticks, mono_ns=10**12, hooks=frozenset({LAUNCH}), mode=Mode.FULL, readers=0
        )
        made.__dict__.update(
            header=header,
            batches=[],
            rows=[],
            changes=[],
            lost={},
            table=[],
            modes=[],
            opened=None,
            bad=None,
            gpu=0,
            held=0,
            late=None,
            since_ns=0,
            **more,
        )
        cls.contents[os.fstat(fd).st_ino] = made
        return made

    def drain(self, slot: int, tgid: int, clock: Any, max_records: int) -> Drained:
        if self.bad:
            raise BadSegment(self.bad)
        recs = self.batches.pop(0) if self.batches else 0
        recs = min(recs, max_records)
        return Drained(memoryview(bytes([slot]) * 104 * recs), recs, memoryview(b""), 0)

    def counts(self, *, is_over: bool = False) -> SlotChanges:
        found: SlotChanges = self.changes.pop(0) if self.changes else NO_CHANGES
        return found

    def comms(self) -> list[Any]:
        return list(self.table)

    def inflight(self, clock: Any, slot: int = 0, tgid: int = 0, *, as_counted: bool = False) -> list[InflightRow]:
        return list(self.rows)

    def losses(self) -> dict[str, int]:
        return dict(self.lost)

    def come_late(self, most: int) -> None:
        self.late = most

    def hold(self) -> None:
        self.held += 1

    def whole_since_ns(self, clock: Any) -> int:
        return self.since_ns

    def gpu_untold(self) -> dict[str, int]:
        return {"exhausted": 3 if self.gpu >= 16 else 0}

    def set_mode(self, mode: Mode, one_in: float, *, tap: bool = False) -> None:
        self.modes.append((mode, one_in, tap))

    def threads(self) -> list[SegmentThread]:
        return [SegmentThread(1, True, 5), SegmentThread(2, False, 9)]

    def close(self) -> None:
        self.closed = True


def row(hook: int, ts_ns: int, n: int = 3) -> InflightRow:
    """A thread inside one call."""
    return InflightRow(os.getpid(), 77, 0, 1, 1, [Frame(hook, ts_ns, n, 0, (1, 2, 3, 4, 5, 6, 7, 8), hook, 0)])


def memfd() -> int:
    """A file of its own."""
    return os.memfd_create("stallscope-segment", os.MFD_CLOEXEC)


def target(proc: int = 1, pid: int | None = None, slot: int = 4) -> Target:
    """A process of the capture; this very one, if no pid is given."""
    pid = os.getpid() if pid is None else pid
    return Target(proc, slot, Facts(pid, pid, 1, "t", ["t"], None, 0, os.getuid()), None, -1, 5)


class Sent:
    """An outbox that keeps what it got."""

    def __init__(self) -> None:
        self.frames: list[tuple[Kind, dict[str, Any]]] = []
        self.broken = False
        self.bulk_ok = self.vital_ok = True

    def send(self, kind: Kind, body: dict[str, Any]) -> None:
        self.frames.append((kind, body))

    def send_records(self, batch: Drained) -> None:
        if batch.n_recs:
            self.send(Kind.EVENTS, {"count": batch.n_recs, "data": bytes(batch.recs)})

    def of(self, kind: Kind) -> list[dict[str, Any]]:
        return [body for found, body in self.frames if found == kind]

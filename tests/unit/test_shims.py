"""Segments of shims: whose they are, what is told of them, what becomes of bad ones. The segments are lists."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_segments import LAUNCH, REDUCE, FakeSegment, Sent, count_row, memfd, row, target, time_row

from stallscope.capture import shims as module
from stallscope.capture.held import PLACES, ShimSettings
from stallscope.capture.rings import SlotChanges, Thread
from stallscope.capture.segment import Comm, Mode
from stallscope.capture.segments import UNREADY_NS
from stallscope.capture.shims import (
    BATCH_RECORDS,
    CATCH_UP_BULK,
    MAX_REFUSALS_TOLD,
    NCCL_HOOK,
    Shims,
)
from stallscope.capture.sums import Sums
from stallscope.wire.frames import Kind


class World:
    """Shims over fake segments, and what they told."""

    def __init__(self) -> None:
        self.now = 10**12
        self.sent = Sent()
        self.told: list[tuple[int, list[int], int]] = []
        links: Any = SimpleNamespace(
            tell=lambda t, hooks, since: self.told.append((t.proc, hooks, since)), forget=lambda t: None
        )
        nothing = dict.fromkeys(("begin", "configure", "check", "look", "tell", "end"), lambda *_: None)
        sites: Any = SimpleNamespace(**nothing)
        self.shims = Shims(self.sent, lambda: self.now, links, ShimSettings(one_in=50.0), sites)  # type: ignore[arg-type]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    FakeSegment.contents = {}
    monkeypatch.setattr(module, "Segment", FakeSegment)
    monkeypatch.setattr(module, "Clock", lambda: SimpleNamespace(recalibrate=lambda: None))
    made = World()
    yield made
    made.shims.close()


def test_a_segment_is_drained_in_batches(world: World) -> None:
    """What a tick may say: not before a batch came that was not full."""
    fd = memfd()
    planned = FakeSegment.plan(fd)
    planned.batches = [BATCH_RECORDS, 7]
    process = target()
    assert world.shims.adopt(process, fd) and world.shims.has(process) and process.preloaded
    assert planned.modes == [(Mode.FULL, 50.0, False)]
    planned.opened.changes = [SlotChanges([LAUNCH], count_row(1), [], b"")]
    assert world.shims.changed(process).hooks == [LAUNCH] and world.told[-1] == (1, [LAUNCH], 10**12)
    assert world.shims.threads(process) == [Thread(1, 4, 5)]
    world.shims.mark()
    assert world.shims.drain() and not world.shims.is_told()
    assert not world.shims.drain() and world.shims.is_told()
    assert [body["count"] for body in world.sent.of(Kind.EVENTS)] == [BATCH_RECORDS, 7]
    assert world.sent.of(Kind.EVENTS)[0]["data"][:1] == b"\x04"
    world.shims.open_tap(True)
    assert planned.modes[-1] == (Mode.FULL, 50.0, True)


def test_whose_segment_it_is(world: World) -> None:
    """A forked child holds its parent's; who hands over another's is refused."""
    for refused, (pid, ticks) in enumerate(((os.getpid() + 1, None), (None, 1))):
        fd = memfd()
        FakeSegment.plan(fd, pid, ticks)
        assert not world.shims.adopt(target(), os.dup(fd), is_own=False)
        assert world.shims.refused == refused == len(world.sent.of(Kind.GAP))
        assert not world.shims.adopt(target(), fd)
    assert world.shims.refused == 2
    assert [body["reason"] for body in world.sent.of(Kind.GAP)] == [
        "the segment of its shim is not read: it is not of the process that handed it over"
    ] * 2


def test_the_same_segment_twice(world: World) -> None:
    """Handed over, and found: one reader."""
    fd = memfd()
    planned = FakeSegment.plan(fd)
    process = target()
    assert world.shims.adopt(process, os.dup(fd))
    first = planned.opened
    assert world.shims.adopt(process, fd)
    assert planned.opened is first and not first.closed


def test_another_capture_reads_it(world: World) -> None:
    """Then it is only looked at, until that one has gone."""
    other = memfd()
    again = os.open(f"/proc/self/fd/{other}", os.O_RDWR)
    assert module.lock(other)
    planned = FakeSegment.plan(other)
    world.shims.adopt(target(), again)
    world.shims.calibrate()
    world.shims.open_tap(True)
    assert planned.modes == []
    os.close(other)
    world.shims.calibrate()
    assert planned.modes == [(Mode.FULL, 50.0, True)]


def test_a_bad_segment_is_given_up(world: World) -> None:
    """At once, or later; the process's numbers are lower bounds from then on."""
    assert not world.shims.adopt(target(), memfd())
    fd = memfd()
    planned = FakeSegment.plan(fd)
    planned.batches = [3]
    process = target(2)
    world.shims.adopt(process, fd)
    world.shims.drain()
    planned.opened.bad = "a block beyond its end"
    assert not world.shims.drain() and world.shims.is_told() and planned.opened.closed
    assert not world.shims.drain()
    assert world.shims.threads(process) == [] and world.shims.inflight(0, world.now) == []
    assert [(body["proc"], body["count"]) for body in world.sent.of(Kind.GAP)] == [(1, None), (2, None)]
    world.shims.open_tap(True)
    for _ in range(2 * MAX_REFUSALS_TOLD):
        world.shims.adopt(target(), memfd())
    assert len(world.sent.of(Kind.NOTE)) == MAX_REFUSALS_TOLD
    assert world.shims.refused == 2 + 2 * MAX_REFUSALS_TOLD


def test_calls_under_way_when_the_process_ends(world: World) -> None:
    """Nobody in the process could write that they were abandoned; an operation of NCCL was recorded at its entry."""
    fd = memfd()
    planned = FakeSegment.plan(fd)
    planned.batches, planned.rows = [2], [row(LAUNCH, 100), row(REDUCE, 300)]
    process = target()
    world.shims.adopt(process, fd)
    assert len(world.shims.inflight(150, 250)) == 1
    world.shims.retire(process, 900)
    events = world.sent.of(Kind.EVENTS)
    assert [body["count"] for body in events] == [2, 2]
    one, other = (struct.unpack_from("<QQIIHBBHBBIi8Q", events[1]["data"], at) for at in (0, 104))
    assert one[:8] == (100, 800, os.getpid(), 77, LAUNCH, 3, 0, 4)
    assert other[:8] == (300, 600, os.getpid(), 77, REDUCE, 3, 2, 4)
    assert one[10] == 3 and one[12:] == (1, 2, 3, 4, 5, 6, 7, 8)
    assert planned.opened.closed and world.shims.has(process)
    world.shims.forget(process)
    assert not world.shims.has(process)


def test_counters_go_on_over_an_exec(world: World) -> None:
    """Each program has a segment of its own; the process's counters never go back."""
    process = target()
    for calls, lost in ((5, 1), (7, 2)):
        fd = memfd()
        planned = FakeSegment.plan(fd)
        planned.lost = {"overwritten": lost, "unknown": 9}
        world.shims.adopt(process, fd)
        changes = SlotChanges([LAUNCH], count_row(calls), [3], time_row(2, 10 * calls, calls, 8))
        planned.opened.changes = [changes]
        changed = world.shims.changed(process)
        world.shims.poll_losses(world.now)
    assert changed.counts == count_row(12)
    assert changed.times == time_row(4, 120, 7, 8)
    assert world.shims.lost_by() == {PLACES["overwritten"]: 3}
    world.shims.retire(process, 1)
    later = world.shims.changed(process, SlotChanges([LAUNCH], count_row(2), [], b""))
    assert later.counts == count_row(14)
    world.shims.forget(process)
    assert world.shims.lost_by() == {PLACES["overwritten"]: 3}


def test_one_that_is_not_finished_yet(world: World) -> None:
    """Found before its header was written: not worth a word, unless it stays so."""
    fd = memfd()
    for _ in range(9):
        assert not world.shims.adopt(target(), os.dup(fd), is_own=False)
    assert world.sent.frames == []
    for _ in range(2):
        world.now += UNREADY_NS + 1
        assert not world.shims.adopt(target(), os.dup(fd), is_own=False)
    assert world.shims.refused == 1
    FakeSegment.plan(fd)
    assert world.shims.adopt(target(), fd, is_own=False)


def test_the_last_counters_are_told(world: World) -> None:
    """When the process ends."""
    fd = memfd()
    planned = FakeSegment.plan(fd)
    process = target()
    world.shims.adopt(process, fd)
    planned.opened.changes = [SlotChanges([LAUNCH], count_row(9), [], b"")]
    world.shims.retire(process, 1)
    assert [body["counts"] for body in world.sent.of(Kind.COUNTS)] == [count_row(9)]


def test_what_was_lost_before_anybody_looked(world: World) -> None:
    """The gap begins with the segment."""
    fd = memfd()
    planned = FakeSegment.plan(fd)
    planned.header.mono_ns = world.now - 7 * 10**9
    planned.lost = {"overwritten": 40}
    world.shims.adopt(target(), fd)
    world.shims.close_losses(world.now)
    (gap,) = world.sent.of(Kind.GAP)
    assert (gap["source"], gap["proc"], gap["count"]) == ("shim", 1, 40)
    assert gap["from_ns"] == world.now - 7 * 10**9
    (note,) = world.sent.of(Kind.NOTE)
    assert note["text"] == "its shim counts since its first call, which was 7 s before it was looked at"


def test_a_process_that_lies_about_its_time(world: World) -> None:
    """The newest instant of a stream is the aggregator's clock."""
    fd = memfd()
    FakeSegment.plan(fd).header.mono_ns = world.now * 9
    world.shims.adopt(target(), fd)
    assert [since for _, _, since in world.told] == [world.now]


def test_one_that_never_has_enough(world: World) -> None:
    """Nobody waits for the end of what a target makes up."""
    fd = memfd()
    planned = FakeSegment.plan(fd)
    process = target()
    world.shims.adopt(process, fd)
    planned.opened.batches = [BATCH_RECORDS] * 1000
    world.shims.hasten(process)
    assert world.shims.is_unread(process)
    assert world.shims.drain() and world.shims.is_unread(process)
    world.shims.retire(process, world.now)
    assert len(planned.opened.batches) > 900 and not world.shims._held[process.proc].is_open


def test_no_slot(world: World) -> None:
    """More processes than the tables have room for."""
    fd = memfd()
    planned = FakeSegment.plan(fd)
    world.shims.prepare = lambda target: False
    assert not world.shims.adopt(target(), fd)
    assert planned.opened.closed


def test_sums_of_one_program_are_its_own() -> None:
    """Rows pass through."""
    sums = Sums()
    changed = SlotChanges([LAUNCH], count_row(3), [], b"")
    assert sums.add(changed) is changed
    sums.add(SlotChanges([LAUNCH, REDUCE], count_row(4) + count_row(1), [], b""))
    sums.close()
    assert sums.add(SlotChanges([REDUCE], count_row(2), [], b"")).counts == count_row(3)


@pytest.mark.parametrize(
    ("state", "note"),
    [(1, "what its GPU begins is not known: NCCL has another profiler plugin"),
     (8, "what its GPU begins is told by pairs of CUDA events: that it comes to an operation, up to 0.2 s late")],
)  # fmt: skip
def test_where_nccl_does_not_tell_what_the_gpu_begins_is_noted_once(world: World, state: int, note: str) -> None:
    fd = memfd()
    planned = FakeSegment.plan(fd)
    world.shims.adopt(target(), fd)
    for now in (0, 4, 20, state, state):
        assert planned.opened is not None
        planned.opened.gpu = now
        world.shims.calibrate()
    assert [text for body in world.sent.of(Kind.NOTE) if "GPU" in (text := body["text"])] == [note]


def test_which_rank_a_communicator_is_is_told_when_it_is_known(world: World) -> None:
    fd = memfd()
    planned = FakeSegment.plan(fd)
    world.shims.adopt(target(), fd)
    for rank, nranks in ((None, None), (3, 8), (3, 8)):
        assert planned.opened is not None
        planned.opened.table = [Comm(0x5000, 9, None, rank, nranks, 0, None, None)]
        world.shims.calibrate()
    assert [body["comms"] for body in world.sent.of(Kind.COMMS)] == [[[0x5000, 0, 0, 0, 0, 0, 3, 8, b""]]]


def test_what_the_witness_turned_away_is_noted_at_the_end(world: World) -> None:
    fd = memfd()
    planned = FakeSegment.plan(fd)
    world.shims.adopt(target(), fd)
    assert planned.opened is not None
    planned.opened.gpu = 20
    world.shims.close_losses(world.now)
    assert [body["text"] for body in world.sent.of(Kind.NOTE)] == [
        "shim: 3 operations have no witness of the GPU because too many were waiting for it"
    ]


def test_what_was_there_before_a_late_look(world: World) -> None:
    """The records that rings kept, how many there should be, the table, which was read before them, and the history."""
    fd = memfd()
    planned = FakeSegment.plan(fd)
    planned.header.mono_ns = world.now - 7 * 10**9
    planned.lost, planned.since_ns = {"history": 40}, world.now - 10**9
    planned.batches = [7]
    planned.changes = [SlotChanges([REDUCE], count_row(47), [], b"")]
    planned.table = [Comm(0x5000, 47, (REDUCE, 8, 7, 0), 3, 8, 0, None, None)]
    world.shims.adopt(target(), fd)
    kinds = [kind for kind, _ in world.sent.frames if kind != Kind.NOTE]
    assert kinds == [Kind.EVENTS, Kind.COUNTS, Kind.COMMS, Kind.GAP]
    assert world.told[0][1] == (NCCL_HOOK,) and planned.opened is not None and planned.opened.late == CATCH_UP_BULK
    assert world.sent.of(Kind.COMMS)[0]["comms"] == [[0x5000, 47, REDUCE, 8, 7, 0, 3, 8, b""]]
    (gap,) = world.sent.of(Kind.GAP)
    assert gap == {
        "source": "shim", "proc": 1, "count": 40, "from_ns": world.now - 7 * 10**9, "to_ns": world.now - 10**9,
        "reason": "before the attach",
    }  # fmt: skip
    world.shims.close_losses(world.now)
    assert len(world.sent.of(Kind.GAP)) == 1 and world.shims.lost_by() == {}


def test_what_waits_is_held_while_nothing_is_read(world: World) -> None:
    """A slow aggregator is no reason to overwrite."""
    fd = memfd()
    planned = FakeSegment.plan(fd)
    world.shims.adopt(target(), fd)
    world.shims.poll_losses(world.now)
    assert planned.opened is not None and planned.opened.held == 1

"""The drain on rings and maps: memory that imitates the kernel's layout, and real ones where BPF is allowed."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stallscope.capture import rings
from stallscope.capture.rings import (
    ROW_BYTES,
    Conf,
    Ctl,
    Drained,
    Ranges,
    Ring,
    Rows,
    Slot,
    SlotCounters,
    Slots,
    Thread,
)
from stallscope.wire import columns

ROOT = Path(__file__).resolve().parents[2]
Tool = Callable[[str], str]
PAGE = mmap.PAGESIZE
SIZE = 4 * PAGE
BUSY, DISCARD = 1 << 31, 1 << 30
REC, UID = 104, 232


class FakeRing:
    """What the kernel does to a ring, by hand."""

    def __init__(self, start: int = 0) -> None:
        self.fd = os.memfd_create("ring")
        os.ftruncate(self.fd, 2 * PAGE + 2 * SIZE)
        self.memory = mmap.mmap(self.fd, 2 * PAGE + 2 * SIZE)
        self.move(start, start)
        self.ring = Ring(self.fd, SIZE)

    def move(self, consumer: int, producer: int) -> None:
        struct.pack_into("<Q", self.memory, 0, consumer)
        struct.pack_into("<Q", self.memory, PAGE, producer)

    @property
    def consumer(self) -> int:
        return int(struct.unpack_from("<Q", self.memory, 0)[0])

    @property
    def producer(self) -> int:
        return int(struct.unpack_from("<Q", self.memory, PAGE)[0])

    def head(self, at: int, value: int) -> None:
        struct.pack_into("<I", self.memory, 2 * PAGE + at % SIZE, value)

    def put(self, body: bytes, flags: int = 0) -> int:
        """Position of the new record."""
        at = self.producer
        place = 2 * PAGE + at % SIZE
        self.memory[place + 8 : place + 8 + len(body)] = body
        self.head(at, len(body) | flags)
        self.move(self.consumer, at + (len(body) + 15) // 8 * 8)
        return at


@pytest.fixture
def fake() -> Iterator[FakeRing]:
    made = FakeRing()
    yield made
    made.ring.close()
    os.close(made.fd)


def rec(n: int) -> bytes:
    return bytes(32) + struct.pack("<I", n) + bytes(REC - 36)


def uid(n: int) -> bytes:
    return rec(n) + bytes([n % 256]) * 128


def numbers(drained: Drained) -> list[int]:
    assert len(drained.recs) == drained.n_recs * REC and len(drained.uids) == drained.n_uids * UID
    return [struct.unpack_from("<I", drained.recs, i * REC + 32)[0] for i in range(drained.n_recs)]


def test_n_is_where_these_tests_put_it() -> None:
    assert columns.records(rec(7))["n"].tolist() == [7]


def test_both_sizes_go_into_their_own_buffer(fake: FakeRing) -> None:
    for body in (rec(1), uid(2), rec(3)):
        fake.put(body)
    drained = fake.ring.drain()
    assert numbers(drained) == [1, 3] and drained.n_uids == 1 and bytes(drained.uids) == uid(2)
    assert fake.consumer == fake.producer == 2 * 112 + 240 and fake.ring.pending_bytes == 0
    assert fake.ring.drain()[1::2] == (0, 0)


@pytest.mark.parametrize("start", range(SIZE - 256, SIZE, 8))
def test_records_wrap_at_every_place(start: int) -> None:
    fake = FakeRing(start)
    fake.put(uid(1))
    fake.put(rec(2))
    drained = fake.ring.drain()
    assert bytes(drained.uids) == uid(1) and bytes(drained.recs) == rec(2)
    fake.ring.close()
    os.close(fake.fd)


def test_positions_pass_the_size_many_times(fake: FakeRing) -> None:
    for n in range(5000):
        fake.put(uid(n) if n % 3 else rec(n))
        drained = fake.ring.drain()
        assert (drained.n_recs, drained.n_uids) == ((0, 1) if n % 3 else (1, 0))
        assert bytes(drained.uids or drained.recs) == (uid(n) if n % 3 else rec(n))
    assert fake.consumer > 50 * SIZE and fake.ring.corrupt == 0


def test_a_busy_record_holds_back_what_follows(fake: FakeRing) -> None:
    fake.put(rec(1))
    at = fake.put(rec(2), BUSY)
    fake.put(rec(3))
    assert numbers(fake.ring.drain()) == [1]
    assert fake.consumer == at and fake.ring.pending_bytes == 224
    assert numbers(fake.ring.drain()) == []
    fake.head(at, REC)
    assert numbers(fake.ring.drain()) == [2, 3]


def test_discarded_and_foreign_records_are_passed(fake: FakeRing) -> None:
    for body, flags in ((rec(1), DISCARD), (b"", 0), (bytes(103), 0), (bytes(105), 0), (bytes(500), 0), (rec(2), 0)):
        fake.put(body, flags)
    assert numbers(fake.ring.drain()) == [2]
    assert (fake.ring.skipped, fake.ring.corrupt) == (4, 0)


def test_limits_end_a_batch_without_losing_a_record(fake: FakeRing) -> None:
    for n in range(20):
        fake.put(uid(n) if n % 2 else rec(n))
    seen: list[int] = []
    while (drained := fake.ring.drain(3)).n_recs or drained.n_uids:
        assert drained.n_recs <= 3 and drained.n_uids <= 3
        seen += numbers(drained) + [drained.uids[i * UID + 32] for i in range(drained.n_uids)]
    assert sorted(seen) == list(range(20)) and fake.consumer == fake.producer


@pytest.mark.parametrize("length", [SIZE, SIZE - 8, 0x3FFFFFFF, 0x3FFFFFF8, 113])
def test_a_length_beyond_the_producer_drops_what_is_pending(fake: FakeRing, length: int) -> None:
    fake.put(rec(1))
    fake.head(fake.put(rec(2)), length)
    assert numbers(fake.ring.drain()) == [1]
    assert fake.ring.corrupt == 1 and fake.consumer == fake.producer
    fake.put(rec(3))
    assert numbers(fake.ring.drain()) == [3]


@pytest.mark.parametrize(("consumer", "producer"), [(0, SIZE + 8), (8, 0), (4, 116), (0, (1 << 64) - 8)])
def test_impossible_positions_drop_everything(fake: FakeRing, consumer: int, producer: int) -> None:
    fake.move(consumer, producer)
    assert numbers(fake.ring.drain()) == []
    assert fake.ring.corrupt == 1 and fake.consumer == producer


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, 3 * PAGE, PAGE // 2, 1 << 41])
def test_a_ring_has_a_power_of_two_and_a_page(size: int) -> None:
    with pytest.raises(OSError, match="ring__open"):
        Ring(0, size)


def test_a_closed_view_says_so(fake: FakeRing) -> None:
    fake.ring.close()
    fake.ring.close()
    with pytest.raises(ValueError, match="closed"):
        fake.ring.drain()
    with pytest.raises(OSError, match="rows__open"):
        Rows(-1)


@pytest.fixture(scope="module")
def feed(tmp_path_factory: pytest.TempPathFactory, needs_tool: Tool) -> ctypes.CDLL:
    """Writer threads in C (native/drain/testing/feed.c)."""
    path = tmp_path_factory.mktemp("feed") / "feed.so"
    subprocess.run(
        [needs_tool("cc"), "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread",
         f"-I{ROOT}/native", f"{ROOT}/native/drain/testing/feed.c", "-o", path],
        check=True,
    )  # fmt: skip
    library = ctypes.CDLL(str(path))
    library.feed__ring.restype = library.feed__row.restype = ctypes.c_void_p
    library.feed__ring.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64]
    library.feed__row.argtypes = [ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64]
    library.feed__end.argtypes, library.feed__end.restype = [ctypes.c_void_p], ctypes.c_uint64
    return library


class Tally:
    """Checks the mix that feed.c and flood.bpf.c write: each number once, in order."""

    def __init__(self) -> None:
        self.recs = self.uids = 0
        self.last_rec = self.last_uid = -1

    def add(self, drained: Drained) -> int:
        found = columns.records(drained.recs)
        assert (found["a"][:, 7] == ~found["n"].astype("u8")).all()
        self.last_rec = self._ascending([self.last_rec, *found["n"].tolist()])
        ids = columns.columns(drained.uids, columns.UID_REC)
        assert (ids["rec"]["n"] % 64 == 5).all() and (ids["uid"][:, 127] == ids["rec"]["n"] % 256).all()
        self.last_uid = self._ascending([self.last_uid, *ids["rec"]["n"].tolist()])
        self.recs += drained.n_recs
        self.uids += drained.n_uids
        return drained.n_recs + drained.n_uids

    @staticmethod
    def _ascending(found: list[int]) -> int:
        assert all(a < b for a, b in itertools.pairwise(found))
        return found[-1]


def test_two_million_records_beside_a_writer(feed: ctypes.CDLL) -> None:
    size, count = 1 << 20, 2_000_000
    fd = os.memfd_create("ring")
    os.ftruncate(fd, 2 * PAGE + 2 * size)
    tally = Tally()
    with Ring(fd, size) as ring:
        feeder = feed.feed__ring(fd, size, count)
        while tally.recs + tally.uids < count // 64 * 62:
            tally.add(ring.drain(4096))
        feed.feed__end(feeder)
        assert ring.drain().n_recs == 0 and ring.pending_bytes == 0
        assert (tally.recs, tally.uids, ring.skipped, ring.corrupt) == (
            count // 64 * 61, count // 64, count // 64, 0)  # fmt: skip
    os.close(fd)


def fake_map(size: int) -> int:
    fd = os.memfd_create("map")
    os.ftruncate(fd, size)
    return fd


def row_of(tid: int) -> int:
    return (tid * 2654435761 & 0xFFFFFFFF) >> 20


def test_a_row_is_never_seen_half_written(feed: ctypes.CDLL) -> None:
    fd = fake_map(4096 * ROW_BYTES)
    owner, seen = 77 << 32 | 78, []
    with Rows(fd) as rows:
        writer = feed.feed__row(fd, row_of(78), owner)
        while len(seen) < 20_000:
            for row in rows.inflight():
                assert (row.tgid, row.tid) == (77, 78) and len(row.frames) == row.depth
                last = row.frames[-1]
                assert {last.ts_ns, last.sp, last.cookie, *last.a} == {last.ts_ns}
                seen.append(last.ts_ns)
        made = feed.feed__end(writer)
        assert rows.torn < 20_000
    assert seen == sorted(seen) and len(set(seen)) > 10 and seen[-1] < made
    os.close(fd)


def put_row(memory: mmap.mmap, index: int, owner: int, depth: int, calls: int = 1, seq: int = 2) -> None:
    struct.pack_into("<QIIIIQ", memory, index * ROW_BYTES, owner, seq, depth, 3, 0, calls)


def test_threads_are_found_where_the_program_puts_them() -> None:
    fd = fake_map(4096 * ROW_BYTES)
    memory = mmap.mmap(fd, 0)
    tid = next(t for t in range(1, 1 << 20) if row_of(t) == 4090)
    with Rows(fd) as rows:
        assert rows.thread_calls(5, tid) is None
        put_row(memory, 1, 5 << 32 | tid, depth=0, calls=9)  # seven rows on, past the end of the table
        put_row(memory, 4090, 5 << 32 | 1, depth=0)
        assert rows.thread_calls(5, tid) == 9
        assert rows.thread_calls(6, tid) is None
        put_row(memory, 1, 0, depth=0)
        put_row(memory, 2, 5 << 32 | tid, depth=0)  # eight rows on: no program would
        assert rows.thread_calls(5, tid) is None
        assert rows.rows_of_tgid(5) == [Thread(tid, 3, 1), Thread(1, 3, 1)]
        assert rows.release(5) == 2 and rows.rows_of_tgid(5) == []
    os.close(fd)


def test_only_threads_inside_a_call_are_in_flight() -> None:
    fd = fake_map(4096 * ROW_BYTES)
    memory = mmap.mmap(fd, 0)
    put_row(memory, 10, 1 << 32 | 2, depth=0)
    put_row(memory, 11, 0, depth=1)
    put_row(memory, 12, 1 << 32 | 3, depth=1, seq=5)
    put_row(memory, 13, 1 << 32 | 4, depth=6)
    frame = struct.pack("<QQQIBBH8Q", 100, 200, 0x16060C80812C, 7, 2, 1, 0, *range(8))
    at = 13 * ROW_BYTES + ROW_BYTES - 4 * len(frame)
    memory[at : at + len(frame)] = frame
    with Rows(fd) as rows:
        (row,) = rows.inflight()
        assert (row.tid, row.slot, row.depth, len(row.frames), rows.torn) == (4, 3, 6, 4, 1)
        first = row.frames[0]
        assert (first.hook, first.ts_ns, first.sp, first.n, first.flags) == (300, 100, 200, 7, 2)
        assert first.a == tuple(range(8))
    os.close(fd)


class FakeCounters:
    """The two maps of counters, by hand."""

    def __init__(self) -> None:
        self.fds = fake_map(128 * 400 * 64), fake_map(128 * 320 * 664)
        self.counts, self.times = (mmap.mmap(fd, 0) for fd in self.fds)

    def count(self, slot: int, hook: int, calls: int) -> None:
        struct.pack_into("<Q", self.counts, (slot * 400 + hook) * 64, calls)

    def time(self, slot: int, timed: int, values: tuple[int, int, int], bucket: int, in_bucket: int) -> None:
        at = (slot * 320 + timed) * 664
        struct.pack_into("<QQQ", self.times, at, *values)
        struct.pack_into("<I", self.times, at + 24 + 4 * bucket, in_bucket)


@pytest.fixture
def counters() -> Iterator[tuple[FakeCounters, SlotCounters]]:
    made = FakeCounters()
    with SlotCounters(*made.fds) as view:
        yield made, view
    for fd in made.fds:
        os.close(fd)


def test_a_row_is_reported_when_it_changes(counters: tuple[FakeCounters, SlotCounters]) -> None:
    maps, view = counters
    assert view.changed(127) == ([], b"", [], b"")
    maps.count(127, 399, 5)
    maps.count(126, 1, 6)
    maps.time(127, 319, (1, 700, 700), 9, 1)
    found = view.changed(127)
    assert (found.hooks, found.time_ids) == ([399], [319])
    assert columns.columns(found.counts, columns.COUNT)["calls"].tolist() == [5]
    timed = columns.columns(found.times, columns.TIME)[0]
    assert (timed["n"], timed["sum_ns"], timed["max_ns"], timed["hist"].nonzero()[0].tolist()) == (1, 700, 700, [9])
    assert view.changed(126).hooks == [1]
    assert view.changed(127) == ([], b"", [], b"")


def test_a_histogram_that_lags_behind_is_not_missed(counters: tuple[FakeCounters, SlotCounters]) -> None:
    """The program counts n first and the bucket last; a look in between must not hide the bucket."""
    maps, view = counters
    maps.count(1, 7, 1)  # the entry is counted first of all: without one nothing else is looked at
    maps.time(1, 4, (1, 0, 0), 9, 0)
    assert view.changed(1).time_ids == [4]
    assert view.changed(1).time_ids == []
    maps.time(1, 4, (1, 500, 500), 9, 0)
    assert view.changed(1).time_ids == [4]
    maps.time(1, 4, (1, 500, 500), 9, 1)
    assert view.changed(1).time_ids == [4]
    assert view.changed(1).time_ids == []


def test_zero_forgets_a_slot(counters: tuple[FakeCounters, SlotCounters]) -> None:
    maps, view = counters
    for slot in (4, 5, 6):
        for hook in (0, 399):
            maps.count(slot, hook, 9)
        for timed in (0, 319):
            maps.time(slot, timed, (2, 2, 1), 0, 2)
        view.changed(slot)
    view.zero(5)
    assert view.changed(5) == ([], b"", [], b"")
    assert view.changed(4) == view.changed(6) == ([], b"", [], b"")
    maps.count(5, 0, 9)
    assert view.changed(5).hooks == [0]
    with pytest.raises(OSError, match="slot 128"):
        view.changed(128)


def test_small_tables() -> None:
    fds = [fake_map(PAGE) for _ in range(2)]
    with Ctl(fds[0]) as ctl, Conf(fds[1]) as conf:
        ctl.set(63, (1 << 64) - 1)
        conf.set(399, 0xFFFFFFFF)
        assert (ctl.get(63), ctl.get(62), conf.get(399), conf.get(398)) == ((1 << 64) - 1, 0, 0xFFFFFFFF, 0)
        for refused in (lambda: ctl.set(64, 1), lambda: conf.get(400)):
            with pytest.raises(OSError, match="row"):
                refused()
        with pytest.raises(ValueError, match="threshold"):
            conf.set(1, 1 << 32)
    for fd in fds:
        os.close(fd)


def test_ranges_are_replaced_as_a_whole() -> None:
    fd = fake_map(2 * PAGE)
    with Ranges(fd) as ranges:
        ranges.set(127, [(1, 2), (3, 4), (5, 6), (7, 8)])
        ranges.set(126, [(9, 10)])
        assert ranges.get(127) == [(1, 2), (3, 4), (5, 6), (7, 8)] and ranges.get(126) == [(9, 10)]
        ranges.set(127, [(0x1000, 0x2000)])
        assert ranges.get(127) == [(0x1000, 0x2000)]
        with pytest.raises(ValueError, match="5 ranges"):
            ranges.set(1, [(1, 2)] * 5)
        assert struct.unpack("<8Q", os.pread(fd, 64, 127 * 64)) == (0x1000, 0, 0, 0, 0x2000, 0, 0, 0)
    os.close(fd)


def test_slots_are_claimed_once() -> None:
    fd = fake_map(PAGE)
    with Slots(fd) as slots:
        assert slots.claim(128 * 5 + 9) == 9
        assert slots.claim(128 * 6 + 9) == 10
        assert slots.claim(128) == 1  # place 0 is never used
        assert slots.claim(0) is None
        assert slots.all() == [Slot(1, 128, False), Slot(9, 649, False), Slot(10, 777, False)]
        os.pwrite(fd, struct.pack("<QQ", 1, 5), 9 * 24 + 8)
        assert slots.all()[1] == Slot(9, 649, True) and slots.find(649) == 9
        slots.free(9)
        assert slots.find(649) is None and slots.claim(649) == 9 and not slots.all()[1].dead
        assert os.pread(fd, 24, 9 * 24) == struct.pack("<QQQ", 649, 0, 0)
        assert sum(slots.claim(tgid) is not None for tgid in range(1000, 1200)) == 124
        assert slots.claim(5000) is None
    os.close(fd)


Flood = tuple[dict[str, int], dict[str, int]]


@pytest.fixture
def flood(needs_bpf: None, needs_tool: Tool, tmp_path: Path) -> Iterator[Flood]:
    """Programs and maps of native/drain/testing/flood.bpf.c."""
    from stallscope.capture.object_loader import load_object

    arch = {"x86_64": "x86", "aarch64": "arm64"}[platform.machine()]
    subprocess.run(
        [needs_tool("clang"), "-O2", "-g", "-target", "bpf", "-mcpu=v3", f"-D__TARGET_ARCH_{arch}", "-DWIRE_BPF",
         f"-I/usr/include/{platform.machine()}-linux-gnu", f"-I{ROOT}/native", f"-I{ROOT}/probes",
         "-c", f"{ROOT}/native/drain/testing/flood.bpf.c", "-o", tmp_path / "flood.o"],
        check=True,
    )  # fmt: skip
    programs, maps, _ = load_object(tmp_path / "flood.o", {})
    yield programs, maps
    for fd in (*programs.values(), *maps.values()):
        os.close(fd)


def run_program(fd: int) -> None:
    from stallscope.capture.kernel import bpf

    attr = bytearray(80)
    struct.pack_into("<I", attr, 0, fd)
    bpf(10, attr)  # BPF_PROG_TEST_RUN


def test_a_real_ring_gives_every_record_once(flood: Flood) -> None:
    programs, maps = flood
    tally, bursts = Tally(), 2000
    with Ring(maps["ring"], 4 << 20) as ring:
        for burst in range(bursts):
            run_program(programs["flood"])
            if burst % 50 == 49:
                while tally.add(ring.drain()):
                    pass
        each = bursts * 512 // 64
        assert (tally.recs, tally.uids, ring.skipped, ring.corrupt) == (61 * each, each, each, 0)
        assert ring.pending_bytes == 0


def test_a_full_ring_loses_the_newest(flood: Flood) -> None:
    programs, maps = flood
    with Ring(maps["ring"], 4 << 20) as ring:
        for _ in range(100):
            run_program(programs["plain"])
        assert ring.pending_bytes <= 4 << 20
        total = 0
        while found := ring.drain(1000).n_recs:
            total += found
        assert total == (4 << 20) // 112


def resident_kb() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def test_a_ring_costs_a_window_not_its_size(flood: Flood) -> None:
    _, maps = flood
    before = resident_kb()
    with Ring(maps["ring"], 4 << 20), SlotCounters(maps["counts"], maps["times"]):
        assert resident_kb() - before < 2048


def test_capture_side_imports_no_numpy() -> None:
    code = "import sys, stallscope.capture.rings, stallscope.capture.discovery; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": f"{ROOT}/agent"})


def test_frame_and_row_are_read_as_wire_h_says() -> None:
    assert rings._ROW_HEAD.size + 4 * rings._FRAME.size == columns.ROW.itemsize
    assert rings._FRAME.size == columns.FRAME.itemsize

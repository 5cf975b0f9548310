"""What is told of the call sites in a shim's segment: to whom nothing is written, what earlier readers had, hostile rows."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_segments import Sent, target

from stallscope.capture import shimsites as module
from stallscope.capture.pyconfig import NotYet, Python, Unknown
from stallscope.capture.pylayout import LAYOUTS
from stallscope.capture.segsites import SiteFacts
from stallscope.capture.shimsites import FIRST_NUMBER, LEAST_NS, NO_TABLE, REFUSED, SANDBOXED, ShimSites
from stallscope.capture.sites import OTHERS
from stallscope.capture.sitetable import READY
from stallscope.wire.columns import bucket_bounds, bucket_from
from stallscope.wire.frames import Kind
from stallscope.wire.hook_table import BY_NAME

WAIT = BY_NAME["cudaStreamSynchronize"].id
PYTHON = Python(11, LAYOUTS[11], 0x1000, 0x318, 1, 2, 3)
BUCKET = bucket_from(LEAST_NS)


def site(calls: int, ns: int = 2_000_000, *, hook: int = WAIT, flags: int = READY, longest: int | None = None) -> bytes:
    """A `wire_site` without frames, all of whose calls were of one length."""
    head = struct.pack("<QIIIIIIQ", flags, 1, 0, hook, 0, 0, 77, 5) + bytes(36 * 16)
    hist = [0] * 160
    hist[BUCKET] = calls & 0xFFFFFFFF
    return head + struct.pack("<3Q160I", calls, calls * ns & (1 << 64) - 1, longest or ns, *hist)


class FakeTable:
    """The part of a segment that is asked here. `rows`: number -> `wire_site`."""

    def __init__(self, rows: dict[int, bytes] | None = None, readers: int = 0, has_table: bool = True) -> None:
        self.header = SimpleNamespace(pid=os.getpid(), readers=readers)
        self.rows, self.walked, self.stopped, self.turned_away = rows or {}, [], 0, 0
        self.has_table = has_table

    def sites(self) -> SiteFacts:
        return SiteFacts(len(self.rows), self.turned_away, self.has_table, bool(self.walked))

    def site_rows(self) -> list[int]:
        return list(self.rows)

    def site(self, clock: Any, row: int) -> bytes | None:
        return self.rows[row]

    def walk(self, python: bytes, hooks: list[int], least_ns: int) -> None:
        self.walked.append((struct.unpack("<24I", python)[0], hooks, least_ns))

    def stop_walking(self) -> None:
        self.stopped += 1


class World:
    """Sites of one process."""

    def __init__(
        self, table: FakeTable, found: Any, monkeypatch: pytest.MonkeyPatch, *, is_passive: bool = False
    ) -> None:
        self.now, self.sent, self.table = 10**12, Sent(), table
        self.sites = ShimSites(None, self.sent.send, lambda: self.now)  # type: ignore[arg-type]
        self.sites.counter = None  # type: ignore[assignment]
        self.find: Callable[[int], Any] = lambda pid: found
        self.sites._finder = SimpleNamespace(find=lambda pid: self.find(pid))  # type: ignore[assignment]
        self.refused = self.filtered = False
        monkeypatch.setattr(module, "is_refused", lambda pid: self.refused)
        monkeypatch.setattr(module, "has_own_filter", lambda pid: self.filtered)
        self.held: Any = SimpleNamespace(target=target(), segment=table, is_open=True, is_passive=is_passive)

    def begin(self) -> World:
        self.sites.begin(self.held)
        self.sites.configure()
        return self

    def rows(self) -> list[list[Any]]:
        self.sites.tell(self.held)
        return [row for body in self.sent.of(Kind.SITES) for row in body["rows"]]

    def whys(self) -> list[str]:
        return [body["unknown"] for body in self.sent.of(Kind.SITES) if "unknown" in body]


def test_the_numbers_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(FakeTable(), PYTHON, monkeypatch).begin()
    world.sites.configure()
    ((pid, hooks, least_ns),) = world.table.walked
    assert (pid, least_ns) == (os.getpid(), LEAST_NS) and WAIT in hooks and BY_NAME["cudaLaunchKernel"].id not in hooks
    assert [body.get("least_ns") for body in world.sent.of(Kind.SITES)] == [LEAST_NS] and not world.whys()
    assert bucket_bounds(BUCKET)[0] == LEAST_NS  # else how many were shorter could not be told


def test_who_only_reads_along_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(FakeTable({3: site(2)}), PYTHON, monkeypatch, is_passive=True).begin()
    assert world.table.walked == [] and [row[1] for row in world.rows()] == [2]
    world.filtered = True
    world.sites.check()
    assert world.table.stopped == 0


def test_who_has_the_say_at_last_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(FakeTable(), PYTHON, monkeypatch, is_passive=True).begin()
    world.held.is_passive = False
    world.sites.check()
    world.sites.check()
    assert len(world.table.walked) == 1


@pytest.mark.parametrize(("state", "found", "why"), [
    ({"refused": True}, PYTHON, REFUSED), ({"filtered": True}, PYTHON, SANDBOXED), ({}, Unknown("it is odd"), "it is odd"),
    ({}, None, "there is no Python in the process"),
])  # fmt: skip
def test_where_nothing_is_looked_up(
    monkeypatch: pytest.MonkeyPatch, state: dict[str, bool], found: Any, why: str
) -> None:
    """And a forked child is told to stop with what it has from its parent."""
    world = World(FakeTable(), found, monkeypatch)
    vars(world).update(state)
    world.begin()
    assert (world.table.walked, world.table.stopped, world.whys()) == ([], 1, [why])
    assert [body["text"] for body in world.sent.of(Kind.NOTE)] == ([f"no Python call sites: {why}"] if found else [])


def test_a_segment_in_a_folder_has_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert World(FakeTable(has_table=False), PYTHON, monkeypatch).begin().whys() == [NO_TABLE]


def test_a_python_that_has_not_begun_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites wait that long."""
    world = World(FakeTable({3: site(2)}), NotYet(), monkeypatch).begin()
    assert world.rows() == [] and not world.table.walked
    world.find = lambda pid: PYTHON
    world.sites.configure()
    assert not world.table.walked
    world.now += module.RETRY_NS
    world.sites.configure()
    assert world.table.walked and [row[1] for row in world.rows()] == [2]


def test_numbers_are_sent_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(FakeTable({3: site(2)}), PYTHON, monkeypatch).begin()
    assert world.rows() == [[FIRST_NUMBER, 2, 4_000_000, 2_000_000, 5, [BUCKET, 2]]]
    assert len(world.rows()) == 1
    world.table.rows[3] = site(3)
    assert [row[:2] for row in world.rows()] == [[FIRST_NUMBER, 2], [FIRST_NUMBER, 3]]
    assert [body["why"] for body in world.sent.of(Kind.SITE)] == ["the thread runs no Python code"]


def test_a_later_reader_is_told_what_came_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest of before is not the longest since: its bucket tells from where on that is."""
    world = World(FakeTable({3: site(2, longest=2_200_000)}, readers=1), PYTHON, monkeypatch).begin()
    world.table.rows[3] = site(5, longest=2_200_000)
    assert world.rows() == [[FIRST_NUMBER, 3, 6_000_000, LEAST_NS, 5, [BUCKET, 3]]]


def test_what_a_hostile_segment_says_does_not_reach_the_aggregator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad number there would end the whole stream."""
    rows = {1: site(1, hook=399), 2: site(1 << 63), 3: site(1, ns=1 << 63, longest=1 << 63), 4: site(1)}
    world = World(FakeTable(rows), PYTHON, monkeypatch).begin()
    assert [row[:2] for row in world.rows()] == [[FIRST_NUMBER + 2, 1]]
    assert len(world.sent.of(Kind.SITE)) == 3


def test_a_program_that_locks_itself_up_later(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(FakeTable(), PYTHON, monkeypatch).begin()
    world.sites.check()
    assert world.table.stopped == 0
    world.filtered = True
    world.sites.check()
    world.sites.check()
    assert world.table.stopped == 1
    assert [body["text"] for body in world.sent.of(Kind.NOTE)] == [
        f"no more Python call sites from now on: {SANDBOXED}"
    ]


def test_another_interpreter_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames that its threads seem to have are those of who called it."""
    world = World(FakeTable({3: site(2)}), PYTHON, monkeypatch).begin()
    monkeypatch.setattr(module, "has_hidden_threads", lambda pid, python: True)
    world.table.rows[4] = site(1)
    assert [row[1] for row in world.rows()] == [2, 1] and world.table.stopped == 1
    assert [(body["frames"], body["why"]) for body in world.sent.of(Kind.SITE)] == [([], OTHERS)] * 2
    assert [OTHERS in body["text"] for body in world.sent.of(Kind.NOTE)] == [True]
    world.sites.check()
    assert len(world.table.walked) == 1


def test_the_end_tells_the_last_and_what_was_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(FakeTable({3: site(2)}), NotYet(), monkeypatch).begin()
    world.table.turned_away = 7
    assert world.sites.turned_away() == 7
    world.sites.end(world.held)
    assert [row[1] for row in world.rows()] == [2] and world.sites.turned_away() == 7


def test_a_call_that_lasts_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def frames_now(pid: int, python: Any, reader: Any, tid: int) -> list[Any]:
        looked.append(tid)
        raise module.NotThere("it runs")

    world = World(FakeTable(), PYTHON, monkeypatch).begin()
    monkeypatch.setattr(module, "frames_now", frames_now)
    young = [1, 7, [[WAIT, world.now - module.STACK_AGE_NS + 1, 0, 0, []]]]
    old = [1, 8, [[WAIT, world.now - module.STACK_AGE_NS, 0, 0, []]]]
    for _ in range(3):
        assert world.sites.stacks([young, old], world.now, final=False) == []
    assert looked == [8]
    world.sites.stacks([young, old], world.now, final=True)
    assert looked == [8, 7]
    many = [[1, tid, [[WAIT, 0, 0, 0, []]]] for tid in range(100, 200)]
    world.sites.stacks(many, world.now, final=False)
    assert len(looked) == 2 + module.STACKS_AT_ONCE

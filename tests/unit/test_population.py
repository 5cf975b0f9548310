"""Who is traced, when processes fork and end at bad moments. Tables, linker and /proc are stand-ins."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stallscope.capture import ancestors
from stallscope.capture import population as module
from stallscope.capture.population import Population
from stallscope.capture.procfs import Facts
from stallscope.wire.frames import Kind

FORK, EXEC, EXIT = 4, 5, 6


class Slots:
    """The slot table in a dict; programs claim too."""

    def __init__(self) -> None:
        self.owners: dict[int, int] = {}

    def claim(self, tgid: int) -> int | None:
        slot = next(s for s in range(1, 128) if s not in self.owners)
        self.owners[slot] = tgid
        return slot

    def find(self, tgid: int) -> int | None:
        return next((s for s, owner in self.owners.items() if owner == tgid), None)

    def free(self, slot: int) -> None:
        del self.owners[slot]

    def all(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(slot=slot, tgid=tgid) for slot, tgid in self.owners.items()]


class World:
    """A process tree, the kernel's side of the filter, and a population that looks at them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.children: dict[int, list[int]] = {}
        self.filter: dict[int, int] = {}
        self.slots = Slots()
        self.linked: list[int] = []
        self.frames: list[tuple[Kind, dict[str, Any]]] = []
        self.records: list[bytes] = []
        self.on_link: dict[int, tuple[int, int]] = {}
        tables = SimpleNamespace(
            slots=self.slots,
            newest=lambda: (0, 0),
            procs=SimpleNamespace(add=lambda pid, slot, follow: self.filter.__setitem__(pid, slot)),
            counters=SimpleNamespace(zero=lambda slot: None),
            ranges=SimpleNamespace(set=lambda slot, ranges: None),
            endings=SimpleNamespace(row=lambda slot: bytes(1032), clear=lambda slot: None),
        )
        linker = SimpleNamespace(
            link_process=self._link, link_forked=lambda child, parent: self.linked.append(child.pid),
            announce=lambda target, at: None, before_link=None,
            must_untime=lambda target: False, tell_silent=lambda target, final: None,
        )  # fmt: skip
        sharing, reaper = (
            SimpleNamespace(forget=lambda linked: None),
            SimpleNamespace(close_later=lambda entries, returns: None),
        )
        shims = SimpleNamespace(has=lambda target: False, hasten=lambda target: None, is_unread=lambda target: False,
                                retire=lambda target, at: None)  # fmt: skip
        monkeypatch.setattr(module, "children_of", self._descendants)
        monkeypatch.setattr(module, "facts_of", self._facts)
        monkeypatch.setattr(module, "parent_of", lambda pid: self._facts(pid).ppid)
        monkeypatch.setattr(ancestors, "chain_of", lambda pid: [])
        monkeypatch.setattr(module.os, "pidfd_open", lambda pid: os.open("/dev/null", os.O_RDONLY))
        send = lambda kind, body: self.frames.append((kind, body))  # noqa: E731
        self.now, self.ended, self.looked = 5, False, []
        monkeypatch.setattr(module, "has_ended", lambda fd: self.ended)
        forked = lambda pid, parent, start_ns: self._facts(pid)  # noqa: E731
        monkeypatch.setattr(module, "forked_facts", forked)
        monkeypatch.setattr(module, "execed_facts", lambda facts: facts._replace(name="other"))
        self.population = Population(tables, linker, sharing, reaper, shims, send, lambda: self.now, follow=True)  # type: ignore[arg-type]
        self.population.on_image = lambda target: self.looked.append(target.pid)

    def _descendants(self, pid: int) -> list[int]:
        direct = self.children.get(pid, [])
        return [*direct, *(g for child in direct for g in self._descendants(child))]

    def _facts(self, pid: int) -> Facts:
        parent = next((p for p, kids in self.children.items() if pid in kids), 1)
        return Facts(pid, pid, parent, f"p{pid}", ["p"], None, 0, 0)

    def _link(self, target: Any, appeared_ns: int | None) -> int:
        """Linking takes time: a process may fork meanwhile."""
        if target.pid not in self.linked:
            self.linked.append(target.pid)
        if target.pid in self.on_link:
            self.fork(*self.on_link.pop(target.pid))
        return 0

    def fork(self, parent: int, child: int) -> None:
        """What the kernel does; on_fork of probes/life.h where the parent is in the filter."""
        self.children.setdefault(parent, []).append(child)
        if parent in self.filter:
            slot = self.slots.claim(child)
            assert slot
            self.filter[child] = slot
            self.records.append(struct.pack("<QQIIHBBHBBIi8Q", 7, 0, parent, parent, 0, FORK, 0, 0, 0, 0, 0, 0,
                                            child, slot, *[0] * 6))  # fmt: skip

    def happens(self, kind: int, pid: int, *a: int) -> None:
        words = [*a, *[0] * (8 - len(a))]
        self.records.append(struct.pack("<QQIIHBBHBBIi8Q", 8, 0, pid, pid, 0, kind, 0, 0, 0, 0, 0, 0, *words))

    def deliver(self) -> None:
        """The life ring is drained."""
        for record in self.records:
            self.population.event(record)
        self.records.clear()

    def pass_(self, ms: int) -> None:
        self.now += ms * 1_000_000
        self.population.settle()

    def seen(self) -> list[int]:
        """Pids of all processes that were announced."""
        return [body["pid"] for kind, body in self.frames if kind == Kind.PROCESS]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(monkeypatch)
    yield made
    for target in made.population.live():
        target.close()


def test_child_forked_during_the_attach_is_one_process(world: World) -> None:
    """It is in /proc and in the ring: linked twice, each of its calls would count twice."""
    world.on_link[10] = (10, 11)
    world.population.adopt([10])
    world.deliver()
    assert world.seen() == [10, 11]
    assert world.slots.owners[world.filter[11]] == 11
    assert len(world.slots.owners) == 2


def test_grandchild_forked_while_others_are_linked_is_not_missed(world: World) -> None:
    """Its parent was there before the attach: were it not in the filter by then, nobody would tell of the fork."""
    world.children = {10: [11, 12]}
    world.on_link[11] = (12, 13)
    world.population.adopt([10])
    world.deliver()
    assert sorted(world.seen()) == [10, 11, 12, 13]


def test_fork_under_way_while_its_child_is_found(world: World) -> None:
    """The child stands in /proc a moment before the tracepoint of its fork: two slots, one process."""
    world.children = {10: [11]}
    adopt_one = world.population._adopt_one

    def then_tracepoint(pid: int, parent: int | None, *, given: bool) -> None:
        adopt_one(pid, parent, given=given)
        if pid == 11:
            world.children[10].remove(11)
            world.fork(10, 11)

    world.population._adopt_one = then_tracepoint  # type: ignore[method-assign]
    world.population.adopt([10])
    target = world.population.by_pid(11)
    assert target and world.filter[11] == target.slot
    world.deliver()
    assert world.seen() == [10, 11]
    assert sorted(world.slots.owners.values()) == [10, 11]


def test_the_young_are_looked_at_later(world: World) -> None:
    """Told at once, and linked as their parent is; what ends or becomes another program first is left alone."""
    world.population.adopt([10])
    assert world.looked == [10] and world.linked == [10]
    for child in (11, 12, 13):
        world.fork(10, child)
    world.deliver()
    assert world.seen() == [10, 11, 12, 13] and world.looked == [10]
    world.pass_(20)
    world.happens(EXEC, 12)
    world.happens(EXIT, 13)
    world.deliver()
    assert [body["name"] for kind, body in world.frames if kind == Kind.IMAGE] == ["other"]
    world.pass_(15)
    assert world.looked == [10, 11]
    world.pass_(20)
    assert world.looked == [10, 11, 12]
    world.fork(10, 14)
    world.deliver()
    world.population.settle(final=True)
    assert world.looked[3:] == [14]


def test_who_is_gone_at_its_exec_ran_another_program(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name comes with the record, its command line is not known: it is not its parent's."""
    monkeypatch.setattr(module, "execed_facts", lambda facts: os.stat("/nonexistent"))
    world.population.adopt([10])
    world.fork(10, 11)
    world.happens(EXEC, 11, 11, *struct.unpack("<2Q", b"yes\x1b".ljust(16, b"\0")))
    world.deliver()
    (image,) = (body for kind, body in world.frames if kind == Kind.IMAGE)
    assert (image["name"], image["cmdline"]) == ("yes\\x1b", [])


def test_an_end_whose_record_is_under_way(world: World) -> None:
    """The pidfd tells before the ring does: the exit code in the ring counts. Without a record, none is known."""
    world.population.adopt([10])
    world.fork(10, 11)
    world.deliver()
    world.ended = True
    world.population.check()
    assert world.population.by_pid(11) is not None
    world.happens(EXIT, 11, 7 << 8)
    world.deliver()
    (dead,) = world.population._dead
    assert (dead.target.pid, dead.code) == (11, 7 << 8)
    world.population.check()
    assert [(one.target.pid, one.code) for one in world.population._dead] == [(11, 7 << 8), (10, -1)]
    world.ended = False


def test_the_test_sees_the_real_record() -> None:
    """The record of this test has the size that native/wire.h says."""
    assert struct.calcsize("<QQIIHBBHBBIi8Q") == 104
    assert "sizeof(struct wire_rec) == 104" in Path(__file__).resolve().parents[2].joinpath("native/wire.h").read_text()

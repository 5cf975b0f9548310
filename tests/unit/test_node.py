"""What a daemon decides about processes it finds; everything that needs rights is a stand-in."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest

from stallscope.capture import node as module
from stallscope.capture.admission import Admission, Rule
from stallscope.capture.discovery import Lost, Mapped
from stallscope.capture.node import MAX_STRANGERS, NodeSession
from stallscope.capture.procfs import Facts
from stallscope.errors import PermissionProblem


def mapped(pid: int, at_ns: int = 5, path: str = "/x/libcuda.so.1") -> Mapped:
    """News of one mapping."""
    return Mapped(pid, pid, at_ns, 0, 1, 0, (0, 0), 5, path)


class World:
    """Processes, what was asked of them, and the frames."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, deny: tuple[Rule, ...] = ()) -> None:
        self.facts: dict[int, Facts] = {}
        self.asked: list[int] = []
        self.adopted: dict[int, int | None] = {}
        self.hidden: set[int] = set()
        self.news: list[Any] = []
        self.frames: list[dict[str, Any]] = []
        self.now, self.step = 100, 0
        monkeypatch.setattr(module, "facts_of", self._facts_of)
        monkeypatch.setattr(module, "require_readable", self._require)
        monkeypatch.setattr(module.os.path, "exists", lambda path: int(path.split("/")[2]) in self.facts)
        self.session: Any = NodeSession.__new__(NodeSession)
        parts = {
            "_discovery": SimpleNamespace(read=self._read), "_clock": self._clock, "_mappings_read_ns": 1,
            "_strangers": OrderedDict(), "_decided": OrderedDict(), "_rescan_ns": 0, "_admission": Admission((), deny),
            "_told": 0, "unreadable": 0, "missed": 0, "outbox": SimpleNamespace(send=lambda kind, b: self.frames.append(b)),
            "population": SimpleNamespace(by_pid=self.adopted.get, live=list, adopt_found=self._adopt),
        }  # fmt: skip
        for name, part in parts.items():
            setattr(self.session, name, part)

    def _clock(self) -> int:
        self.now += self.step
        return self.now

    def _read(self) -> list[Any]:
        news, self.news = self.news, []
        return news

    def _facts_of(self, pid: int) -> Facts:
        self.asked.append(pid)
        if pid not in self.facts:
            raise ProcessLookupError
        return self.facts[pid]

    def _require(self, pid: int, what: str) -> None:
        if pid in self.hidden:
            raise PermissionProblem(what, why="this process lacks CAP_SYS_PTRACE", hint="run it as root")

    def _adopt(self, pid: int, since_ns: int | None) -> Any:
        self.adopted[pid] = since_ns or -1
        return object() if pid in self.facts else None

    def process(self, pid: int, **given: Any) -> None:
        plain = Facts(pid, pid, 1, "python", ["python", "a.py"], None, 1_000_000_000, 1000)
        self.facts[pid] = plain._replace(**given)

    def look(self, *news: Any) -> None:
        self.news += news
        self.session._read_mappings()


def test_a_stranger_is_adopted_from_its_first_library_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with the instant of the first mapping; other files of the same beginning are nobody's."""
    world = World(monkeypatch)
    world.process(7)
    world.process(8)
    world.look(mapped(7, 5), mapped(7, 6, "/x/libcudart.so.12"), mapped(8, 6, "/x/libcudadebugger.so.1"))
    assert world.adopted == {7: 5} and world.asked == [7]


def test_who_is_denied_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it runs another program, whatever the clock's jitter makes of its start."""
    world = World(monkeypatch, deny=(Rule(command="*a.py"),))
    world.process(7)
    world.look(mapped(7))
    world.process(7, start_ns=1_000_000_400)
    world.look(mapped(7, 6, "/x/libcudart.so.12"))
    assert world.adopted == {}
    assert len(world.session._decided) == 1 and sum(world.session._admission.denied.values()) == 1
    world.process(7, cmdline=["python", "b.py"])
    world.look(mapped(7, 9))
    assert world.adopted == {7: 9}


def test_who_has_ended_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its mapping on; by its number, since nothing else is known."""
    world = World(monkeypatch)
    world.look(mapped(7, 5))
    (gap,) = world.frames
    assert (gap["from_ns"], gap["count"]) == (5, None) and "pid 7 had ended" in gap["reason"]
    assert world.session.missed == 1


def test_who_is_hidden_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: a gap and a note with the reason."""
    world = World(monkeypatch)
    world.process(7)
    world.hidden.add(7)
    world.look(mapped(7))
    world.look(mapped(7, 6, "/x/libcudart.so.12"))
    gap, note = world.frames
    assert "pid 7 (python, user 1000) is not traced: this process lacks CAP_SYS_PTRACE" in gap["reason"]
    assert "uses CUDA and is not traced" in note["text"] and world.session.unreadable == 1


def test_a_flood_does_not_stop_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some milliseconds a look; what is over the table's end is found by a look at /proc."""
    world = World(monkeypatch)
    first = 1 << 23  # no pid of this test's own
    many = range(first, first + MAX_STRANGERS + 10)
    for pid in many:
        world.process(pid)
    world.step = 1_000_000  # each question takes that long
    world.look(*[mapped(pid, pid) for pid in many])
    assert 5 < len(world.adopted) < 40
    assert len(world.session._strangers) + len(world.adopted) == MAX_STRANGERS
    assert world.session._rescan_ns == first + MAX_STRANGERS
    world.look()
    assert len(world.adopted) > 20


def test_lost_news_mean_a_look_at_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next slow tick, since the read before the loss."""
    world = World(monkeypatch)
    world.look(Lost(0, 0, 9, 1, 17))
    assert world.session._rescan_ns == 1

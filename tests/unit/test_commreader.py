"""Which communicators are read, when, and how often; the tables and the target's memory are made up."""

from __future__ import annotations

import os
import struct
from types import SimpleNamespace
from typing import Any

from stallscope.capture.commreader import READ_A_LOOK, CommReader
from stallscope.capture.parser_client import CommPlace, ParserFailed
from stallscope.capture.rings import Frame, InflightRow
from stallscope.wire.hook_table import BY_NAME

SPREAD, ROWS, LOOK = 0x9E3779B97F4A7C15, 1 << 14, 250_000_000
PLACE = CommPlace("table", 0x1000, 0x2000, 5, "2.27.5")


class World:
    """Tables, one parser, one process or several, and a clock."""

    def __init__(self, pids: tuple[int, ...] = (100,), place: CommPlace | Exception = PLACE) -> None:
        self.rows = [[0, 0] for _ in range(ROWS)]
        self.ctl = {11: 0, 12: 0}
        self.memory: dict[tuple[int, int], bytes] = {}
        self.flying: list[InflightRow] = []
        self.sent: list[dict[str, Any]] = []
        self.place, self.asked, self.reads, self.now = place, 0, 0, 0
        self.fd = os.open("/dev/null", os.O_RDONLY)
        library = SimpleNamespace(library="NCCL", fd=self.fd)
        self.targets: list[Any] = [
            SimpleNamespace(pid=pid, proc=pid * 10, ended=False, linked={"x": library}) for pid in pids
        ]
        table = SimpleNamespace(
            ctl=self.ctl.__getitem__, keys=lambda: [row[0] for row in self.rows], next=lambda i: self.rows[i][1],
            inflight=lambda: self.flying,
        )  # fmt: skip
        parser = SimpleNamespace(nccl_comm=self.ask)
        self.reader = CommReader(table, parser, lambda kind, body: self.sent.append(body), self.read)  # type: ignore[arg-type]

    def ask(self, fd: int) -> CommPlace:
        self.asked += 1
        if isinstance(self.place, Exception):
            raise self.place
        return self.place

    def read(self, pid: int, ranges: list[tuple[int, int]]) -> list[bytes]:
        self.reads += 1
        return [self.memory.get((pid, address), b"")[:length] for address, length in ranges]

    def key(self, row: int, pid: int, pointer: int) -> None:
        self.rows[row][0] = (pointer + pid * SPREAD) & ((1 << 64) - 1)
        self.ctl[11] += 1

    def comm(self, pid: int, pointer: int, rank: int, hash_: int = 77) -> None:
        self.memory[pid, pointer] = bytes(8)
        self.memory[pid, pointer + 0x1000 - 24] = struct.pack("<QQQiii28x", 0, 5, hash_, rank, 4, rank)
        self.memory[pid, pointer + 0x2000] = bytes(40)

    def look(self, times: int = 1) -> list[dict[str, Any]]:
        before = len(self.sent)
        for _ in range(times):
            self.now += LOOK
            self.reader.look(self.targets, self.now)
        return self.sent[before:]


def ranks(sent: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(body["proc"], struct.unpack_from("<i", body["data"], 24)[0]) for body in sent]


def test_a_new_one_is_read_a_look_later() -> None:
    world = World((100, 200))
    world.key(5, 200, 0x7F0000001000)
    world.comm(200, 0x7F0000001000, 3)
    assert world.look() == [] and world.reads == 0
    sent = world.look()
    assert ranks(sent[:1]) == [(2000, 3)]
    body = sent[0]
    assert (body["pointer"], body["by"], body["rank_at"], body["version"]) == (
        0x7F0000001000,
        "table",
        0x1000,
        "2.27.5",
    )


def test_nothing_new_costs_nothing() -> None:
    world = World(place=CommPlace("code", 0x1000, None, 5, None))
    world.key(5, 100, 0x1000)
    world.comm(100, 0x1000, 0)
    assert len(world.look(2)) == 1
    reads = world.reads
    assert world.look(100) == [] and world.reads == reads and world.asked == 1


def test_one_under_construction_is_read_again_until_it_is_done() -> None:
    world = World()
    world.key(5, 100, 0x1000)
    world.comm(100, 0x1000, -1)
    assert ranks(world.look(2)) == [(1000, -1)]
    assert world.look(4) == []
    world.comm(100, 0x1000, 2)
    assert ranks(world.look(40))[:1] == [(1000, 2)]


def test_garbage_is_given_up() -> None:
    world = World()
    world.key(5, 100, 0x1234)
    sent = world.look(8)
    assert [(body["start"], body["data"]) for body in sent] == [(b"", b"")]
    world.look(2000)
    reads = world.reads
    world.look(500)
    assert world.reads == reads < 20 and len(world.sent) == 1


def test_another_one_at_the_address() -> None:
    world = World()
    world.key(5, 100, 0x1000)
    world.comm(100, 0x1000, 1)
    world.rows[5][1] = 900
    world.look(10)
    world.sent.clear()
    world.ctl[12] += 1  # a creation returned
    world.comm(100, 0x1000, 2, hash_=78)
    world.rows[5][1] = 0
    assert ranks(world.look(2))[:1] == [(1000, 2)]
    world.look(10)
    assert world.sent[-1]["samples"]
    world.sent.clear()
    world.ctl[12] += 1  # of another one
    assert world.look(10) == []


def test_samples_while_nothing_is_under_way() -> None:
    world = World()
    world.key(5, 100, 0x1000)
    world.comm(100, 0x1000, 1)
    name = BY_NAME["ncclAllReduce"]
    busy = InflightRow(100, 7, 1, 0, 1, [Frame(name.id, 1, 2, 0, (0, 0, 0, 0, 0, 0x1000, 0, 0), 0, 9)])
    world.flying = [busy]
    assert [len(body["samples"]) for body in world.look(10)] == [0]
    group = BY_NAME["ncclGroupEnd"]
    world.flying = [InflightRow(100, 7, 1, 0, 1, [Frame(group.id, 1, 2, 0, (0,) * 8, 0, 9)])]
    assert world.look(3) == []
    world.flying = [busy._replace(tgid=101)]
    for n in range(12):
        world.rows[5][1] = 10 + n
        world.memory[100, 0x3000] = struct.pack("<5Q", 1, 2, 3, 4, 5 + n)
        world.look()
    assert [len(body["samples"]) for body in world.sent] == [0, 1, 3, 8]
    assert world.sent[-1]["samples"][0] == [10, 1, 2, 3, 4, 5] and world.sent[-1]["samples"][7] == [17, 1, 2, 3, 4, 12]


def test_a_number_that_moves_is_no_sample() -> None:
    world = World()
    world.key(5, 100, 0x1000)
    world.comm(100, 0x1000, 1)
    read = world.reader._read

    def moving(pid: int, ranges: list[tuple[int, int]]) -> list[bytes]:
        world.rows[5][1] += 1
        return read(pid, ranges)

    world.reader._read = moving
    assert [body["samples"] for body in world.look(20)] == [[]]


def test_a_full_table() -> None:
    """16384 communicators at once: so many a look, each once; then nothing is left to do."""
    world = World(place=CommPlace("code", 0x1000, None, 5, None))
    for row in range(ROWS):
        world.key(row, 100, 0x10000 * (row + 1))
        world.comm(100, 0x10000 * (row + 1), 0)
    for _ in range(4):
        before = world.reads
        world.look()
        assert world.reads - before <= READ_A_LOOK
    world.look(ROWS // READ_A_LOOK + 4)
    assert len(world.sent) == ROWS == len({body["pointer"] for body in world.sent})
    reads = world.reads
    world.look(10)
    assert world.reads == reads


def test_foreign_keys_and_ended_processes() -> None:
    world = World()
    world.rows[9][0] = 0x123456789ABCDEF0
    world.ctl[11] += 1
    world.key(5, 100, 0x1000)
    world.comm(100, 0x1000, 0)
    world.look()
    world.targets[0].ended = True
    assert world.look(5) == [] and world.reads == 0


def test_a_library_that_tells_nothing() -> None:
    for place in (CommPlace(None, 0, None, 5, "2.27.5"), ParserFailed("cannot parse", "x", "y")):
        world = World(place=place)
        world.key(5, 100, 0x1000)
        world.comm(100, 0x1000, 0)
        (body,) = world.look(30)
        assert (body["by"], body["start"], body["data"], world.asked) == (None, b"", b"", 1)


def test_rows_of_ended_processes_are_given_back() -> None:
    """A daemon's table would be full one day: of who has ended, and of who came and went between two looks."""
    world = World((100, 200))
    world.reader.frees = True
    world.reader._table.free = lambda row: world.rows.__setitem__(row, [0, 0])  # type: ignore[method-assign]
    for row, (pid, pointer) in enumerate([(100, 0x5000), (200, 0x5000), (300, 0x5001)]):
        world.key(row, pid, pointer)
        world.comm(pid, pointer, row)
    world.look(3)
    assert [row[0] != 0 for row in world.rows[:3]] == [True, True, True]
    world.targets[0].ended = True
    gone = world.targets.pop(0)
    world.look(60)  # ten seconds, in which the third might have turned out to be somebody's
    assert [row[0] != 0 for row in world.rows[:3]] == [False, True, False]
    world.targets.append(gone.__class__(**{**gone.__dict__, "ended": False, "proc": 1001}))
    world.key(0, 100, 0x5000)  # the pid again, and the address
    told = len(world.sent)
    world.look(3)
    assert {frame["proc"] for frame in world.sent[told:]} == {1001}


def test_who_is_let_go_and_traced_again_has_its_communicators() -> None:
    """A rule of a daemon may do that: the process lives, and its row is as it was."""
    world = World((100, 200))
    world.reader.frees = True
    world.reader._table.free = lambda row: world.rows.__setitem__(row, [0, 0])  # type: ignore[method-assign]
    world.key(0, 100, 0x5000)
    world.comm(100, 0x5000, 0)
    world.look(3)
    gone = world.targets.pop(0)
    gone.ended = True
    again = gone.__class__(**{**gone.__dict__, "ended": False, "proc": 1001})
    world.targets.append(again)
    told = len(world.sent)
    world.reader.tell_again(world.now)
    world.look(60)
    assert {frame["proc"] for frame in world.sent[told:]} == {1001} and world.rows[0][0] != 0
    again.ended = True
    world.targets.remove(again)
    world.look(60)
    assert world.rows[0][0] == 0

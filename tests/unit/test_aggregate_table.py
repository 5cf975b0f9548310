"""What a shim's table tells of a process that was met late: communicators and numbers that no record told."""

from __future__ import annotations

from typing import Any

import pytest
from aggregate_kit import ENTER, START, UID, Kit, one

from stallscope.aggregate.state import State
from stallscope.wire.frames import Frame, Kind
from stallscope.wire.hook_table import BY_NAME

REDUCE, GATHER = BY_NAME["ncclAllReduce"].id, BY_NAME["ncclAllGather"].id
POINTER = {1: 0x5000, 2: 0x6000}


def job() -> Kit:
    """Two processes with NCCL."""
    kit = Kit()
    for proc in (1, 2):
        kit.process(proc, pid=4000 + proc, env={"RANK": str(proc - 1)})
        kit.link("NCCL", proc)
    return kit


def row(proc: int, numbered: int, hook: int = REDUCE, elements: int = 8, uid: bytes = UID, rank: int | None = None,
        nranks: int | None = 2) -> list[Any]:  # fmt: skip
    rank = proc - 1 if rank is None else rank
    return [POINTER[proc], numbered, hook, elements, 7, 0, rank, nranks, uid]


def table(kit: Kit, proc: int, *rows: list[Any]) -> None:
    kit.counters()
    kit.add(Kind.COMMS, at_ns=kit.now, proc=proc, comms=list(rows))


def reduce(kit: Kit, proc: int, n: int, elements: int = 8) -> None:
    words = (1, 2, elements, 7, 0, POINTER[proc], 0x77)
    kit.recs.append(kit.record("ncclAllReduce", ENTER, slot=proc, tid=4000 + proc, n=n, a=words))
    kit.count("ncclAllReduce", proc, calls=1)


def ticked(kit: Kit) -> State:
    kit.add(Kind.TICK, at_ns=kit.now)
    state = kit.state()
    assert state.dropped is None, state.dropped
    return state


def arrived(state: State) -> list[int]:
    return state.operations.arrivals.arrived[state.operations.arrivals.rank_rows(0)].tolist()


def members(report: dict[str, Any]) -> list[tuple[int, int, int]]:
    return [(m["proc"], m["rank"], m["next_seq"]) for m in one(report["communicators"])["members"]]


def test_a_creation_that_no_record_told() -> None:
    """Both ranks find each other by the unique id, and are as far as their tables say."""
    kit = job()
    for proc, numbered in ((1, 5000), (2, 4999)):
        kit.count("ncclAllReduce", proc, calls=numbered, lost=numbered)
        table(kit, proc, row(proc, numbered))
    state = ticked(kit)
    assert arrived(state) == [5000, 4999]
    assert [lag.missing for lag in state.operations.arrivals.lagging(kit.now)] == [[1]]
    assert all(issuer.missing == 0 for issuer in state.operations.issuers.values())
    report = kit.report()
    assert members(report) == [(1, 0, 5000), (2, 1, 4999)]
    assert one(report["communicators"])["identity"] == "verified"
    assert one(report["communicators"])["unique_id"] == UID.hex()


def test_the_rings_kept_the_beginning() -> None:
    """The creation and the first operations; then the newest, by the table; then records again."""
    kit = job()
    for proc in (1, 2):
        kit.init_rank(proc - 1, proc=proc, pointer=POINTER[proc])
        kit.now += 6_000_000
        for n in range(3):
            reduce(kit, proc, n)
        kit.count("ncclAllReduce", proc, calls=97, lost=97)
        table(kit, proc, row(proc, 100))
    state = ticked(kit)
    assert arrived(state) == [100, 100]
    reduce(kit, 1, 100)
    state = ticked(kit)
    assert arrived(state) == [101, 100]
    assert members(kit.report()) == [(1, 0, 101), (2, 1, 100)]


def test_records_that_are_newer_than_the_table() -> None:
    """The table changes nothing then."""
    kit = job()
    kit.init_rank(0, proc=1, pointer=POINTER[1])
    kit.now += 6_000_000
    for n in range(4):
        reduce(kit, 1, n)
    table(kit, 1, row(1, 2))
    assert arrived(ticked(kit)) == [4, 0]


def test_the_newest_operation_has_its_arguments() -> None:
    """So that a mismatch is seen."""
    kit = job()
    for proc, hook in ((1, REDUCE), (2, GATHER)):
        table(kit, proc, row(proc, 7, hook, elements=16))
    state = ticked(kit)
    assert arrived(state) == [7, 7]
    assert state.operations.arrivals.differing() == [0]
    assert {value[:3] for value in state.operations.meaning.values()} == {
        ("ncclAllReduce", 16, 7), ("ncclAllGather", 16, 7),
    }  # fmt: skip


def test_a_child_whose_split_no_record_told() -> None:
    """Nothing says which of the other ranks' it is."""
    kit = job()
    for proc in (1, 2):
        table(kit, proc, row(proc, 9, uid=b"", nranks=None))
    report = kit.report()
    assert [(c["identity"], c["nranks"], len(c["members"])) for c in report["communicators"]] == [
        ("unverified", None, 1)
    ] * 2


@pytest.mark.parametrize("bad", [
    [1], "x", row(1, 5)[:-1], [*row(1, 5), 1], row(1, -1), row(1, 1 << 64), row(1, 5, hook=400),
    row(1, 5, uid=b"short"), row(1, 5, rank=-1), row(1, 5, nranks=1 << 17), [*row(1, 5)[:-1], None],
])  # fmt: skip
def test_a_bad_table(bad: Any) -> None:
    """The source is dropped, by name."""
    kit = job()
    state = kit.state()
    state.apply(Frame(Kind.COMMS, {"at_ns": START, "proc": 1, "comms": [bad]}))
    assert state.dropped is not None and state.dropped.startswith("a bad COMMS frame")

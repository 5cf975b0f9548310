"""What a shim's table tells of a process that was met late: communicators and numbers that no record told."""

from __future__ import annotations

from typing import Any

import pytest
from aggregate_kit import ENTER, START, UID, Kit, one

from stallscope.aggregate.numbering import RECV, SEND
from stallscope.aggregate.state import State
from stallscope.diagnose.pairs import pair_base
from stallscope.output.header import counted
from stallscope.output.remarks import remarks
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


def shim_link(kit: Kit, proc: int) -> None:
    kit.link("NCCL", proc)
    kit.frames[-1][1]["method"] = "shim"


def late_job() -> Kit:
    """Two processes that are read through their shims."""
    kit = Kit()
    for proc in (1, 2):
        kit.process(proc, pid=4000 + proc, env={"RANK": str(proc - 1)})
        shim_link(kit, proc)
    return kit


def newest(kit: Kit, proc: int, first: int, until: int, **more: Any) -> None:
    """Records of the newest operations; those before are history."""
    for n in range(first, until):
        reduce(kit, proc, n)
    kit.count("ncclAllReduce", proc, calls=first, filtered=first)
    kit.flush()
    table(kit, proc, row(proc, until, **more))


def test_the_rings_kept_the_newest() -> None:
    """Numbers are those of the creation on, whatever part each rank's ring kept; nothing is said to be lost."""
    kit = late_job()
    newest(kit, 1, 400, 500)
    newest(kit, 2, 450, 499)
    state = ticked(kit)
    assert arrived(state) == [500, 499]
    assert [lag.missing for lag in state.operations.arrivals.lagging(kit.now)] == [[1]]
    assert all(issuer.missing == 0 for issuer in state.operations.issuers.values())
    assert [place.missed for issuer in state.operations.issuers.values() for place in issuer.places.values()] == [
        400, 450
    ]  # fmt: skip
    reduce(kit, 2, 499)
    assert arrived(ticked(kit)) == [500, 500]
    gap = {"source": "shim", "proc": 1, "count": 400, "from_ns": START, "to_ns": START + 2 * 10**9}
    kit.add(Kind.GAP, **gap, reason="before the attach")
    report = kit.report()
    assert members(report) == [(1, 0, 500), (2, 1, 500)]
    vital = "all of NCCL, errors and long waits in the first 2.00 s"
    assert f"pid 4001: 400 calls of before the attach are only counted, among them {vital}" in remarks(report)
    assert ", 850 before the attach)" in counted(report)
    assert report["capture"]["filtered"] == {"before the attach": 850} and report["capture"]["lost"] == 0


def test_a_record_that_comes_behind_the_table() -> None:
    """Threads' rings are read one after the other: what one of them lacks is no hole before the next tick."""
    kit = late_job()
    for n in (100, 102):
        reduce(kit, 1, n)
    kit.count("ncclAllReduce", 1, calls=100, filtered=100)
    kit.flush()
    table(kit, 1, row(1, 103))
    reduce(kit, 1, 101)
    state = ticked(kit)
    (place,) = state.operations.issuers[1].places.values()
    assert (place.next_n, place.missed, place.collectives, place.spoiled) == (103, 100, 103, False)
    assert state.operations.issuers[1].entries == 3  # the others are `filtered`, and no records were to come of them


def transfer(kit: Kit, proc: int, n: int, api: str) -> None:
    words = (1, 8, 7, 2 - proc, POINTER[proc] + 0x10, 0x77)
    kit.recs.append(kit.record(api, ENTER, slot=proc, tid=4000 + proc, n=n, a=words))
    kit.count(api, proc, calls=1)


@pytest.mark.parametrize(("sends", "receives"), [(3, 3), (5, 2)])
def test_transfers_of_before_the_records(sends: int, receives: int) -> None:
    """How many there were nobody knows; they are counted from a collective that both ends have."""
    kit = late_job()
    for proc, before in ((1, sends), (2, receives)):
        api = ("ncclSend", "ncclRecv")[proc - 1]
        for n in range(200 - before, 200):
            transfer(kit, proc, n, api)
        reduce(kit, proc, 50)
        transfer(kit, proc, 200, api)
        kit.count("ncclAllReduce", proc, calls=50, filtered=50)
        kit.count(api, proc, calls=200 - before, filtered=200 - before)
        kit.flush()
        words = [POINTER[proc] + 0x10, 201, BY_NAME[api].id, 8, 7, 0, proc - 1, 2, bytes(128)]
        table(kit, proc, row(proc, 51), words)
    state = ticked(kit)
    first, second = state.operations.issuers.values()
    ours, theirs = (issuer.places[POINTER[proc] + 0x10] for proc, issuer in ((1, first), (2, second)))
    assert ours.numbered and theirs.numbered and not ours.spoiled
    assert pair_base(state, first, ours, SEND, 1) == -sends
    assert theirs.pair_base == {(RECV, 0): -receives}
    assert ours.peers == {(SEND, 1): sends + 1} and theirs.peers == {(RECV, 0): receives + 1}


def test_transfers_and_collectives_of_before_the_records() -> None:
    """On one communicator: which of both they were nobody knows."""
    kit = late_job()
    reduce(kit, 1, 100)
    kit.recs.append(kit.record("ncclSend", ENTER, slot=1, tid=4001, n=101, a=(1, 8, 7, 1, POINTER[1], 0x77)))
    kit.count("ncclSend", 1, calls=1)
    kit.flush()
    table(kit, 1, row(1, 102, hook=BY_NAME["ncclSend"].id))
    (place,) = ticked(kit).operations.issuers[1].places.values()
    assert place.spoiled and not place.numbered

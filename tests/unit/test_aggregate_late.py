"""Communicators that are older than the capture, and what their memory says against what their creation told."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from aggregate_kit import DONE, ENTER, ENTERED, START, UID, Kit, one

from stallscope.aggregate.commdata import comm_data
from stallscope.aggregate.identity import NCCL_MAGIC, child_hash, comm_hash, djb2a
from stallscope.wire.frames import Kind

NEW, OLD, OLDEST = "2.27.5", "2.21.5", "2.16.5"
HASH = 0xABCDEF0123456789


def data(rank: int, nranks: int, device: int, hash_: int, magic: bytes, *, back: int = 16) -> bytes:
    """The 64 bytes from 24 before the rank on."""
    out = bytearray(64)
    out[24 - back : 32 - back] = magic
    out[16:24] = struct.pack("<Q", hash_)
    out[24:36] = struct.pack("<iii", rank, nranks, device)
    return bytes(out)


def comm(kit: Kit, proc: int, pointer: int, rank: int, nranks: int = 2, *, hash_: int = HASH, magic: bytes = UID[:8],
         version: str | None = NEW, by: str | None = "table", device: int = 0, start: int = NCCL_MAGIC,
         samples: list[list[int]] | None = None, raw: bytes | None = None, back: int = 16) -> None:  # fmt: skip
    body = data(rank, nranks, device, hash_, magic, back=back) if raw is None else raw
    kit.now += 10_000_000  # after the creations of the kit, which take 5 ms
    kit.add(Kind.COMM, at_ns=kit.now, proc=proc, pointer=pointer, by=by, rank_at=0x1000, version=version,
            start=struct.pack("<Q", start) if body else b"", data=body, samples=samples or [])  # fmt: skip


def processes(count: int) -> Kit:
    kit = Kit()
    for rank in range(count):
        kit.process(rank + 1, pid=5000 + rank, env={"RANK": str(rank + 8)})
    return kit


def linked(kit: Kit, proc: int, version: str | None) -> None:
    kit.add(Kind.LINK, proc=proc, library="NCCL", path=f"/lib/{proc}", build_id=None, hooks=[], at_ns=START,
            appeared_ns=START, method="uprobe_multi", missing=[], version=version)  # fmt: skip


def members(row: dict[str, Any]) -> list[tuple[int, int | None, int | None]]:
    return [(m["proc"], m["rank"], m["device"]) for m in row["members"]]


def test_ranks_of_one_hash_are_one_communicator() -> None:
    kit = processes(3)
    for proc, rank in ((2, 1), (3, 2), (1, 0)):
        comm(kit, proc, 0xA000 + proc, rank, 3, device=proc + 3)
    row = one(kit.report()["communicators"])
    assert members(row) == [(1, 0, 4), (2, 1, 5), (3, 2, 6)]
    assert (row["uid"], row["unique_id"], row["comm_hash"], row["log_comm_id"]) == (
        UID[:8].hex(), None, f"{HASH:016x}", f"{HASH:016x}",
    )  # fmt: skip
    assert (row["nranks"], row["identity"], row["parent"], row["status"]) == (3, "verified", None, None)
    assert [m["global_rank"] for m in row["members"]] == [8, 9, 10]


@pytest.mark.parametrize(
    ("version", "back", "start"), [(OLD, 16, NCCL_MAGIC), ("2.23.4", 24, NCCL_MAGIC), ("2.18.3", 16, 5)]
)
def test_older_layouts(version: str, back: int, start: int) -> None:
    kit = processes(1)
    comm(kit, 1, 0xA000, 0, version=version, back=back, start=start)
    row = one(kit.report()["communicators"])
    assert (row["uid"], row["comm_hash"], row["log_comm_id"]) == (UID[:8].hex(), f"{HASH:016x}", None)


def test_before_there_was_a_hash() -> None:
    kit = processes(1)
    comm(kit, 1, 0xA000, 0, version=OLDEST, hash_=int.from_bytes(UID[:8], "little"), back=8, start=1)
    row = one(kit.report()["communicators"])
    assert (row["uid"], row["comm_hash"], row["identity"]) == (UID[:8].hex(), None, "verified")


def test_unknown_version() -> None:
    """NCCL's magic in front: 2.21 or later, so that the hash is one; of the id nothing is known."""
    kit = processes(2)
    for proc in (1, 2):
        comm(kit, proc, 0xA000, proc - 1, version=None)
        comm(kit, proc, 0xB000, proc - 1, version=None, start=7, hash_=9)
    rows = kit.report()["communicators"]
    assert [(r["uid"], r["comm_hash"], r["log_comm_id"], len(r["members"])) for r in rows] == [
        (None, f"{HASH:016x}", None, 2),
        (None, None, None, 2),
    ]


def test_children_have_no_id() -> None:
    kit = processes(1)
    comm(kit, 1, 0xA000, 0, magic=struct.pack("<Q", HASH))
    comm(kit, 1, 0xB000, 0, version="2.18.3", hash_=5, magic=b"0123abcd")
    assert [row["uid"] for row in kit.report()["communicators"]] == [None, None]


@pytest.mark.parametrize("wrong", [
    {"rank": 2}, {"rank": -1}, {"nranks": 70000, "rank": 3}, {"device": 64}, {"device": -1}, {"hash_": 0}, {"start": 1},
    {"raw": b""}, {"by": None}, {"raw": bytes(64)}, {"raw": b"\xff" * 64},
])  # fmt: skip
def test_garbage_is_unverified(wrong: dict[str, Any]) -> None:
    kit = processes(1)
    comm(kit, 1, 0xA000, **({"rank": 0} | wrong))
    row = one(kit.report()["communicators"])
    assert (row["identity"], row["nranks"], row["uid"], row["comm_hash"]) == ("unverified", None, None, None)
    assert members(row) == [(1, None, None)]


def test_garbage_that_becomes_a_communicator() -> None:
    kit = processes(1)
    comm(kit, 1, 0xA000, -1, raw=b"\xff" * 64)
    comm(kit, 1, 0xA000, 1)
    row = one(kit.report()["communicators"])
    assert (row["identity"], members(row)) == ("verified", [(1, 1, 0)])


def test_the_same_hash_twice_is_not_verified() -> None:
    """NCCL 2.23 gives two splits of one color the same hash: the k-th of a process belongs to the k-th of the others."""
    kit = processes(2)
    for pointer in (0xA000, 0xB000):
        for proc in (1, 2):
            comm(kit, proc, pointer, proc - 1, version="2.23.4", back=24)
    rows = kit.report()["communicators"]
    assert [(r["identity"], members(r)) for r in rows] == [("unverified", [(1, 0, 0), (2, 1, 0)])] * 2
    assert rows[0]["id"] != rows[1]["id"]


def test_late_member_joins_one_whose_creation_was_seen() -> None:
    hash_ = comm_hash(UID, (2, 27, 5))
    assert hash_
    for seen_first in (True, False):
        kit = processes(2)
        if not seen_first:
            comm(kit, 2, 0xB000, 1, hash_=hash_)
        linked(kit, 1, NEW)
        kit.init_rank(0, proc=1, pointer=0xA000)
        comm(kit, 1, 0xA000, 0, hash_=hash_)
        if seen_first:
            comm(kit, 2, 0xB000, 1, hash_=hash_)
        row = one(kit.report()["communicators"])
        assert members(row) == [(1, 0, 0), (2, 1, 0)] and row["unique_id"] == UID.hex()
        assert (row["identity"], row["comm_hash"]) == ("verified", f"{hash_:016x}")


def test_hash_by_rule_without_memory() -> None:
    """A creation that never returned: its version is that of the only NCCL of the process."""
    kit = processes(1)
    linked(kit, 1, OLD)
    kit.init_rank(0, status=None)
    row = one(kit.report()["communicators"])
    assert row["comm_hash"] == f"{djb2a(UID):016x}" != row["log_comm_id"] and row["log_comm_id"]
    kit = processes(1)
    linked(kit, 1, OLD)
    kit.add(Kind.LINK, proc=1, library="NCCL", path="/other", build_id=None, hooks=[], at_ns=START,
            appeared_ns=START, method="uprobe_multi", missing=[], version=NEW)  # fmt: skip
    kit.init_rank(0, status=None)
    assert one(kit.report()["communicators"])["comm_hash"] is None


@pytest.mark.parametrize(("wrong", "said"), [
    ({"rank": 1}, "rank 1 instead of 0"), ({"nranks": 4}, "4 ranks instead of 2"),
    ({"hash_": 5}, "hash 0x5 instead of"), ({"magic": b"whatever"}, "unique id 7768617465766572 instead of"),
])  # fmt: skip
def test_memory_that_contradicts_the_creation(wrong: dict[str, Any], said: str) -> None:
    kit = processes(1)
    linked(kit, 1, NEW)
    kit.init_rank(0, proc=1, pointer=0xA000)
    good = {"rank": 0, "hash_": comm_hash(UID, (2, 27, 5))}
    comm(kit, 1, 0xA000, **(good | wrong))
    report = kit.report()
    row = one(report["communicators"])
    assert row["identity"] == "unverified" and members(row)[0][:2] == (1, 0)
    assert any(said in note for note in report["capture"]["notes"])
    comm(kit, 1, 0xA000, **good)
    assert one(kit.report()["communicators"])["identity"] == "verified"


def test_a_new_one_under_way_is_no_contradiction() -> None:
    kit = processes(1)
    linked(kit, 1, NEW)
    kit.init_rank(0, proc=1, pointer=0xA000)
    other = bytes(reversed(UID))
    kit.init_rank(1, proc=1, uid=other, status=None)
    kit.flush()
    comm(kit, 1, 0xA000, 1, hash_=comm_hash(other, (2, 27, 5)) or 0, magic=other[:8])
    report = kit.report()
    assert report["communicators"][0]["identity"] == "verified" and not any(
        "told" in n for n in report["capture"]["notes"]
    )


def split(kit: Kit, proc: int, parent: int, pointer: int, color: int = 3, key: int = 0) -> None:
    a = (parent, color, key, 0x7100, 0, 0, 0, 0)
    begin = kit.record("ncclCommSplit", ENTER, slot=proc, a=a)
    kit.recs += [begin, kit.record("ncclCommSplit", DONE, slot=proc, at=int(begin["ts_ns"][0]), flags=ENTERED,
                                   a=(*a[:7], pointer))]  # fmt: skip
    kit.count("ncclCommSplit", proc, calls=1)


def test_children_of_seen_parents() -> None:
    root = comm_hash(UID, (2, 27, 5))
    child = child_hash(root or 0, 1, 3, (2, 27, 5)) or 0
    kit = processes(2)
    for proc in (1, 2):
        linked(kit, proc, NEW)
        kit.init_rank(proc - 1, proc=proc, pointer=0xA000)
    for proc in (1, 2):
        split(kit, proc, 0xA000, 0xC000, key=2 - proc)
        kit.flush()
    assert [r["comm_hash"] for r in kit.report()["communicators"]] == [f"{root or 0:016x}", f"{child:016x}"]
    for proc in (1, 2):
        comm(kit, proc, 0xC000, 2 - proc, hash_=child, magic=struct.pack("<Q", child))
    row = kit.report()["communicators"][1]
    assert (members(row), row["nranks"], row["uid"]) == ([(2, 0, 0), (1, 1, 0)], 2, None)
    assert row["identity"] == "verified"
    comm(kit, 1, 0xC000, 1, hash_=child + 1)
    report = kit.report()
    assert report["communicators"][1]["identity"] == "unverified"
    assert any("is not what its creation told" in note for note in report["capture"]["notes"])


def test_children_of_late_parents_go_by_their_hash() -> None:
    """One rank was attached to a split later: its first child is the other's second."""
    kit = processes(2)
    for proc in (1, 2):
        comm(kit, proc, 0xA000, proc - 1)
    split(kit, 1, 0xA000, 0xC000)
    for proc in (1, 2):
        split(kit, proc, 0xA000, 0xD000)
    kit.flush()
    for proc, pointer, number in ((1, 0xC000, 1), (1, 0xD000, 2), (2, 0xD000, 2)):
        comm(kit, proc, pointer, proc - 1, hash_=number, magic=struct.pack("<Q", number))
    rows = {row["comm_hash"]: members(row) for row in kit.report()["communicators"]}
    assert rows == {
        f"{HASH:016x}": [(1, 0, 0), (2, 1, 0)],
        f"{1:016x}": [(1, 0, 0)],
        f"{2:016x}": [(1, 0, 0), (2, 1, 0)],
    }


def test_children_of_unseen_parents_are_put_together() -> None:
    kit = processes(2)
    for proc in (1, 2):
        split(kit, proc, 0xDEAD, 0xC000)
    kit.flush()
    assert len(kit.report()["communicators"]) == 2
    for proc in (1, 2):
        comm(kit, proc, 0xC000, proc - 1, hash_=77, magic=struct.pack("<Q", 77))
    row = one(kit.report()["communicators"])
    assert members(row) == [(1, 0, 0), (2, 1, 0)] and (row["identity"], row["status"]) == ("verified", 0)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_all_devices_of_a_process(order: tuple[int, ...]) -> None:
    """The pointers but the first one show only in use."""
    kit = processes(1)
    a = (0x7000, 3, 0)
    begin = kit.record("ncclCommInitAll", ENTER, a=a)
    kit.recs += [begin, kit.record("ncclCommInitAll", DONE, at=int(begin["ts_ns"][0]), flags=ENTERED,
                                   a=(*a, 0, 0, 0, 0, 0xE000))]  # fmt: skip
    kit.flush()
    for rank in order:
        comm(kit, 1, 0xE000 + 0x100 * rank, rank, 3, device=rank)
    state = kit.state()
    row = one(kit.report()["communicators"])
    assert members(row) == [(1, 0, 0), (1, 1, 1), (1, 2, 2)] and row["identity"] == "verified"
    assert row["comm_hash"] == f"{HASH:016x}" and [m["status"] for m in row["members"]] == [0, 0, 0]
    for rank in range(3):
        found = state.communicators.find(1, 0xE000 + 0x100 * rank)
        assert found and found[1].rank == rank
        assert state.communicators.sequence_base(1, 0xE000 + 0x100 * rank) == (0, "exact")


def test_another_communicator_at_the_address() -> None:
    kit = processes(1)
    comm(kit, 1, 0xA000, 0)
    comm(kit, 1, 0xA000, 1, hash_=5, magic=b"\1" * 8)
    assert [members(row) for row in kit.report()["communicators"]] == [[(1, 0, 0)], [(1, 1, 0)]]
    kit.init_rank(0, proc=1, pointer=0xA000)
    state = kit.state()
    found = state.communicators.find(1, 0xA000)
    assert found and found[0].unique_id == UID


def test_samples() -> None:
    kit = processes(1)
    comm(kit, 1, 0xA000, 0, samples=[[10, 1, 2, 3, 4, 5], [20, 1, 2, 3, 4, 15]])
    communicators = kit.state().communicators
    assert communicators.samples(1, 0xA000) == [(10, 15), (20, 25)]
    assert communicators.sequence_base(1, 0xA000) is None
    assert communicators.samples(1, 0xB000) == []


def test_many_are_turned_away() -> None:
    """A flood of made-up communicators stays within the limits, in little time."""
    import time

    kit = processes(1)
    for i in range(9000):
        comm(kit, 1, 0x10000 + i, 0, hash_=i + 1)
    begin = time.process_time()
    state = kit.state()
    assert len(state.communicators.table) == 4096
    assert time.process_time() - begin < 20
    many = processes(1)
    for i in range(2000):
        comm(many, 1, 0x10000 + i, 0)
    assert len(many.state().communicators.table) == 64


@pytest.mark.parametrize("rank", [0, 1])
def test_decoding_never_breaks(rank: int) -> None:
    import random

    chance = random.Random(rank)
    for _ in range(2000):
        body = {"pointer": 1, "at_ns": 1, "by": "code", "version": chance.choice((None, NEW, OLD, OLDEST, "9.99.99")),
                "start": chance.randbytes(8), "data": chance.randbytes(64), "samples": []}  # fmt: skip
        found = comm_data(body)
        assert found.wrong is not None or 0 <= found.rank < found.nranks <= 65536

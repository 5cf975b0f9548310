"""Communicators: identity, members, results, children."""

from __future__ import annotations

from aggregate_kit import ABANDONED, DONE, ENTER, ENTERED, NO_OUT, START, UID, Kit, call, one

from stallscope.aggregate.communicators import root_address


def split(kit: Kit, parent: int, color: int, pointer: int, proc: int = 1, key: int = 0) -> None:
    a = (parent, color & 0xFFFFFFFF, key & 0xFFFFFFFF, 0x7100, 0, 0, 0, 0)
    begin = kit.record("ncclCommSplit", ENTER, slot=proc, a=a)
    kit.recs.append(begin)
    kit.recs.append(kit.record("ncclCommSplit", DONE, slot=proc, at=int(begin["ts_ns"][0]), flags=ENTERED,
                               a=(*a[:7], pointer)))  # fmt: skip
    kit.count("ncclCommSplit", proc, calls=1)


def two_ranks() -> Kit:
    kit = Kit()
    for rank in (0, 1):
        kit.process(rank + 1, pid=5000 + rank)
        kit.init_rank(rank, proc=rank + 1, pointer=0xA000 + rank * 0x1000)
    return kit


def test_two_ranks_of_one_communicator() -> None:
    comm = one(two_ranks().bye().report()["communicators"])
    assert comm["uid"] == "0102030405060708" and comm["unique_id"] == UID.hex() and len(comm["unique_id"]) == 256
    assert comm["root_addr"] == "10.0.0.7:41833"
    assert (comm["nranks"], comm["identity"], comm["parent"], comm["status"]) == (2, "verified", None, 0)
    assert [(m["proc"], m["pid"], m["rank"], m["next_seq"]) for m in comm["members"]] == [
        (1, 5000, 0, 0),
        (2, 5001, 1, 0),
    ]
    assert len(comm["id"]) == 16 and comm["id"] != comm["uid"]


def test_failed_creation_is_listed() -> None:
    kit = Kit()
    kit.process()
    kit.init_rank(3, nranks=8, status=1)
    report = kit.bye().report()
    comm = one(report["communicators"])
    assert (comm["status"], comm["identity"], comm["members"][0]["rank"], comm["nranks"]) == (1, "unverified", 3, 8)
    row = one(report["calls"], api="ncclCommInitRank")
    assert (row["count"], row["errors"]) == (1, 1)


def test_another_attempt_is_another_communicator() -> None:
    kit = Kit()
    kit.process()
    kit.init_rank(0, status=1)
    kit.init_rank(0, pointer=0xA000)
    comms = kit.bye().report()["communicators"]
    assert [c["status"] for c in comms] == [1, 0] and comms[0]["id"] != comms[1]["id"]
    assert comms[0]["uid"] == comms[1]["uid"]


def test_creation_under_way_is_in_flight() -> None:
    kit = Kit()
    kit.process()
    kit.init_rank(1, status=None)
    at = int(kit.now)
    kit.inflight([[1, 101, [call("ncclCommInitRank", at, flags=ENTERED, a=(0x7000, 2, 1))]]], at=at + 9_000)
    report = kit.bye().report()
    row = one(report["in_flight"])
    assert (row["comm_uid"], row["rank"], row["age_ns"]) == ("0102030405060708", 1, 9_000)
    assert row["comm"] == one(report["communicators"])["id"]
    assert one(report["communicators"])["status"] is None


def test_collective_in_flight_knows_its_communicator_and_number() -> None:
    kit = two_ranks()
    for n in range(4):
        kit.recs.append(kit.record("ncclAllReduce", ENTER, slot=2, n=n, a=(0, 0, 0, 0, 0, 0xB000)))
    kit.count("ncclAllReduce", 2, calls=4)
    kit.inflight([[2, 9, [call("ncclAllReduce", START, n=3, flags=ENTERED, a=(0, 0, 0, 0, 0, 0xB000))]]])
    report = kit.bye().report()
    row = one(report["in_flight"])
    assert (row["rank"], row["seq"], row["comm_uid"]) == (1, 3, "0102030405060708")
    assert [m["next_seq"] for m in report["communicators"][0]["members"]] == [0, 4]


def test_split_children_have_the_same_id_on_all_ranks() -> None:
    kit = two_ranks()
    for proc, parent in ((1, 0xA000), (2, 0xB000)):
        split(kit, parent, 0, 0xC000, proc)
        split(kit, parent, 0, 0xD000, proc)
        split(kit, parent, -1, 0, proc)
    comms = kit.bye().report()["communicators"]
    root, first, second = comms
    assert len(first["members"]) == len(second["members"]) == 2 and first["id"] != second["id"]
    assert first["parent"] == second["parent"] == root["id"]
    assert first["uid"] is None and first["unique_id"] is None and first["identity"] == "verified"


def test_child_of_an_unseen_parent() -> None:
    kit = Kit()
    kit.process()
    split(kit, 0xDEAD000, 0, 0xC000)
    comm = one(kit.bye().report()["communicators"])
    assert comm["parent"] is None and comm["identity"] == "unverified"


def test_all_devices_of_one_process() -> None:
    kit = Kit()
    kit.process()
    a = (0x7000, 4, 0)
    begin = kit.record("ncclCommInitAll", ENTER, a=a)
    kit.recs += [begin, kit.record("ncclCommInitAll", DONE, at=int(begin["ts_ns"][0]), flags=ENTERED,
                                   a=(*a, 0, 0, 0, 0, 0xE000))]  # fmt: skip
    kit.count("ncclCommInitAll", calls=1)
    comm = one(kit.bye().report()["communicators"])
    assert comm["uid"] is None and comm["nranks"] == 4 and [m["device"] for m in comm["members"]] == [0, 1, 2, 3]


def test_unreadable_id() -> None:
    kit = Kit()
    kit.process()
    begin = kit.record("ncclCommInitRank", ENTER, flags=NO_OUT, a=(0x7000, 2, 0))
    kit.uid(begin, bytes(128))
    kit.count("ncclCommInitRank", calls=1)
    comm = one(kit.bye().report()["communicators"])
    assert comm["uid"] is None and comm["unique_id"] is None and comm["identity"] == "unverified"


def test_root_addresses() -> None:
    six = bytes(8) + b"\x0a\x00\x1f\x90" + bytes(4) + bytes(15) + b"\x01" + bytes(96)
    assert root_address(six) == "[::1]:8080"
    assert root_address(bytes(128)) is None


def test_communicators_are_capped() -> None:
    kit = Kit()
    kit.process()
    for i in range(4200):
        kit.init_rank(0, uid=i.to_bytes(8, "little") + UID[8:], status=1)
    report = kit.report()
    assert len(report["communicators"]) == 4096
    assert any(note.startswith("communicators: 104 turned away") for note in report["capture"]["notes"])


def test_thread_ended_inside_the_creation() -> None:
    kit = Kit()
    kit.process()
    kit.init_rank(0, status=None)
    kit.recs.append(kit.record("ncclCommInitRank", ABANDONED, tid=100, at=int(kit.now), flags=ENTERED, ns=5))
    report = kit.bye().report()
    comm = one(report["communicators"])
    assert report["capture"]["events"] == 1
    assert comm["status"] is None and [m["abandoned"] for m in comm["members"]] == [True]


def ranked(kit: Kit, color: int = 0) -> dict[int, int | None]:
    """The child's ranks by process."""
    children = [c for c in kit.bye().report()["communicators"] if c["parent"]]
    return {m["proc"]: m["rank"] for child in children for m in child["members"]}


def four_splits(came: int) -> Kit:
    kit = Kit()
    for rank in range(4):
        kit.process(rank + 1, pid=5000 + rank)
        kit.init_rank(rank, proc=rank + 1, pointer=0xA000 + rank * 0x1000, nranks=4)
    for rank, (color, key) in list(enumerate(((0, 5), (0, -1), (-1, 0), (0, 5))))[:came]:
        split(kit, 0xA000 + rank * 0x1000, color, 0 if color < 0 else 0xC000, rank + 1, key)
    return kit


def test_ranks_of_a_split_by_key_and_parent_rank() -> None:
    """Nobody's memory was read: a rank may have died before."""
    assert ranked(four_splits(4)) == {1: 1, 2: 0, 4: 2}


def test_ranks_of_a_split_while_one_is_missing() -> None:
    assert ranked(four_splits(3)) == {1: None, 2: None}

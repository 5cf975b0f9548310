"""Creations and memory in any order, true and false: the tables stay consistent, nothing is raised, reports are printed."""

from __future__ import annotations

import itertools
import os
import random
import struct
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

from aggregate_kit import DONE, ENTER, ENTERED, START, UID, Found, Kit

from stallscope.aggregate.communicators import Communicators
from stallscope.aggregate.identity import NCCL_MAGIC, comm_hash
from stallscope.aggregate.state import State
from stallscope.output.report import report_json
from stallscope.wire.frames import Frame, Kind

ONCE_WRONG = (654,)
SECONDS = float(os.environ.get("STALLSCOPE_FUZZ_SECONDS", 20)) / 2
POINTERS = (0xA000, 0xB000, 0xC000, 0xD000)
IDS = (UID, bytes(reversed(UID)))
HASHES = [comm_hash(uid, (2, 27, 5)) or 0 for uid in IDS] + [5, 6]


def add_comm(kit: Kit, chance: random.Random, proc: int) -> None:
    hash_ = chance.choice(HASHES)
    magic = chance.choice((struct.pack("<Q", hash_), *(uid[:8] for uid in IDS)))
    rank, nranks = chance.choice(((0, 2), (1, 2), (0, 3), (2, 3), (5, 2), (-1, -1)))
    data = struct.pack("<8s8sQiii28x", bytes(8), magic, hash_, rank, nranks, chance.choice((0, 1, 99)))
    kit.now += chance.choice((0, 10_000_000))
    kit.add(Kind.COMM, at_ns=kit.now, proc=proc, pointer=chance.choice(POINTERS), by=chance.choice(("table", None)),
            rank_at=0x1000, version=chance.choice(("2.27.5", "2.21.5", "2.16.5", None)),
            start=struct.pack("<Q", NCCL_MAGIC), data=chance.choice((data, data, data, b"")), samples=[[1, 2, 3]])  # fmt: skip


def add_child(kit: Kit, chance: random.Random, proc: int) -> None:
    api = chance.choice(("ncclCommSplit", "ncclCommShrink", "ncclCommGrow", "ncclCommInitAll"))
    a = (chance.choice(POINTERS), chance.choice((0, 1, 3, 0xFFFFFFFF)), 0, 1, 0, 0, 0)
    begin = kit.record(api, ENTER, slot=proc, a=a)
    kit.recs.append(begin)
    if chance.random() < 0.8:
        kit.recs.append(kit.record(api, DONE, slot=proc, at=int(begin["ts_ns"][0]), flags=ENTERED,
                                   status=chance.choice((0, 0, 1, 7)), a=(*a, chance.choice(POINTERS))))  # fmt: skip


def add_operation(kit: Kit, chance: random.Random, proc: int) -> None:
    kit.recs.append(kit.record("ncclAllReduce", ENTER, slot=proc, n=chance.randrange(5),
                               a=(0, 0, 1, 0, 0, chance.choice(POINTERS))))  # fmt: skip


def add_init(kit: Kit, chance: random.Random, proc: int) -> None:
    status = chance.choice((0, 0, 0, None, 1))
    kit.init_rank(
        chance.choice((0, 1)), proc=proc, uid=chance.choice(IDS), status=status, pointer=chance.choice(POINTERS)
    )


def check(communicators: Communicators) -> None:
    """Every pointer leads to a member of a communicator that is listed, every rank to one of its members."""
    listed = {id(comm) for comm in communicators.table.values()}
    for proc in range(1, 4):
        for pointer in POINTERS:
            found = communicators.find(proc, pointer)
            if found:
                assert id(found[0]) in listed and found[1].proc == proc
                assert any(member is found[1] for member in found[0].members)
    for number, comm in communicators.table.items():
        assert number == comm.id and (comm.members or not comm.late)
        for rank, member in comm.at_rank.items():
            assert member.rank == rank and any(member is other for other in comm.members)
        assert comm.verified in (True, False) and (comm.uid is None or len(comm.uid) == 16)


def test_any_order() -> None:
    end = time.monotonic() + SECONDS
    for seed in itertools.chain(ONCE_WRONG, itertools.count(1)):
        if time.monotonic() > end:
            break
        chance, kit = random.Random(seed), Kit()
        for proc in (1, 2, 3):
            kit.process(proc)
            if chance.random() < 0.7:
                kit.add(Kind.LINK, proc=proc, library="NCCL", path="x", build_id=None, hooks=[], at_ns=START,
                        appeared_ns=START, version=chance.choice(("2.27.5", "2.23.4", None)))  # fmt: skip
        for _ in range(chance.randrange(40)):
            chance.choice((add_comm, add_comm, add_child, add_init, add_operation))(
                kit, chance, chance.choice((1, 2, 3))
            )
            if chance.random() < 0.2:
                kit.add(Kind.TICK, at_ns=kit.now)
        kit.flush()
        state = State()
        for kind, body in kit.frames:
            state.apply(Frame(kind, body))
            assert state.dropped is None, seed
            if kind == Kind.COMM:
                check(state.communicators)
        check(state.communicators)
        report_json(state, Found())
    assert seed > 20

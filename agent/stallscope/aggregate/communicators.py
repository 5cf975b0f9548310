"""Communicators: who created them, by which id, with which result; and those that were there before."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stallscope.aggregate.commdata import CommData
from stallscope.aggregate.communicator import IN_PROGRESS, SUCCESS, Communicator, Member, root_address
from stallscope.aggregate.events import ABANDONED, ENTER, NO_OUT
from stallscope.aggregate.hooks import Hooks
from stallscope.aggregate.limits import Overflow
from stallscope.aggregate.matching import Matching, key_of
from stallscope.aggregate.process import Process
from stallscope.aggregate.splits import Entry, Splits
from stallscope.aggregate.table import TableRow

__all__ = ["Communicator", "Communicators", "Member", "root_address"]

NO_COLOR = -1
MAX_DEVICES = 256
MAX_NOTES = 64


@dataclass
class _Creation:
    """A creation under way: what its entry told."""

    communicators: list[tuple[Communicator, Member]]


def _signed(word: int) -> int:
    value: int = struct.unpack("<i", struct.pack("<I", word & 0xFFFFFFFF))[0]
    return value


class Communicators:
    """Pairs the entry and the return of each creation, and the ranks of each communicator.

    Attributes:
        restart: (proc, pointer, at_ns) -> the sequence number that the communicator there had come to; it begins again.
        moved: called with (proc, pointer) when what lies there turns out to be part of another communicator than told
            before; its operations go on.
        notes: what does not fit together.
    """

    def __init__(self, hooks: Hooks, overflow: Overflow) -> None:
        self.table: dict[str, Communicator] = {}
        self._hooks, self._overflow = hooks, overflow
        self._by_pointer: dict[tuple[int, int], tuple[Communicator, Member]] = {}
        self._open: dict[tuple[int, int, int, int], _Creation] = {}
        self._children: dict[tuple[int, str], int] = {}
        self._attempts: dict[tuple[bytes, int, int, int | None], int] = {}
        self._members = 0
        self._matching = Matching(self)
        self._splits = Splits(overflow)
        self.restart: Callable[[int, int, int], int] = lambda proc, pointer, at_ns: 0
        self.moved: Callable[[int, int], None] = lambda proc, pointer: None
        self.notes: dict[str, None] = {}

    def read(self, process: Process, data: CommData) -> None:
        """What was found in a communicator's memory."""
        self._matching.take(process, data)

    def told(self, process: Process, row: TableRow, at_ns: int) -> None:
        """By the shim's table a communicator lies there; new only where the record of its creation is lost."""
        place = (process.proc, row.pointer)
        if place in self._by_pointer:
            self._name(*self._by_pointer[place], row)
            return
        member = Member(process.proc, process.pid, 0, row.rank, status=SUCCESS, made_ns=at_ns)
        if row.uid is not None and row.nranks is not None:
            comm = self._of_uid(process, member, row.uid, row.nranks, at_ns)
        else:
            number = key_of("table", *place)
            comm = self.make(number, Communicator(number, None, row.nranks, None, False, at_ns, matched=False))
        if comm and self.join(comm, member):
            comm.learn_version(process.nccl_version)
            self.settle(place, comm, member)

    def _name(self, comm: Communicator, member: Member, row: TableRow) -> None:
        """What the creation did not tell: the rank of a split's child."""
        if member.rank is None and row.rank is not None and comm.at_rank.get(row.rank, member) is member:
            member.rank, comm.at_rank[row.rank] = row.rank, member
            comm.nranks = row.nranks if comm.nranks is None else comm.nranks

    def find(self, proc: int, pointer: int) -> tuple[Communicator, Member] | None:
        """The communicator behind a process's ncclComm_t."""
        return self._by_pointer.get((proc, pointer))

    def sequence_base(self, proc: int, pointer: int) -> tuple[int, str] | None:
        """Collectives that the rank had issued before our number 0, and how that is known; None where it is not."""
        found = self.find(proc, pointer)
        return (0, "exact") if found and found[1].status in (SUCCESS, IN_PROGRESS) else None

    def samples(self, proc: int, pointer: int) -> list[tuple[int, int]]:
        """(our number, collectives by NCCL's own count) at moments when both stood still.

        NCCL counts broadcast, reduce, all-gather, reduce-scatter and all-reduce, of more than nothing, among more than
        one rank, and not while a graph is captured.
        """
        found = self.find(proc, pointer)
        return list(found[1].read.samples) if found and found[1].read else []

    def is_creating(self, proc: int) -> bool:
        """Whether that process is creating a communicator."""
        return any(key[0] == proc for key in self._open)

    def creations(self) -> list[tuple[int, int, int, int, Communicator, Member]]:
        """Creations that have not returned: (proc, tid, hook, since_ns, communicator, member)."""
        return [(*key, *pair) for key, creation in self._open.items() for pair in creation.communicators]

    def under_way(self, proc: int, tid: int, hook: int, ts_ns: int) -> tuple[Communicator, Member] | None:
        """The communicator that a call in flight creates."""
        creation = self._open.get((proc, tid, hook, ts_ns))
        return creation.communicators[0] if creation and creation.communicators else None

    def record(self, process: Process, rec: Any, uid: bytes | None = None) -> None:
        """A record of a creating call; `uid` are the 128 bytes of its unique id where they were read."""
        key = (process.proc, int(rec["tid"]), int(rec["hook"]), int(rec["ts_ns"]))
        creation = self._open.get(key)
        if creation is None:
            creation = self._begin(process, rec, uid)
        if int(rec["kind"]) == ENTER:
            if key in self._open or not self._overflow.full("creations under way", len(self._open)):
                self._open[key] = creation
            return
        self._open.pop(key, None)
        self._end(process, rec, creation)

    def _begin(self, process: Process, rec: Any, uid: bytes | None) -> _Creation:
        name, a = self._hooks.get(int(rec["hook"])).name, [int(x) for x in rec["a"]]
        member = Member(process.proc, process.pid, int(rec["tid"]), None)
        ts = int(rec["ts_ns"])
        if name == "ncclCommInitAll":
            return self._begin_all(process, rec, a)
        if name in ("ncclCommSplit", "ncclCommShrink"):
            return self._begin_child(process, member, name, a, ts)
        if name == "ncclCommGrow":
            member.rank, nranks = (_signed(a[3]) if _signed(a[3]) >= 0 else None), _signed(a[1])
            if a[0]:
                return self._begin_child(process, member, name, a, ts, nranks)
        else:
            member.rank, nranks = _signed(a[2]), _signed(a[1])
        comm = self._of_uid(process, member, uid, nranks, ts)
        if comm:
            comm.learn_version(process.nccl_version)
        return self.joined(comm, member)

    def _of_uid(self, process: Process, member: Member, uid: bytes | None, nranks: int, ts: int) -> Communicator | None:
        if uid is None:
            lonely = key_of("lonely", process.proc, member.tid, ts)
            return self.make(lonely, Communicator(lonely, None, nranks, None, True, ts, matched=False))
        # The same id again by the same rank is another attempt, not another member.
        place = (uid, nranks, member.proc, member.rank)
        attempt = self._attempts.get(place, 0)
        if not attempt and self._overflow.full("communicator creations", len(self._attempts)):
            return None
        self._attempts[place] = attempt + 1
        number = key_of("uid", uid, nranks, attempt)
        return self.make(number, Communicator(number, uid, nranks, None, True, ts, exact=True))

    def _begin_child(
        self, process: Process, member: Member, name: str, a: list[int], ts: int, nranks: int | None = None
    ) -> _Creation:
        parent = self.find(process.proc, a[0])
        if parent is None:
            number = key_of("child", process.proc, member.tid, ts)
            child = Communicator(number, None, nranks, None, False, ts, matched=False)
            return self.joined(self.make(number, child), member)
        # All ranks of a communicator split it in the same order: the ordinal is the same everywhere.
        place = (process.proc, f"{parent[0].id}/{a[0]}")
        ordinal = self._children.get(place, 0)
        if place in self._children or not self._overflow.full("communicator splits", len(self._children)):
            self._children[place] = ordinal + 1
        color = _signed(a[1]) if name == "ncclCommSplit" else 0
        if name == "ncclCommSplit" and color == NO_COLOR:
            self._splits.enter(parent[0], ordinal, Entry(0, parent[1], None, None))
            return _Creation([])
        number = key_of(name, parent[0].id, ordinal, color)
        child = Communicator(number, None, nranks, parent[0].id, False, ts, exact=parent[0].exact)
        child.learn_version(parent[0].version)
        # Grown ones have a hash of their own kind.
        child.hash = parent[0].hash_of_child(ordinal + 1, color) if name != "ncclCommGrow" else None
        made = self.joined(self.make(number, child), member)
        if name == "ncclCommSplit" and made.communicators:
            self._splits.enter(parent[0], ordinal, Entry(_signed(a[2]), parent[1], made.communicators[0][0], member))
        return made

    def _begin_all(self, process: Process, rec: Any, a: list[int]) -> _Creation:
        tid, ts, ranks = int(rec["tid"]), int(rec["ts_ns"]), max(0, _signed(a[1]))
        number = key_of("all", process.proc, tid, ts)
        made = self.make(number, Communicator(number, None, ranks, None, False, ts, exact=True))
        if made:
            made.learn_version(process.nccl_version)
            self._matching.expect(process.proc, made)
        joined: list[tuple[Communicator, Member]] = []
        for rank in range(min(ranks, MAX_DEVICES)):
            # devlist == NULL means device i for rank i; else the devices stand in the caller's memory.
            member = Member(process.proc, process.pid, tid, rank, device=None if a[2] else rank)
            joined += self.joined(made, member).communicators
        return _Creation(joined)

    def make(self, number: str, fresh: Communicator) -> Communicator | None:
        """The communicator of that id, new if there is none; None when there is no room."""
        if number not in self.table:
            if self._overflow.full("communicators", len(self.table)):
                return None
            self.table[number] = fresh
        return self.table[number]

    def join(self, comm: Communicator, member: Member) -> bool:
        """Add a member; False when there is no room."""
        if self._overflow.full("communicator members", self._members):
            return False
        self._members += 1
        comm.members.append(member)
        if member.rank is not None:
            comm.at_rank.setdefault(member.rank, member)
        return True

    def joined(self, comm: Communicator | None, member: Member) -> _Creation:
        """A creation of that communicator by that member."""
        return _Creation([(comm, member)]) if comm and self.join(comm, member) else _Creation([])

    def leave(self, comm: Communicator, member: Member) -> None:
        """Take a member out that turned out to be another one's; with its last member the communicator goes."""
        comm.members.remove(member)
        self._members -= 1
        if member.rank is not None and comm.at_rank.get(member.rank) is member:
            del comm.at_rank[member.rank]
        if not comm.members:
            self.table.pop(comm.id, None)

    def settle(self, place: tuple[int, int], comm: Communicator, member: Member) -> None:
        """From now on the communicator of that process at that address is this one."""
        if place in self._by_pointer or not self._overflow.full("communicator pointers", len(self._by_pointer)):
            member.pointer = place[1]
            self._by_pointer[place] = (comm, member)

    def note(self, text: str) -> None:
        """What does not fit together."""
        if len(self.notes) < MAX_NOTES:
            self.notes[text] = None

    def _end(self, process: Process, rec: Any, creation: _Creation) -> None:
        abandoned = int(rec["kind"]) == ABANDONED
        for _, member in creation.communicators:
            member.abandoned = abandoned
            member.status = None if abandoned else int(rec["status"])
            member.made_ns = int(rec["ts_ns"]) + int(rec["dur_ns"])
        # A grown communicator's old ranks pass no id; NO_OUT then speaks of the id, and a null result says the rest.
        grow = self._hooks.get(int(rec["hook"])).name == "ncclCommGrow"
        pointer = int(rec["a"][7])
        unread = bool(int(rec["flags"]) & NO_OUT) and not (grow and pointer)
        if abandoned or unread or not pointer or not creation.communicators:
            return
        comm, member = creation.communicators[0]
        member.pointer = pointer
        self.start_over((process.proc, pointer), member.made_ns)
        self.settle((process.proc, pointer), comm, member)

    def start_over(self, place: tuple[int, int], at_ns: int) -> None:
        """What lies at that address from now on is another communicator."""
        last = self.restart(*place, at_ns)
        if place in self._by_pointer:
            self._by_pointer[place][1].next_seq = last

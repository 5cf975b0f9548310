"""Communicators as far as their creation is seen: who joined, by which id, with which result."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stallscope.aggregate.events import ABANDONED, ENTER, NO_OUT
from stallscope.aggregate.hooks import Hooks
from stallscope.aggregate.limits import Overflow
from stallscope.aggregate.process import Process

try:
    # hashlib loads OpenSSL, 3.6 MB of a process that must stay small; this module is the same function without it.
    from _blake2 import blake2b
except ImportError:
    from hashlib import blake2b

__all__ = ["Communicator", "Communicators", "Member", "root_address"]

SUCCESS, IN_PROGRESS = 0, 7
AF_INET, AF_INET6 = 2, 10
NO_COLOR = -1
MAX_DEVICES = 256


@dataclass
class Member:
    """One rank's part in a communicator.

    Attributes:
        rank: None where it is not among the arguments of the call.
        pointer: the rank's ncclComm_t, None until it is known.
        status: what the creation returned, None while it has not.
        next_seq: how many operations it numbered, once another communicator lies at its address.
    """

    proc: int
    pid: int
    tid: int
    rank: int | None
    device: int | None = None
    pointer: int | None = None
    status: int | None = None
    abandoned: bool = False
    next_seq: int | None = None


@dataclass
class Communicator:
    """One communicator; `id` is a hash of how it came to be, so that all ranks of it get the same."""

    id: str
    unique_id: bytes | None
    nranks: int | None
    parent: str | None
    has_uid: bool
    at_ns: int
    matched: bool = True
    members: list[Member] = field(default_factory=list)

    @property
    def uid(self) -> str | None:
        """The first 8 bytes of the ncclUniqueId in memory order."""
        return self.unique_id[:8].hex() if self.unique_id else None

    @property
    def status(self) -> int | None:
        """The first failure among the members, else what they returned; None while nobody has."""
        seen = [m.status for m in self.members if m.status is not None]
        return next((s for s in seen if s not in (SUCCESS, IN_PROGRESS)), max(seen, default=None))

    @property
    def verified(self) -> bool:
        """Whether a creation succeeded, for a communicator whose ranks can be told to be the same one's."""
        return self.matched and any(m.status == SUCCESS for m in self.members)


@dataclass
class _Creation:
    """A creation under way: what its entry told."""

    communicators: list[tuple[Communicator, Member]]


def _key(*parts: object) -> str:
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def _signed(word: int) -> int:
    value: int = struct.unpack("<i", struct.pack("<I", word & 0xFFFFFFFF))[0]
    return value


def root_address(unique_id: bytes) -> str | None:
    """Where the communicator's bootstrap root listens, e.g. "10.0.0.7:41833"; None for no socket address."""
    family, port = struct.unpack_from("<H", unique_id, 8)[0], struct.unpack_from(">H", unique_id, 10)[0]
    if family == AF_INET:
        return f"{ipaddress.IPv4Address(unique_id[12:16])}:{port}"
    if family == AF_INET6:
        return f"[{ipaddress.IPv6Address(unique_id[16:32])}]:{port}"
    return None


class Communicators:
    """Pairs the entry and the return of each creation, and the ranks of each communicator.

    Attributes:
        restart: (proc, pointer, at_ns) -> the sequence number that the communicator there had come to; it begins again.
    """

    def __init__(self, hooks: Hooks, overflow: Overflow) -> None:
        self.table: dict[str, Communicator] = {}
        self._hooks, self._overflow = hooks, overflow
        self._by_pointer: dict[tuple[int, int], tuple[Communicator, Member]] = {}
        self._open: dict[tuple[int, int, int, int], _Creation] = {}
        self._children: dict[tuple[int, str], int] = {}
        self._attempts: dict[tuple[bytes, int, int, int | None], int] = {}
        self._members = 0
        self.restart: Callable[[int, int, int], int] = lambda proc, pointer, at_ns: 0

    def find(self, proc: int, pointer: int) -> tuple[Communicator, Member] | None:
        """The communicator behind a process's ncclComm_t."""
        return self._by_pointer.get((proc, pointer))

    def sequence_base(self, proc: int, pointer: int) -> tuple[int, str] | None:
        """Collectives that the rank had issued before our number 0, and how that is known; None where it is not."""
        found = self.find(proc, pointer)
        return (0, "exact") if found and found[1].status in (SUCCESS, IN_PROGRESS) else None

    def samples(self, proc: int, pointer: int) -> list[tuple[int, int]]:
        """(our number, collectives by NCCL's own count) at moments when both stood still."""
        return []

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
        return self._joined(self._of_uid(process, member, uid, nranks, ts), member)

    def _of_uid(self, process: Process, member: Member, uid: bytes | None, nranks: int, ts: int) -> Communicator | None:
        if uid is None:
            lonely = _key("lonely", process.proc, member.tid, ts)
            return self._make(lonely, Communicator(lonely, None, nranks, None, True, ts, matched=False))
        # The same id again by the same rank is another attempt, not another member.
        place = (uid, nranks, member.proc, member.rank)
        attempt = self._attempts.get(place, 0)
        if not attempt and self._overflow.full("communicator creations", len(self._attempts)):
            return None
        self._attempts[place] = attempt + 1
        number = _key("uid", uid, nranks, attempt)
        return self._make(number, Communicator(number, uid, nranks, None, True, ts))

    def _begin_child(
        self, process: Process, member: Member, name: str, a: list[int], ts: int, nranks: int | None = None
    ) -> _Creation:
        parent = self.find(process.proc, a[0])
        if parent is None:
            number = _key("child", process.proc, member.tid, ts)
            child = Communicator(number, None, nranks, None, False, ts, matched=False)
            return self._joined(self._make(number, child), member)
        # All ranks of a communicator split it in the same order: the ordinal is the same everywhere.
        place = (process.proc, f"{parent[0].id}/{parent[1].rank}")
        ordinal = self._children.get(place, 0)
        if place in self._children or not self._overflow.full("communicator splits", len(self._children)):
            self._children[place] = ordinal + 1
        color = _signed(a[1]) if name == "ncclCommSplit" else 0
        if name == "ncclCommSplit" and color == NO_COLOR:
            return _Creation([])
        number = _key(name, parent[0].id, ordinal, color)
        return self._joined(self._make(number, Communicator(number, None, nranks, parent[0].id, False, ts)), member)

    def _begin_all(self, process: Process, rec: Any, a: list[int]) -> _Creation:
        tid, ts, ranks = int(rec["tid"]), int(rec["ts_ns"]), max(0, _signed(a[1]))
        number = _key("all", process.proc, tid, ts)
        made = self._make(number, Communicator(number, None, ranks, None, False, ts))
        joined: list[tuple[Communicator, Member]] = []
        for rank in range(min(ranks, MAX_DEVICES)):
            # devlist == NULL means device i for rank i; else the devices stand in the caller's memory.
            member = Member(process.proc, process.pid, tid, rank, device=None if a[2] else rank)
            joined += self._joined(made, member).communicators
        return _Creation(joined)

    def _make(self, number: str, fresh: Communicator) -> Communicator | None:
        if number not in self.table:
            if self._overflow.full("communicators", len(self.table)):
                return None
            self.table[number] = fresh
        return self.table[number]

    def _joined(self, comm: Communicator | None, member: Member) -> _Creation:
        if comm is None or self._overflow.full("communicator members", self._members):
            return _Creation([])
        self._members += 1
        comm.members.append(member)
        return _Creation([(comm, member)])

    def _end(self, process: Process, rec: Any, creation: _Creation) -> None:
        abandoned = int(rec["kind"]) == ABANDONED
        for _, member in creation.communicators:
            member.abandoned = abandoned
            member.status = None if abandoned else int(rec["status"])
        # A grown communicator's old ranks pass no id; NO_OUT then speaks of the id, and a null result says the rest.
        grow = self._hooks.get(int(rec["hook"])).name == "ncclCommGrow"
        pointer = int(rec["a"][7])
        unread = bool(int(rec["flags"]) & NO_OUT) and not (grow and pointer)
        if abandoned or unread or not pointer or not creation.communicators:
            return
        comm, member = creation.communicators[0]
        member.pointer = pointer
        place = (process.proc, pointer)
        last = self.restart(*place, int(rec["ts_ns"]) + int(rec["dur_ns"]))
        if place in self._by_pointer:
            self._by_pointer[place][1].next_seq = last
        if place in self._by_pointer or not self._overflow.full("communicator pointers", len(self._by_pointer)):
            self._by_pointer[place] = (comm, member)

"""Which communicator a process's ncclComm_t belongs to, by what NCCL keeps in it.

Members of one communicator have the same hash and size, and each a rank of its own. Where ranks of the same hash and
size are held twice (NCCL up to 2.23 gives two splits of the same color the same hash), the k-th of a process belongs to
the k-th of the others, and none of them is verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stallscope.aggregate.commdata import CommData
from stallscope.aggregate.communicator import SUCCESS, Communicator, Member
from stallscope.aggregate.process import Process

if TYPE_CHECKING:
    from stallscope.aggregate.communicators import Communicators

try:
    # hashlib loads OpenSSL, 3.6 MB of a process that must stay small; this module is the same function without it.
    from _blake2 import blake2b
except ImportError:
    from hashlib import blake2b

__all__ = ["Matching", "key_of"]

MAX_ALIKE = 64  # communicators of one hash and size


def key_of(*parts: object) -> str:
    """An id made of what it rests on: the same wherever the same is known."""
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()


class Matching:
    """Takes COMM frames and puts communicators together."""

    def __init__(self, owner: Communicators) -> None:
        self._owner = owner
        self._alike: dict[tuple[int, int], list[Communicator]] = {}
        self._expected: dict[int, list[Communicator]] = {}

    def expect(self, proc: int, comm: Communicator) -> None:
        """A communicator of several devices of one process: all but its first pointer will only be seen in use."""
        expected = self._expected.setdefault(proc, [])
        if len(expected) < MAX_ALIKE:
            expected.append(comm)

    def take(self, process: Process, data: CommData) -> None:
        """One COMM frame."""
        place = (process.proc, data.pointer)
        found = self._owner.find(*place)
        if found is None:
            self._newcomer(process, data)
            return
        comm, member = found
        if data.wrong is not None:
            if member.read is None:
                member.read = data
        elif comm.late:
            self._again(process, comm, member, data)
        elif data.at_ns >= member.made_ns:
            self._compare(process, comm, member, data)

    def _again(self, process: Process, comm: Communicator, member: Member, data: CommData) -> None:
        """A communicator that was there before us was read once more."""
        old = member.read
        if old is not None and (old.key, old.nranks, old.rank) == (data.key, data.nranks, data.rank):
            member.read = data
            return
        if self._owner.is_creating(process.proc):
            return  # a new one may be under way at this address: its creation will tell
        if old is None or old.wrong is not None:
            self._owner.leave(comm, member)
            self._owner.moved(process.proc, data.pointer)
        else:
            self._owner.start_over((process.proc, data.pointer), data.at_ns)
        self._newcomer(process, data)

    def _compare(self, process: Process, comm: Communicator, member: Member, data: CommData) -> None:
        """What the creation told, and what stands in memory."""
        conflict = _conflict(comm, member, data)
        if conflict is None:
            self._fill(comm, member, data)
            self._register(comm, data)
        elif self._owner.is_creating(process.proc):
            return
        elif comm.exact:
            member.doubt = conflict
            told = f"{process.name} (pid {process.pid}): communicator {comm.id} is not what its creation told"
            self._owner.note(f"{told}: {conflict}")
        else:
            # The same split of a parent that was there before us, by the numbers since: its ranks count from elsewhere.
            self._owner.leave(comm, member)
            self._owner.moved(process.proc, data.pointer)
            self._newcomer(process, data, member)

    def _newcomer(self, process: Process, data: CommData, member: Member | None = None) -> None:
        member = member or Member(process.proc, process.pid, 0, None)
        if data.wrong is not None:
            number = key_of("unread", process.proc, data.pointer)
            fresh = Communicator(number, None, None, None, False, data.at_ns, matched=False, late=True)
            comm: Communicator | None = self._owner.make(number, fresh)
            if comm and not comm.members and self._owner.join(comm, member):
                member.read = data
                self._owner.settle((process.proc, data.pointer), comm, member)
            return
        taken = self._waiting_member(process.proc, data)
        if taken:
            comm, member = taken
        else:
            comm = self._home(process.proc, data)
            member.rank = data.rank
            if comm is None or not self._owner.join(comm, member):
                return
        self._owner.settle((process.proc, data.pointer), comm, member)
        self._fill(comm, member, data)
        self._register(comm, data)

    def _waiting_member(self, proc: int, data: CommData) -> tuple[Communicator, Member] | None:
        """A rank whose creation was seen, without its pointer: of ncclCommInitAll all but the first."""
        alike = self._found(data)
        fresh = [c for c in self._expected.get(proc, []) if c.hash is None and c.nranks == data.nranks]
        for comm in alike or (fresh if len(fresh) == 1 else []):
            member = comm.at_rank.get(data.rank)
            if member and member.proc == proc and member.pointer is None and member.status == SUCCESS:
                return comm, member
        return None

    def _found(self, data: CommData) -> list[Communicator]:
        """Those of that hash and size; one that its last member has left is none any more."""
        alike = self._alike.setdefault((data.key, data.nranks), [])
        alike[:] = [comm for comm in alike if self._owner.table.get(comm.id) is comm]
        return alike

    def _home(self, proc: int, data: CommData) -> Communicator | None:
        alike = self._found(data)
        for comm in alike:
            if data.rank not in comm.at_rank:
                return comm
        if len(alike) >= MAX_ALIKE:
            return None
        number = key_of("hash", data.key, data.nranks, len(alike))
        return self._owner.make(number, Communicator(number, None, data.nranks, None, False, data.at_ns, late=True))

    def _fill(self, comm: Communicator, member: Member, data: CommData) -> None:
        member.read, member.rank, member.device, member.doubt = data, data.rank, data.device, None
        comm.at_rank[data.rank] = member
        comm.nranks = data.nranks
        comm.learn_version(data.version)
        comm.hash = data.hash if comm.hash is None else comm.hash
        comm.magic = data.magic if comm.magic is None else comm.magic

    def _register(self, comm: Communicator, data: CommData) -> None:
        """Let others of the same hash find it; what was found before it joins it."""
        alike = self._found(data)
        if comm not in alike and len(alike) < MAX_ALIKE:
            other = next((c for c in alike if not c.exact and _fit(c, comm)), None)
            if other is not None and not comm.exact:
                self._absorb(comm, other)
                return
            if other is not None:
                alike.remove(other)
                self._absorb(other, comm)
            alike.append(comm)
        comm.matched = True
        for one in alike if len(alike) > 1 else []:
            one.ambiguous = not one.exact

    def _absorb(self, source: Communicator, into: Communicator) -> None:
        for member in list(source.members):
            self._owner.leave(source, member)
            same = into.at_rank.get(member.rank) if member.rank is not None else None
            kept = same or member
            if same is None and not self._owner.join(into, member):
                continue
            if member.pointer is not None:
                kept.read, kept.device = member.read, member.device
                self._owner.settle((member.proc, member.pointer), into, kept)
                self._owner.moved(member.proc, member.pointer)
        into.hash = source.hash if into.hash is None else into.hash
        into.magic = source.magic if into.magic is None else into.magic


def _conflict(comm: Communicator, member: Member, data: CommData) -> str | None:
    if comm.nranks is not None and comm.nranks != data.nranks:
        return f"{data.nranks} ranks instead of {comm.nranks}"
    if member.rank is not None and member.rank != data.rank:
        return f"rank {data.rank} instead of {member.rank}"
    if comm.at_rank.get(data.rank, member) is not member:
        return f"rank {data.rank} twice"
    if comm.hash is not None and data.hash is not None and comm.hash != data.hash:
        return f"hash {data.hash:#x} instead of {comm.hash:#x}"
    if comm.unique_id and data.magic is not None and data.magic != comm.unique_id[:8]:
        return f"unique id {data.magic.hex()} instead of {comm.unique_id[:8].hex()}"
    return None


def _fit(one: Communicator, other: Communicator) -> bool:
    """Whether the members of both can be those of one communicator."""
    for rank, member in one.at_rank.items():
        there = other.at_rank.get(rank)
        if there is not None and (there.pointer is not None or there.proc != member.proc):
            return False
    return True

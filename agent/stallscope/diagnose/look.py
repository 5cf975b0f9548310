"""The state of a capture as a `View`: everybody's operations and hosts at one moment."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.communicators import Communicator, Member
from stallscope.aggregate.issuer import Issuer, Place
from stallscope.aggregate.numbering import COLLECTIVE, RECV, SEND, SPLIT
from stallscope.aggregate.operations import USER_REDOP
from stallscope.aggregate.process import SHIM, Process
from stallscope.aggregate.state import State
from stallscope.aggregate.waits import ALL_STREAMS
from stallscope.diagnose.pairs import pair_base
from stallscope.diagnose.view import (
    DEAD,
    FINISHED,
    IN_API,
    IN_SYNC,
    UNKNOWN,
    USER,
    Comm,
    Key,
    Operation,
    Rank,
    Signature,  # fmt: skip
    View,
)

__all__ = ["SYMMETRIC", "Looker"]

Array = NDArray[Any]
WINDOW = 1024
STALE_NS = 2_000_000_000
WAITING_KINDS = ("wait", "copy", "alloc", "event")
SYMMETRIC = ("ncclAllReduce", "ncclAllGather", "ncclReduceScatter", "ncclAlltoAll")  # all need something of all
NCCL_KINDS = ("collective", "p2p", "group", "comm")


def _may_use_nccl(process: Process) -> bool:
    """The shim tells of a library when it is called first; who has a rank and CUDA may be on its way to NCCL."""
    return process.source == SHIM and process.global_rank is not None and bool(process.links)


class Looker:
    """Makes a View, and remembers which rank and communicator of it is whose.

    Attributes:
        view: the result.
        owners: by index of a rank: its process and its lane (which of the process's devices, by order).
        keys: by index of a communicator: its id in `State.communicators`.
        guessed: ranks of communicators that were taken for a process by elimination.
    """

    def __init__(self, state: State, now_ns: int) -> None:
        self.state = state
        self.view = View(now_ns, [], [])
        self.owners: list[tuple[int, int]] = []
        self.keys: list[str] = []
        self.guessed: set[tuple[int, int]] = set()
        self._index: dict[tuple[int, int], int] = {}
        self._comm_index: dict[str, int] = {}
        self._lanes: dict[tuple[int, int], int] = {}
        self._completed: dict[int, int] = {}
        self._find_ranks()
        self._find_comms()
        for issuer in state.operations.issuers.values():
            self._fill(issuer)
        self._spread()
        self._creations()
        self._elsewhere()

    def rank_of(self, comm: int, rank: int) -> int | None:
        """The rank that a rank of the view has in a communicator of it."""
        return next((r for r, index in self.view.comms[comm].members.items() if index == rank), None)

    def process_of(self, rank: int) -> Process:
        """Whose a rank of the view is."""
        return self.state.processes.table[self.owners[rank][0]]

    def _find_ranks(self) -> None:
        table, hooks = self.state.processes.table, self.state.hooks
        issuers = self.state.operations.issuers
        procs = [p for p in table.values() if p.proc in issuers or p.has_library("NCCL", hooks) or _may_use_nccl(p)]
        procs = [p for p in procs if self._takes_part(p, procs)]
        for process in sorted(procs, key=lambda p: (p.global_rank is None, p.global_rank or 0, p.order)):
            lanes = self._lane_count(process)
            for lane in range(lanes):
                self._index[process.proc, lane] = len(self.view.ranks)
                self.owners.append((process.proc, lane))
                self.view.ranks.append(self._rank(process, lane if lanes > 1 else None))

    def _takes_part(self, process: Process, procs: list[Process]) -> bool:
        """A process that loaded NCCL and never called it is a rank only while it is there and its peers may wait.

        It is none as the launcher (torchrun loads NCCL, too), nor as a child of a rank: a loader, a compiler.
        """
        issuers = self.state.operations.issuers
        if process.proc in issuers:
            return True
        if process.exit is not None:
            return False
        if process.global_rank is None:
            named = any(other.global_rank is not None for other in procs)
            kin = any(p.proc in issuers and process.proc in (p.parent, p.proc) for p in procs)
            return not named and not kin and process.parent not in issuers
        return not any(p.proc == process.parent and p.global_rank == process.global_rank for p in procs)

    def _lane_count(self, process: Process) -> int:
        """How many ranks of one communicator the process holds, at most; each pointer is of one of them."""
        issuer, most = self.state.operations.issuers.get(process.proc), 1
        mine: dict[int, list[Place]] = defaultdict(list)
        for place in issuer.places.values() if issuer else ():
            if place.comm >= 0:
                mine[place.comm].append(place)
        for places in mine.values():
            for lane, place in enumerate(sorted(places, key=lambda p: p.rank)):
                self._lanes[process.proc, place.pointer] = lane
            most = max(most, len(places))
        return most

    def _rank(self, process: Process, lane: int | None) -> Rank:
        rank = Rank(process.proc, process.global_rank, USER)
        issuer = self.state.operations.issuers.get(process.proc)
        rank.gap = bool(issuer and issuer.missing)
        if process.exit is not None:
            rank.state = FINISHED if process.exit.code == 0 else DEAD
            rank.since_ns = process.exit.at_ns
        elif self.view.now_ns - self.state.ticked_ns > STALE_NS:
            rank.state = UNKNOWN
        else:
            self._host(rank, issuer, self._threads(process, issuer, lane))
        return rank

    def _threads(self, process: Process, issuer: Issuer | None, lane: int | None) -> set[int]:
        """Those that issue operations, and the main one; where the process is several ranks, those that issue its."""
        if issuer is None or lane is None:
            return {process.pid, *(issuer.tids if issuer else ())}
        mine = [pointer for (proc, pointer), at in self._lanes.items() if (proc, at) == (process.proc, lane)]
        rows = issuer.log.newest(WINDOW)
        return set(rows["tid"][np.isin(rows["pointer"], np.array(mine, np.uint64))].tolist())

    def _host(self, rank: Rank, issuer: Issuer | None, own: set[int]) -> None:
        """What its threads are inside, else any of the process where none has issued anything."""
        found = [(t.tid, c.ts_ns, c.hook, c.a) for t in self.state.flight.waiting() if t.proc == rank.proc
                 for c in t.calls[:1]]  # fmt: skip
        guessed = (i for i in self.state.flight.inferred.values() if i.proc == rank.proc)
        found += [(i.tid, i.since_ns, i.hook, []) for i in guessed]
        calls = [call for call in found if call[0] in own] or ([] if issuer and issuer.tids else found)
        kinds = (*WAITING_KINDS, *NCCL_KINDS)
        calls = [call for call in calls if self.state.hooks.get(call[2]).kind in kinds]
        if not calls:
            rank.since_ns = int(issuer.log.newest(1)["ts_ns"][0]) if issuer and len(issuer.log) else None
            return
        _, rank.since_ns, hook, arguments = min(calls, key=lambda call: call[1])
        facts = self.state.hooks.get(hook)
        rank.api = facts.name
        rank.state = IN_API if facts.kind in NCCL_KINDS else IN_SYNC
        if rank.state == IN_API and arguments and facts.comm >= 0:
            place = issuer.places.get(arguments[facts.comm]) if issuer else None
            rank.in_comm = self._comm_index_of(place.key) if place and place.key else None
        if rank.state == IN_SYNC and arguments:
            rank.stream = self._stream(hook, arguments)

    def _stream(self, hook: int, arguments: list[int]) -> int | None:
        where = int(self.state.operations.wait_facts.stream[hook])
        return arguments[where] if where >= 0 else None

    def _comm_index_of(self, key: str) -> int | None:
        """Index of a communicator in the view; it is added when it is new."""
        if key not in self._comm_index:
            comm = self.state.communicators.table.get(key)
            if comm is None:
                return None
            self._comm_index[key] = len(self.keys)
            self.keys.append(key)
            self.view.comms.append(Comm(key, comm.nranks, {}))
        return self._comm_index[key]

    def _find_comms(self) -> None:
        for issuer in self.state.operations.issuers.values():
            for place in issuer.places.values():
                index = self._comm_index_of(place.key) if place.key else None
                if index is None or place.rank < 0:
                    continue
                comm = self.view.comms[index]
                lane = self._lanes.get((issuer.process.proc, place.pointer), 0)
                comm.members[place.rank] = self._index[issuer.process.proc, lane]
                comm.aligned &= place.numbered
        for key, communicator in self.state.communicators.table.items():
            self._silent_members(key, communicator)

    def _silent_members(self, key: str, communicator: Communicator) -> None:
        """Members that have not issued anything on it yet."""
        for member in communicator.members:
            where = self._index.get((member.proc, 0))
            if member.rank is None or where is None or member.abandoned or member.next_seq is not None:
                continue
            index = self._comm_index_of(key)
            if index is not None and (member.status == 0 or member.status is None):
                self.view.comms[index].members.setdefault(member.rank, where)

    def _fill(self, issuer: Issuer) -> None:
        """The window of operations of a process, on each of its lanes."""
        proc = issuer.process.proc
        if (proc, 0) not in self._index:
            return
        rows = issuer.log.newest(WINDOW)
        first = issuer.log.total - len(rows)
        open_calls = {(t.tid, c.ts_ns) for t in self.state.flight.waiting() if t.proc == proc for c in t.calls}
        waiting = {tid for tid, _ in open_calls}
        issued = (rows["enter_ns"] > 0) & np.isin(rows["kind"], (COLLECTIVE, SEND, RECV, SPLIT))
        places = issuer.places
        for row, at in zip(rows[issued].tolist(), np.flatnonzero(issued).tolist(), strict=True):
            place = places.get(row[2])
            index = self._comm_index_of(place.key) if place and place.key else None
            if place is None or index is None:
                continue
            rank = self._index[proc, self._lanes.get((proc, place.pointer), 0)]
            returned = row[7] not in waiting or (
                (row[7], row[0]) not in open_calls and (row[7], row[1]) not in open_calls
            )
            operation = self._operation(issuer, rank, index, place, row, first + at, returned)
            if operation is not None:
                self.view.ranks[rank].operations.append(operation)
        self._bases(issuer)

    def _operation(
        self, issuer: Issuer, rank: int, comm: int, place: Place, row: Any, pos: int, returned: bool
    ) -> Operation | None:
        _, enter_ns, _, stream, elements, number, batch, _, _, root, redop, _, api, dtype, kind, _ = row[:16]
        name = self.state.hooks.get(api).name
        if kind == COLLECTIVE:
            key: Key = (comm, "c", number + (place.base or 0))
            signature = Signature(name, elements, dtype, min(redop, USER_REDOP), root)
        elif kind == SPLIT:
            key, signature, done = (comm, "split", number), Signature("split", 0, -1, -1, -1), returned
            return Operation(rank, pos, key, name, signature, stream, enter_ns, returned, batch, done)
        else:
            base = pair_base(self.state, issuer, place, kind, root)
            if base is None:
                self.view.comms[comm].aligned = False
                base = 0
            ends = (place.rank, root) if kind == SEND else (root, place.rank)
            key, signature = (comm, "p", *ends, number + base), Signature("p2p", elements, dtype, -1, -1)
        done, ended = self._done(issuer, place, kind, key, stream, enter_ns), row[18] > 0
        # One of these ends nowhere before all have begun it; a send or a broadcast may.
        done |= ended and (kind == RECV or name in SYMMETRIC)
        started = self._started(issuer, enter_ns, *row[16:19])
        return Operation(rank, pos, key, name, signature, stream, enter_ns, returned, batch, done, started, ended)

    def _started(self, issuer: Issuer, enter_ns: int, queued_ns: int, begun_ns: int, ended_ns: int) -> bool | None:
        """Whether the GPU began it. That it did not is known only of what a witness saw in the queue, without gaps."""
        if begun_ns or ended_ns:
            return True
        holes = self.state.holes
        hole_ns = max(issuer.untold_ns, holes.get(None, 0), holes.get(issuer.process.proc, 0))
        return False if queued_ns and enter_ns > hole_ns else None

    def _done(self, issuer: Issuer, place: Place, kind: int, key: Key, stream: int, enter_ns: int) -> bool:
        """Whether a wait that began after it, on its stream, has ended; only where all have come, to be safe."""
        synced = max(issuer.synced.get(stream, 0), issuer.synced.get(ALL_STREAMS, 0))
        if enter_ns >= synced or kind != COLLECTIVE or place.comm < 0:
            return False
        return int(key[-1]) < self._complete(place.comm)

    def _spread(self) -> None:
        """Who has the result of a collective has something of every rank: all of them have come so far.

        Waits of the last one to come are short, and short waits are sampled: its own proof is likely to be missing.
        """
        newest: dict[int, int] = {}
        for rank in self.view.ranks:
            for operation in rank.operations:
                if operation.done and operation.key[1] == "c" and operation.name in SYMMETRIC:
                    comm = int(operation.key[0])
                    newest[comm] = max(newest.get(comm, -1), int(operation.key[-1]))
        aligned = {comm: number for comm, number in newest.items() if self.view.comms[comm].aligned}
        for rank in self.view.ranks:
            tells_ends = any(operation.ended for operation in rank.operations)
            for at, operation in enumerate(rank.operations):
                if tells_ends and operation.started is not None:
                    continue  # its own witness knows better: who called with more elements goes on waiting
                is_known = operation.key[1] == "c" and int(operation.key[-1]) <= aligned.get(int(operation.key[0]), -1)
                if is_known and not operation.done:
                    rank.operations[at] = operation._replace(done=True)

    def _complete(self, comm: int) -> int:
        """How many collectives every rank of a communicator is known to have issued."""
        if comm not in self._completed:
            arrivals = self.state.operations.arrivals
            rows = arrivals.rank_rows(comm)
            self._completed[comm] = int(arrivals.arrived[rows].min()) if arrivals.present[rows].all() else 0
        return self._completed[comm]

    def _bases(self, issuer: Issuer) -> None:
        """How many operations were issued before the window, where none of them stands in it: all."""
        proc = issuer.process.proc
        for place in issuer.places.values():
            index = self._comm_index.get(place.key) if place.key else None
            if index is None:
                continue
            rank = self.view.ranks[self._index[proc, self._lanes.get((proc, place.pointer), 0)]]
            rank.base[index, "c"] = place.collectives + (place.base or 0)
            for (kind, peer), count in place.peers.items():
                ends = (place.rank, peer) if kind == SEND else (peer, place.rank)
                base = pair_base(self.state, issuer, place, kind, peer) or 0
                rank.base[(index, "p", *ends)] = count + base
            rank.base[index, "split"] = place.splits
        for lane in range(len(self.owners)):
            if self.owners[lane][0] == proc:
                rank = self.view.ranks[lane]
                for operation in reversed(rank.operations):
                    rank.base[operation.key[:-1]] = int(operation.key[-1])

    def _creations(self) -> None:
        """Creations under way are operations that block their host."""
        for proc, _, hook, ts_ns, communicator, member in self.state.communicators.creations():
            rank = self._index.get((proc, 0))
            facts = self.state.hooks.get(hook)
            if rank is None or "Split" in facts.name or "Shrink" in facts.name:
                continue
            index = self._comm_index_of(communicator.id)
            if index is None:
                continue
            if member.rank is not None:
                self.view.comms[index].members[member.rank] = rank
            self._append(rank, Operation(rank, 1 << 60, (index, "init", 0), facts.name,
                                         Signature("init", 0, -1, -1, -1), 0, ts_ns, False, -1))  # fmt: skip
            self._guess(index, communicator, member)

    def _append(self, rank: int, operation: Operation) -> None:
        operations = self.view.ranks[rank].operations
        pos = operations[-1].pos + 1 if operations else 0
        operations.append(operation._replace(pos=pos, batch=pos))

    def _guess(self, index: int, communicator: Communicator, _member: Member) -> None:
        """Who is missing at a creation has not said which rank it is: taken from those that wait for nothing."""
        comm = self.view.comms[index]
        absent = [r for r in range(communicator.nranks or 0) if r not in comm.members][:64]
        candidates = self._candidates(index)
        if absent and len(absent) == len(candidates):
            for rank, candidate in zip(absent, candidates, strict=True):
                comm.members[rank] = candidate
                self.guessed.add((index, rank))

    def _candidates(self, index: int) -> list[int]:
        taken = set(self.view.comms[index].members.values())
        return [i for i, rank in enumerate(self.view.ranks) if i not in taken and rank.state in (USER, DEAD)]

    def _elsewhere(self) -> None:
        """Places whose communicator nobody could name: their operations have no peers here."""
        for issuer in self.state.operations.issuers.values():
            unknown = [place for place in issuer.places.values() if place.key is None]
            if unknown and (issuer.process.proc, 0) in self._index:
                self.view.ranks[self._index[issuer.process.proc, 0]].gap |= bool(RECV and unknown)

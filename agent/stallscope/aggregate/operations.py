"""Every NCCL operation that a rank issued, numbered as its peers number theirs.

Records are kept until `flush`, so that the work is done a few times a second and not a hundred times.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.arrivals import Arrivals
from stallscope.aggregate.communicators import Communicators
from stallscope.aggregate.device import forget, told_by_device
from stallscope.aggregate.events import CALL, DONE, ENTER, NESTED, NO_SEQ, STARTED
from stallscope.aggregate.hooks import Hooks
from stallscope.aggregate.issuer import Issuer, Place
from stallscope.aggregate.limits import LIMITS, Overflow
from stallscope.aggregate.numbering import (
    BEGIN,
    COLLECTIVE,
    END,
    OTHER,
    RECV,
    SEND,
    SPLIT,
    Arguments,
    rows_of,
)
from stallscope.aggregate.process import SHIM, Process
from stallscope.aggregate.starts import Starts
from stallscope.aggregate.table import TableRow, newest_of
from stallscope.aggregate.tape import Speller, copies_of
from stallscope.aggregate.waits import WaitFacts

__all__ = ["Operations", "signatures"]

Array = NDArray[Any]
MAX_PENDING = 1 << 20
MAX_STREAMS = 64
MAX_TABLES = 1 << 14
USER_REDOP = 5
MAX_RANKS = 1 << 17
SAMPLES = 3
TIMEOUT = 8  # ncclTimeout, nccl.h 2.32
TOLD = ("collective", "p2p", "group", "comm")  # whose entries are always recorded


class Operations:
    """The job's operations, filled by records; see `Issuer` and `Arrivals`."""

    def __init__(self, hooks: Hooks, communicators: Communicators, overflow: Overflow) -> None:
        self.issuers: dict[int, Issuer] = {}
        self.arrivals = Arrivals()
        self.starts = Starts()
        self.index_of: dict[str, int] = {}
        self.key_of: list[str] = []
        self.now_ns = 0
        self.meaning: dict[int, tuple[str, int, int, int, int]] = {}
        self._hooks, self._communicators, self._overflow = hooks, communicators, overflow
        self.arguments = Arguments(hooks)
        self._pending: list[tuple[list[Process | None], Array]] = []
        self._waiting = 0
        self._tables: list[tuple[Process, TableRow, int]] = []
        self._over: set[int] = set()  # indices of communicators that are gone in some process
        self.is_told = hooks.column(lambda h: h.library == "NCCL" and h.kind in TOLD)
        self.wait_facts = WaitFacts(hooks)
        self._speller = Speller(hooks)

    def add(self, slots: list[Process | None], recs: Array) -> None:
        """Records of a frame, with who held which slot."""
        hook, kind = recs["hook"], recs["kind"]
        entries = self.is_told[hook] & ((kind == ENTER) | (kind == CALL))
        waits = self.wait_facts.chosen(recs)
        for proc, counts in copies_of(slots, recs, self.wait_facts):
            if (issuer := self.issuers.get(proc)) is not None:
                issuer.tape.copied(counts)
        timed_out = self.is_told[hook] & (kind == DONE) & (recs["status"] == TIMEOUT)
        chosen = entries | waits | timed_out | (self.is_told[hook] & (kind >= STARTED))
        if not chosen.any():
            return
        self._pending.append((slots, recs[chosen]))
        self._waiting += int(chosen.sum())
        if self._waiting > MAX_PENDING:
            self.flush()

    def flush(self, until_ns: int | None = None) -> None:
        """Number what came since the last time, up to that instant."""
        pending, self._pending, self._waiting = self._pending, [], 0
        if until_ns is not None:
            self._pending = [(slots, recs[recs["ts_ns"] > until_ns]) for slots, recs in pending]
            self._waiting = sum(len(recs) for _, recs in self._pending)
            pending = [(slots, recs[recs["ts_ns"] <= until_ns]) for slots, recs in pending]
        by_process: dict[int, list[Array]] = defaultdict(list)
        for slots, recs in pending:
            for slot in np.unique(recs["slot"]).tolist():
                process = slots[slot]
                issuer = self._issuer(process) if process else None
                if issuer:
                    by_process[issuer.process.proc].append(recs[recs["slot"] == slot])
        for proc, parts in by_process.items():
            recs = np.concatenate(parts)
            recs = recs[np.argsort(recs["ts_ns"], kind="stable")]
            rows = self._take(self.issuers[proc], recs)
            waits = recs[~self.is_told[recs["hook"]]]
            self.issuers[proc].tape.add(self._speller, rows, waits, self._overflow)
        tables, self._tables = self._tables, []
        for table in tables:
            if until_ns is None or table[2] <= until_ns:
                self._catch_up(*table)
            else:
                self._tables.append(table)
        self._settle()

    def _issuer(self, process: Process) -> Issuer | None:
        if process.proc not in self.issuers:
            if self._overflow.full("issuing processes", len(self.issuers)):
                return None
            self.issuers[process.proc] = Issuer(process)
        return self.issuers[process.proc]

    def _take(self, issuer: Issuer, recs: Array) -> Array:
        """The operations among them, as OPERATION rows."""
        is_device = recs["kind"] >= STARTED
        rows = self._take_calls(issuer, recs[~is_device])
        if issuer.early is not None or is_device.any():
            told = recs[is_device]
            pointers = self.arguments.take("comm", told["hook"], told["a"])
            told_by_device(issuer, told, pointers, self.arrivals, self.starts)
        return rows

    def _take_calls(self, issuer: Issuer, recs: Array) -> Array:
        is_entry = self.is_told[recs["hook"]]
        self._take_waits(issuer, recs[~is_entry])
        timed_out = is_entry & (recs["kind"] == DONE)
        if timed_out.any():
            issuer.timed_out_ns = int(recs["ts_ns"][timed_out][0])
            is_entry &= ~timed_out
        recs = recs[is_entry]
        issuer.entries += len(recs)
        recs = recs[(recs["flags"] & NESTED) == 0]
        rows = rows_of(recs, self.arguments)
        if not len(rows):
            return rows
        rows["batch"] = issuer.log.total + np.arange(len(rows))
        self._group(issuer, rows)
        counted = self._hooks.is_numbered[rows["hook"]] & ((rows["flags"] & NO_SEQ) == 0) | (rows["kind"] == SPLIT)
        for pointer in np.unique(rows["pointer"][counted]).tolist():
            self._number(issuer, rows, np.flatnonzero((rows["pointer"] == pointer) & counted))
        for tid in dict.fromkeys(rows["tid"].tolist()):
            issuer.tids.pop(tid, None)
            issuer.tids[tid] = int(rows["ts_ns"][-1])
        while len(issuer.tids) > 64:
            issuer.tids.pop(next(iter(issuer.tids)))
        issuer.log.append(rows)
        return rows

    def told(self, process: Process, row: TableRow, at_ns: int) -> None:
        """How far a rank is by the shim's own table, which knows also what was never recorded."""
        issuer = self._issuer(process)
        place = self._place(issuer, row.pointer) if issuer else None
        if issuer is None or place is None or not row.next:
            return
        place.next_n = place.next_n or 0  # the table counts from the creation on
        calls = sum(c.calls - c.filtered for hook, c in process.counts.items() if self.is_told[hook])
        issuer.entries = max(issuer.entries, calls - self._waiting_of(process))
        self._tables.append((process, row, at_ns))
        if len(self._tables) > MAX_TABLES:
            self.flush()

    def _waiting_of(self, process: Process) -> int:
        """Entries of it that are not numbered yet."""
        held = [(recs, [slot for slot, who in enumerate(slots) if who is process]) for slots, recs in self._pending]
        mine = [recs[np.isin(recs["slot"], slots)] for recs, slots in held]
        return sum(int((self.is_told[r["hook"]] & ((r["kind"] == ENTER) | (r["kind"] == CALL))).sum()) for r in mine)

    def _catch_up(self, process: Process, row: TableRow, at_ns: int) -> None:
        """Once all records of before the table are numbered: its newest operation is taken as if its record had come
        now, where it did not; those before it are holes in the numbers."""
        issuer = self._issuer(process)
        place = self._place(issuer, row.pointer) if issuer else None
        if issuer is None or place is None or not self._hooks.is_numbered[row.hook]:
            return
        if (place.next_n or 0) < row.next:
            entered = issuer.entries
            self._take(issuer, newest_of(row, at_ns, self.arguments.columns))
            issuer.entries = entered

    def _take_waits(self, issuer: Issuer, recs: Array) -> None:
        if not len(recs):
            return
        rows = self.wait_facts.rows(recs)
        issuer.waits.append(rows)
        for row in rows[rows["ends"]].tolist():
            place = int(row[2])
            if place in issuer.synced or len(issuer.synced) < MAX_STREAMS:
                issuer.synced[place] = max(issuer.synced.get(place, 0), int(row[0]))

    def _group(self, issuer: Issuer, rows: Array) -> None:
        """Operations of a group are issued by its end."""
        marks = (rows["kind"] == BEGIN) | (rows["kind"] == END)
        if not issuer.groups and not marks.any():
            return
        for i in range(len(rows)):
            kind, tid = int(rows["kind"][i]), int(rows["tid"][i])
            depth, batch = issuer.groups.get(tid, (0, int(rows["batch"][i])))
            if kind == BEGIN and len(issuer.groups) < 1024:
                issuer.groups[tid] = (depth + 1, batch)
            elif kind == END and depth > 1:
                issuer.groups[tid] = (depth - 1, batch)
            elif kind == END:
                issuer.groups.pop(tid, None)
                self._close(issuer, rows[:i], batch, int(rows["ts_ns"][i]))
            elif depth:
                rows["batch"][i], rows["enter_ns"][i] = batch, 0

    def _close(self, issuer: Issuer, rows: Array, batch: int, ts_ns: int) -> None:
        issuer.stale = True
        rows["enter_ns"][(rows["batch"] == batch) & (rows["enter_ns"] == 0)] = ts_ns
        kept = issuer.log.newest(len(issuer.log))
        issuer.log.update("enter_ns", (kept["batch"] == batch) & (kept["enter_ns"] == 0), ts_ns)

    def _number(self, issuer: Issuer, rows: Array, at: Array) -> None:
        """Give the operations on one communicator their numbers."""
        place = self._place(issuer, int(rows["pointer"][at[0]]))
        if place is None:
            return
        splits = at[rows["kind"][at] == SPLIT]
        rows["index"][splits] = place.splits + np.arange(len(splits))
        place.splits += len(splits)
        at = at[rows["kind"][at] != SPLIT]
        if not len(at):
            return
        at = at[np.argsort(rows["n"][at], kind="stable")]  # threads may have taken their numbers in another order
        mixed = bool(place.peers) or bool((rows["kind"][at] != COLLECTIVE).any())
        at = self._late(issuer, place, rows, at, mixed)
        if not len(at):
            return
        lost = place.miss(rows[at], mixed)
        empty = (rows["kind"][at] == COLLECTIVE) & (rows["elements"][at] == 0)
        rows["kind"][at[empty]] = OTHER
        is_chosen = rows["kind"][at] == COLLECTIVE
        chosen = at[is_chosen]
        rows["index"][chosen] = place.collectives + np.arange(len(chosen)) + lost[is_chosen]
        place.collectives += len(chosen) + int(lost[-1])
        for kind in (SEND, RECV):
            mine = at[rows["kind"][at] == kind]
            for peer in np.unique(rows["root"][mine]).tolist():
                pair = mine[rows["root"][mine] == peer]
                first = place.peers.get((kind, peer), 0)
                rows["index"][pair] = first + np.arange(len(pair))
                if first or len(place.peers) < 1024:
                    place.peers[kind, peer] = first + len(pair)
        if len(chosen):
            place.untold += len(chosen)

    def _late(self, issuer: Issuer, place: Place, rows: Array, at: Array, mixed: bool) -> Array:
        """Records that come behind later ones, or a second time; those that are neither."""
        n = rows["n"][at].astype(np.int64)
        if place.next_n is None or n[0] >= place.next_n:
            return at
        late, known = n < place.next_n, issuer.log.newest(len(issuer.log))
        again = np.isin(n, known["n"][(known["pointer"] == place.pointer) & (known["kind"] != OTHER)])
        rows["index"][at[late]] = place.collectives - place.next_n + n[late]
        rows["kind"][at[late & (again | mixed)]] = OTHER
        found = int((late & ~again).sum())
        place.missed -= found
        place.untold += 0 if mixed else found
        return at[~late]

    def _place(self, issuer: Issuer, pointer: int) -> Place | None:
        if pointer not in issuer.places:
            if len(issuer.places) >= LIMITS["communicators of a process"]:
                self._overflow.turned_away["communicators of a process"] += 1
                return None
            is_whole = issuer.process.source == SHIM  # it numbers from the creation on, BPF from the attach on
            issuer.places[pointer] = Place(pointer, next_n=0 if is_whole else None)
        return issuer.places[pointer]

    def restart(self, proc: int, pointer: int, at_ns: int) -> None:
        """Another communicator lies at that address from that instant on."""
        self.flush(at_ns)
        issuer = self.issuers.get(proc)
        place = issuer.places.pop(pointer, None) if issuer else None
        if issuer and place:
            if place.comm >= 0:
                self._over.add(place.comm)
                self.arrivals.trusted[place.comm] = False
            rows = issuer.log.newest(len(issuer.log))
            issuer.log.update("kind", rows["pointer"] == pointer, OTHER)  # numbers of another communicator
            issuer.old_places.append(place)
            forget(issuer, pointer)
            del issuer.old_places[:-64]

    def moved(self, proc: int, pointer: int) -> None:
        """What lies at that address is part of another communicator than it was taken for; its numbers go on."""
        issuer = self.issuers.get(proc)
        place = issuer.places.get(pointer) if issuer else None
        if issuer and place and place.comm >= 0:
            self._over.add(place.comm)
            self.arrivals.present[int(self.arrivals.first[place.comm]) + place.rank] = False
            place.comm, place.untold, issuer.stale = -1, place.collectives, True

    def _settle(self) -> None:
        """Join what was numbered to the communicators, as far as they are known by now."""
        trusted: dict[int, bool] = {}
        for issuer in self.issuers.values():
            fresh = issuer.log.total - issuer.settled
            for place in issuer.places.values():
                if place.comm < 0 or place.base is None:
                    self._identify(issuer, place)
                    issuer.stale = True
                if place.comm >= 0:
                    trusted[place.comm] = trusted.get(place.comm, True) and place.numbered
            if fresh or issuer.groups or issuer.stale:
                whole = issuer.groups or issuer.stale
                self._tell_all(issuer, len(issuer.log) if whole else fresh)
                issuer.stale = False
            issuer.settled = issuer.log.total
        for comm, yes in trusted.items():
            self.arrivals.trusted[comm] = yes and comm not in self._over

    def _tell_all(self, issuer: Issuer, fresh: int) -> None:
        rows = issuer.log.newest(fresh)
        rows = rows[rows["kind"] == COLLECTIVE]
        for place in issuer.places.values():
            if place.untold and place.comm >= 0 and place.base is not None:
                self._tell(place, rows[rows["pointer"] == place.pointer][-place.untold :], place.base)

    def _tell(self, place: Place, rows: Array, base: int) -> None:
        issued = rows[rows["enter_ns"] > 0]
        if len(issued):
            indices = issued["index"] + base
            values = signatures(issued)
            self.arrivals.came(place.comm, place.rank, indices, issued["enter_ns"], values)
            self._learn(issued, values)
        place.untold = len(rows) - len(issued)

    def _learn(self, rows: Array, values: Array) -> None:
        """What a signature stands for."""
        for value, at in zip(*(found.tolist() for found in np.unique(values, return_index=True)), strict=True):
            if value not in self.meaning and not self._overflow.full("signatures", len(self.meaning)):
                row = rows[at]
                name = self._hooks.get(int(row["api"])).name
                self.meaning[value] = (
                    name,
                    int(row["elements"]),
                    int(row["dtype"]),
                    int(row["redop"]),
                    int(row["root"]),
                )

    def _identify(self, issuer: Issuer, place: Place) -> None:
        proc = issuer.process.proc
        found = self._communicators.find(proc, place.pointer)
        if found is None:
            return
        comm, member = found
        place.key = comm.id
        if place.comm < 0 and member.rank is not None and comm.nranks and 0 <= member.rank < comm.nranks <= MAX_RANKS:
            self._enrol(place, comm.id, comm.nranks, member.rank)
        if place.base is None:
            known = self._communicators.sequence_base(proc, place.pointer)
            place.base, place.how = known if known else self._read_base(issuer, place)

    def _enrol(self, place: Place, key: str, nranks: int, rank: int) -> None:
        if key not in self.index_of:
            if self._overflow.full("ranks of communicators", self.arrivals.rows + nranks):
                return
            self.index_of[key] = self.arrivals.add(nranks, self.now_ns)
            self.key_of.append(key)
        place.comm, place.rank = self.index_of[key], rank
        self.arrivals.present[int(self.arrivals.first[place.comm]) + rank] = True

    def _read_base(self, issuer: Issuer, place: Place) -> tuple[int | None, str]:
        """NCCL counts too: what it had counted, less what we saw, at moments when both stood still."""
        samples = self._communicators.samples(issuer.process.proc, place.pointer)
        if len(samples) < SAMPLES:
            return None, "unknown"
        rows = issuer.log.newest(len(issuer.log))
        rows = rows[rows["pointer"] == place.pointer]
        numbers, is_collective = rows["n"], rows["kind"] == COLLECTIVE
        if np.isin(rows["hook"][is_collective], self.arguments.uncounted).any():
            return None, "unknown"  # NCCL does not count them, and nobody knows how many there were before
        seen = [total - int((is_collective & (numbers < n)).sum()) for n, total in samples]
        base, votes = Counter(seen).most_common(1)[0]
        return (base, "read") if votes * 2 > len(seen) and base >= 0 else (None, "unknown")


def signatures(rows: Array) -> Array:
    """One number for all that must agree among the ranks of a collective."""
    value = np.zeros(len(rows), np.uint64)
    redop = np.minimum(rows["redop"], USER_REDOP)
    for column in (rows["api"], rows["elements"], rows["dtype"], redop, rows["root"]):
        value = (value ^ column.astype(np.int64).astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(29)
    return value

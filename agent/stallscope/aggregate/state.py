"""What the frames of one capture add up to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stallscope.aggregate.beginnings import Beginnings
from stallscope.aggregate.checks import (
    BadField,
    integer,
    items,
    mapping,
    maybe_integer,
    maybe_text,
    rate,
    raw,
    text,
    texts,
)
from stallscope.aggregate.commdata import comm_data
from stallscope.aggregate.communicators import Communicators
from stallscope.aggregate.contexts import Contexts
from stallscope.aggregate.crews import Crews
from stallscope.aggregate.events import NESTED, NO_OUT, WIRE_PROCS, Events
from stallscope.aggregate.faults import Faults
from stallscope.aggregate.flight import Flight
from stallscope.aggregate.hooks import WIRE_HOOKS, Hooks
from stallscope.aggregate.hosts import Hosts
from stallscope.aggregate.limits import Overflow
from stallscope.aggregate.ooms import OomKills
from stallscope.aggregate.operations import Operations
from stallscope.aggregate.process import Link, Process, Processes
from stallscope.aggregate.rounds import Rounds
from stallscope.aggregate.sites import Sites
from stallscope.aggregate.table import table_rows
from stallscope.aggregate.threads import Threads
from stallscope.aggregate.witnesses import Witnesses
from stallscope.wire.columns import REC, UID_REC
from stallscope.wire.frames import Body, Frame, Kind
from stallscope.wire.recording import Ending

__all__ = ["Capture", "Cost", "Gap", "State"]


class Capture(NamedTuple):
    """What the capture said of itself (HELLO)."""

    version: str
    start_mono_ns: int
    start_unix_ns: int
    host: str
    backend: str | None
    sources: list[str]
    targets: list[int]
    sample_one_in: int | float
    long_ns: int | None


class Gap(NamedTuple):
    """A time in which something was not seen.

    `missed` None: nobody knows how many calls. `hooks` are those that it is about, None for all.
    """

    source: str
    proc: int | None
    missed: int | None
    from_ns: int
    to_ns: int
    reason: str
    hooks: frozenset[int] | None = None


class Cost(NamedTuple):
    """What the capture itself used."""

    cpu_ns: int
    rss_bytes: int
    processes: dict[str, tuple[int, int]]


class State:
    """Takes frames in stream order. Never raises for what a frame holds: a bad one ends the source, with a note.

    Attributes:
        now_ns: the newest instant that a frame told; the only clock here.
        dropped: why the source was dropped, None while it is good.
        complete: whether the capture said goodbye.
        faults: what of stallscope itself failed.
        holes: by process, None for any of them: until when records may be missing.
    """

    def __init__(self) -> None:
        self.overflow = Overflow()
        self.faults = Faults()
        self.capture: Capture | None = None
        self.now_ns = 0
        self.complete = False
        self.reason: str | None = None
        self.dropped: str | None = None
        self.ending: Ending | None = None
        self.unknown_kinds = 0
        self.gaps: list[Gap] = []
        self.blind: dict[int | None, set[frozenset[int] | None]] = {}
        self.holes: dict[int | None, int] = {}
        self._gap_keys: set[tuple[Any, ...]] = set()
        self.notes: list[tuple[int | None, str]] = []
        self.lost_by: dict[str, int] = {}
        self.cost: Cost | None = None
        self.processes = Processes(self.overflow)
        self.contexts = Contexts(self.overflow)
        self.beginnings = Beginnings(self.overflow)
        self.flight = Flight(self.overflow)
        self.hosts = Hosts(self.overflow)
        self.rounds = Rounds(self.overflow)
        self.crews = Crews(self.overflow)
        self.oom_kills = OomKills(self.overflow)
        self.sites = Sites(self.overflow)
        self.threads = Threads(self.overflow)
        self.ticked_ns = 0
        self.witnesses = Witnesses(self.overflow)
        self._begin(Hooks([]))
        self._take: dict[int, Callable[[Body], None]] = {
            Kind.PROCESS: self._process,
            Kind.IMAGE: self._image,
            Kind.PLACE: self._place,
            Kind.EXIT: self._exit,
            Kind.LINK: self._link,
            Kind.EVENTS: self._events,
            Kind.UIDS: self._uids,
            Kind.SLOT: self._slot,
            Kind.COUNTS: self.processes.count,
            Kind.INFLIGHT: self.flight.look,
            Kind.INFERRED: self.flight.infer,
            Kind.GAP: self._gap,
            Kind.LOST: self._lost,
            Kind.NOTE: self._note,
            Kind.TICK: self._tick,
            Kind.HOST: self.hosts.look,
            Kind.STACK: lambda body: (self.rounds.add if "round_ns" in body else self.hosts.stack)(body),
            Kind.SUSPECT: self.hosts.suspect,
            Kind.COMM: self._comm,
            Kind.COMMS: self._comms,
            Kind.CONTEXT: self._context,
            Kind.OOM: self.oom_kills.add,
            Kind.CREW: self.crews.look,
            Kind.SITE: self.sites.add,
            Kind.SITES: self.sites.count,
            Kind.SITE_STACK: self.sites.restack,
            Kind.THREADS: self.threads.tell,
            Kind.PIPELINE: self.threads.wait,
            Kind.COST: self._cost,
            Kind.GPU: self.witnesses.look,
            Kind.WITNESS: self.witnesses.add,
            Kind.BYE: self._bye,
        }

    def _begin(self, hooks: Hooks) -> None:
        self.hooks = hooks
        self.communicators = Communicators(hooks, self.overflow)
        self.events = Events(hooks, self.overflow, self.communicators.record)
        self.operations = Operations(hooks, self.communicators, self.overflow)
        self.events.forward = self.operations.add
        self.communicators.restart = self._restart
        self.communicators.moved = self.operations.moved

    def apply(self, frame: Frame) -> None:
        """Add one frame. After the goodbye or a bad frame nothing counts any more."""
        if self.dropped is not None or self.complete:
            return
        try:
            self._apply(frame)
        except BadField as error:
            name = Kind(frame.kind).name
            self.drop(f"a bad {name} frame: {error}")
        except Exception as error:  # a half-applied frame: what comes after it can't be trusted
            if self.faults.strict:
                raise
            self.drop(self.faults.add(f"reading a frame of kind {frame.kind}", error))

    def drop(self, why: str) -> None:
        """The source sent something that is no frame; it is not listened to any more."""
        if self.dropped is None:
            self.dropped = why

    def finish(self, ending: Ending | None) -> None:
        """The stream is over; `ending` says how, None after a farewell."""
        if ending is None:
            return
        if ending.bad is not None:
            self.drop(f"it {ending}")
        self.ending = ending

    def _apply(self, frame: Frame) -> None:
        if frame.kind == Kind.HELLO:
            self._hello(frame.body)
            return
        if frame.kind not in self._take:
            self.unknown_kinds += 1
            return
        if self.capture is None:
            raise BadField("the stream does not begin with HELLO")
        at_ns = maybe_integer(frame.body, "at_ns", 0)
        self._take[frame.kind](frame.body)
        self.now_ns = max(self.now_ns, at_ns or 0)

    def _hello(self, body: Body) -> None:
        if self.capture is not None:
            raise BadField("a second one")
        hooks = Hooks(items(body, "hooks", WIRE_HOOKS))
        targets = items(body, "targets")
        if not all(type(pid) is int for pid in targets):
            raise BadField("targets holds something else than pids")
        self.capture = Capture(
            version=text(body, "version"),
            start_mono_ns=integer(body, "start_mono_ns"),
            start_unix_ns=integer(body, "start_unix_ns"),
            host=text(body, "host"),
            backend=maybe_text(body, "backend"),
            sources=texts(body, "sources"),
            targets=targets,
            sample_one_in=rate(body, "sample_one_in"),
            long_ns=maybe_integer(body, "long_ns", 0),
        )
        self.now_ns = self.capture.start_mono_ns
        self._begin(hooks)

    def _restart(self, proc: int, pointer: int, at_ns: int) -> int:
        self.operations.restart(proc, pointer, at_ns)
        return self.events.restart(proc, pointer)

    def _tick(self, body: Body) -> None:
        self.ticked_ns = self.operations.now_ns = integer(body, "at_ns")
        self.operations.flush()

    def _process(self, body: Body) -> None:
        self.processes.add(body)
        if integer(body, "proc") in self.processes.table:
            self.beginnings.begin(body)

    def _image(self, body: Body) -> None:
        self.processes.image(body)
        if integer(body, "proc") in self.processes.table:
            self.beginnings.image(body)

    def _place(self, body: Body) -> None:
        self.beginnings.place(body, known=self.processes.get(body) is not None)

    def _exit(self, body: Body) -> None:
        self.processes.end(body)
        self.flight.forget(integer(body, "proc"))

    def _link(self, body: Body) -> None:
        linked = self.processes.link(body)
        if linked:
            self._late(*linked)
            process, link = linked
            if link.library == "CUDA":  # capture sends the counters before the link
                process.runtime_calls_before_driver = process.runtime_calls(self.hooks)

    def _late(self, process: Process, link: Link) -> None:
        """The time between a library's appearance and its link: calls made in it are unknown."""
        if link.appeared_ns < link.at_ns:
            reason = f"{link.library} not linked yet"
            self._keep_gap(Gap("link", process.proc, None, link.appeared_ns, link.at_ns, reason, link.hooks))

    def _events(self, body: Body) -> None:
        data = raw(body, "data", REC.itemsize)
        if integer(body, "count") * REC.itemsize != len(data):
            raise BadField("count and data differ")
        self.events.add(data)

    def _uids(self, body: Body) -> None:
        data = raw(body, "data", UID_REC.itemsize)
        if integer(body, "count") * UID_REC.itemsize != len(data):
            raise BadField("count and data differ")
        rows = np.frombuffer(data, dtype=UID_REC)
        self.events.add(rows["rec"].tobytes(), creations=False)
        for row in rows:
            rec: Any = row["rec"]
            process = self.events.owner(int(rec["slot"]))
            if process and self.hooks.is_creator[rec["hook"]] and not rec["flags"] & NESTED:
                uid = None if rec["flags"] & NO_OUT else row["uid"].tobytes()
                self.communicators.record(process, rec, uid)

    def _comm(self, body: Body) -> None:
        data, process = comm_data(body), self.processes.get(body)
        if process:
            self.communicators.read(process, data)

    def _comms(self, body: Body) -> None:
        rows, process, at_ns = table_rows(body), self.processes.get(body), integer(body, "at_ns")
        for row in rows if process else []:
            assert process is not None
            self.communicators.told(process, row, at_ns)
            self.events.told(process.proc, row.pointer, row.next)
            self.operations.told(process, row, at_ns)

    def _context(self, body: Body) -> None:
        process = self.processes.get(body)
        self.contexts.add(body, known=process is not None)
        context = self.contexts.table.get(process.proc) if process else None
        if process and context:
            process.learn_place(context.own)

    def _slot(self, body: Body) -> None:
        slot = integer(body, "slot", 0, WIRE_PROCS)
        self.operations.flush()  # while it is known who held the slot
        self.events.settle(slot, self.processes.get(body))

    def _gap(self, body: Body) -> None:
        self._keep_gap(
            Gap(
                text(body, "source"),
                maybe_integer(body, "proc", 0),
                maybe_integer(body, "count", 0),
                integer(body, "from_ns"),
                integer(body, "to_ns"),
                text(body, "reason"),
            )
        )

    def _keep_gap(self, gap: Gap) -> None:
        # The capture tells a late link twice: as LINK, which knows the hooks, then as GAP.
        if gap[:-1] in self._gap_keys:
            return
        self._blind_by(gap)
        self.holes[gap.proc] = max(self.holes.get(gap.proc, 0), gap.to_ns)
        if not self.overflow.full("gaps", len(self.gaps)):
            self._gap_keys.add(gap[:-1])
            self.gaps.append(gap)

    def _blind_by(self, gap: Gap) -> None:
        """Which numbers a gap makes lower bounds; kept apart from the list of gaps, which has an end.

        A gap with a count (a full ring) loses records; the counters in the kernel went on. A link gap without a process
        is about one that got no slot, and so has no numbers here.
        """
        if gap.missed is not None or (gap.proc is None and gap.source == "link"):
            return
        if gap.proc is None or gap.proc in self.processes.table:
            self.blind.setdefault(gap.proc, set()).add(gap.hooks)

    def _lost(self, body: Body) -> None:
        places = mapping(body, "places")
        if not all(type(n) is int and 0 <= n < 1 << 64 for n in places.values()):
            raise BadField("places holds something else than counts")
        self.lost_by = places

    def _note(self, body: Body) -> None:
        note = (maybe_integer(body, "proc", 0), text(body, "text"))
        if note not in self.notes and not self.overflow.full("notes", len(self.notes)):
            self.notes.append(note)

    def _cost(self, body: Body) -> None:
        processes = mapping(body, "processes")
        for row in processes.values():
            if not isinstance(row, list) or len(row) != 2 or not all(type(x) is int and x >= 0 for x in row):
                raise BadField("processes holds no cost")
        named = {name: (row[0], row[1]) for name, row in processes.items()}
        self.cost = Cost(integer(body, "cpu_ns"), integer(body, "rss_bytes"), named)

    def _bye(self, body: Body) -> None:
        self.now_ns = max(self.now_ns, integer(body, "at_ns"))
        self.reason = text(body, "reason")
        self.operations.flush()
        self.complete = True

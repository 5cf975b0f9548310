"""What a reader who comes later must be told: frames that are state and not news, kept while their process lives.

An aggregator may be restarted, or begin anew because it holds too many processes that have ended. Links, counters and
numbers in the kernel go on meanwhile, so the new one is told what the one before was told, and not what it was told of:
records are not repeated, and COUNTS say of calls whose records went to an earlier reader that they were `filtered`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from stallscope.capture._drain import ffi, lib
from stallscope.capture.outbox import Outbox
from stallscope.capture.rings import REC_BYTES, UID_BYTES, Drained
from stallscope.wire.frames import Kind

__all__ = ["MAX_OTHERS", "NodeOutbox", "Retained"]

Body = dict[str, Any]
# wire_count and wire_time of native/wire.h.
COUNT, TIME_BYTES = struct.Struct("<8Q"), 664
FILTERED = 5
MAX_OTHERS, MAX_SITES = 256, 4096  # links, notes and gaps of a process; sites of a process
MAX_ROWS = 512  # of one SITES frame


@dataclass
class _Proc:
    """One process: the newest frame of each kind, by what it is about.

    `others`: links, notes and gaps in their order; `told`: by hook, the events that earlier readers were told of.
    """

    process: Body
    image: Body | None = None
    context: Body | None = None
    unknown: Body | None = None
    others: list[tuple[Kind, Body]] = field(default_factory=list)
    counts: dict[int, bytes] = field(default_factory=dict)
    times: dict[int, bytes] = field(default_factory=dict)
    sites: dict[int, Body] = field(default_factory=dict)
    site_rows: dict[int, list[Any]] = field(default_factory=dict)
    inferred: dict[int, Body] = field(default_factory=dict)
    crew: list[Any] | None = None
    told: dict[int, int] = field(default_factory=dict)


class Retained:
    """`add` each frame, `count` each batch of records; `renew` when a reader begins anew, then send it `frames`.

    Attributes:
        ended: processes that have ended, and are forgotten.
        turned_away: frames that found no room; a later reader will not get them.
    """

    def __init__(self) -> None:
        self._procs: dict[int, _Proc] = {}
        self._slots: dict[int, int] = {}
        self._lost: Body | None = None
        self._events = ffi.new("uint64_t[]", lib.WIRE_PROCS * lib.WIRE_HOOKS)
        self.ended = self.turned_away = 0

    def add(self, kind: Kind, body: Body) -> Body:
        """Keep it if it is state; the body to send, which for COUNTS is another one."""
        if kind == Kind.LOST:
            self._lost = body
        elif kind == Kind.PROCESS:
            self._procs[body["proc"]] = _Proc(body)
        elif kind == Kind.SLOT:
            self._slots[body["slot"]] = body["proc"]
            self._clear(body["slot"])
        elif kind == Kind.EXIT:
            self._forget(body["proc"])
        elif kind == Kind.CREW:
            for row in body["workers"]:
                if (known := self._procs.get(row[0])) is not None:
                    known.crew = row
        elif (proc := self._procs.get(body.get("proc") or 0)) is not None:
            return self._of_process(proc, kind, body)
        return body

    def _of_process(self, proc: _Proc, kind: Kind, body: Body) -> Body:
        if kind == Kind.COUNTS:
            proc.counts.update(zip(body["hooks"], _split(body["counts"], COUNT.size), strict=True))
            proc.times.update(zip(body["times"], _split(body["timed"], TIME_BYTES), strict=True))
            return {**body, "counts": _told_of(proc, body["hooks"])} if proc.told else body
        if kind == Kind.IMAGE:
            proc.image, proc.unknown = body, None
        elif kind == Kind.CONTEXT:
            proc.context = body
        elif kind == Kind.INFERRED:
            self._infer(proc, body)
        elif kind == Kind.SITE and (body["id"] in proc.sites or self._has_room(len(proc.sites), MAX_SITES)):
            proc.sites[body["id"]] = body
        elif kind == Kind.SITE_STACK and (site := proc.sites.get(body["id"])) is not None:
            proc.sites[body["id"]] = {**site, "frames": body["frames"]}
        elif kind == Kind.SITES:
            proc.unknown = body if "unknown" in body else proc.unknown
            proc.site_rows.update({row[0]: row for row in body["rows"] if row[0] in proc.sites})
        elif kind in (Kind.LINK, Kind.NOTE, Kind.GAP) and self._has_room(len(proc.others), MAX_OTHERS):
            proc.others.append((kind, body))
        return body

    def _has_room(self, size: int, limit: int) -> bool:
        self.turned_away += size >= limit
        return size < limit

    def _infer(self, proc: _Proc, body: Body) -> None:
        if body["ended"] is not None:
            proc.inferred.pop(body["tid"], None)
        elif self._has_room(len(proc.inferred), MAX_OTHERS):
            proc.inferred[body["tid"]] = body

    def _forget(self, number: int) -> None:
        gone = self._procs.pop(number, None)
        if gone is None:
            return
        self.ended += 1
        for proc in self._procs.values():
            context = proc.context
            if context is not None and context["like"] == number and gone.context is not None:
                proc.context = {**context, "like": gone.context["like"], "env": gone.context["env"]}
            if proc.process["parent"] == number:
                proc.process = {**proc.process, "parent": None}

    def release(self, number: int) -> None:
        """The process goes on and is none of ours any more: later readers are not told of it."""
        self._procs.pop(number, None)
        self._slots = {slot: proc for slot, proc in self._slots.items() if proc != number}

    def _clear(self, slot: int) -> None:
        ffi.memmove(self._events + slot * lib.WIRE_HOOKS, bytes(8 * lib.WIRE_HOOKS), 8 * lib.WIRE_HOOKS)

    def count(self, batch: Drained) -> None:
        """Records that a reader is told of."""
        if batch.n_recs:
            lib.tally__add(ffi.from_buffer(batch.recs), batch.n_recs, REC_BYTES, self._events)
        if batch.n_uids:
            lib.tally__add(ffi.from_buffer(batch.uids), batch.n_uids, UID_BYTES, self._events)

    def renew(self) -> int:
        """From now on another reader is told; of how many calls of the living it gets no record."""
        for slot, number in self._slots.items():
            proc = self._procs.get(number)
            if proc is None:
                continue
            row = self._events[slot * lib.WIRE_HOOKS : (slot + 1) * lib.WIRE_HOOKS]
            for hook, events in enumerate(row):
                if events:
                    proc.told[hook] = proc.told.get(hook, 0) + events
            self._clear(slot)
        return sum(sum(proc.told.values()) for proc in self._procs.values())

    def frames(self, now: int) -> Iterator[tuple[Kind, Body]]:
        """All that is state, in an order in which a reader can take it."""
        for proc in self._procs.values():
            yield Kind.PROCESS, proc.process
            if proc.image is not None:
                yield Kind.IMAGE, proc.image
            if proc.context is not None:
                yield Kind.CONTEXT, proc.context
        for slot, number in self._slots.items():
            if number in self._procs:
                yield Kind.SLOT, {"slot": slot, "proc": number, "at_ns": now}
        for number, proc in self._procs.items():
            yield from proc.others
            yield from ((Kind.SITE, body) for body in proc.sites.values())
            yield from self._sums(number, proc, now)
            yield from ((Kind.INFERRED, body) for body in proc.inferred.values())
        workers = [proc.crew for proc in self._procs.values() if proc.crew is not None]
        if workers:
            yield Kind.CREW, {"at_ns": now, "trainers": [], "workers": workers}
        if self._lost is not None:
            yield Kind.LOST, self._lost

    def _sums(self, number: int, proc: _Proc, now: int) -> Iterator[tuple[Kind, Body]]:
        rows = list(proc.site_rows.values())
        for begin in range(0, len(rows), MAX_ROWS):
            yield Kind.SITES, {"at_ns": now, "proc": number, "rows": rows[begin : begin + MAX_ROWS]}
        if proc.unknown is not None:
            yield Kind.SITES, proc.unknown
        if proc.counts:
            yield Kind.COUNTS, {"proc": number, "at_ns": now, "hooks": list(proc.counts),
                                "counts": _told_of(proc, list(proc.counts)), "times": list(proc.times),
                                "timed": b"".join(proc.times.values())}  # fmt: skip


def _split(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def _told_of(proc: _Proc, hooks: list[int]) -> bytes:
    """Their counters, with what earlier readers were told of."""
    rows = []
    for hook in hooks:
        row = list(COUNT.unpack(proc.counts[hook]))
        row[FILTERED] += proc.told.get(hook, 0)
        rows.append(COUNT.pack(*row))
    return b"".join(rows)


class NodeOutbox(Outbox):
    """An outbox whose reader may change.

    Attributes:
        sent_bytes: to the present reader.
    """

    def __init__(self, retained: Retained, sock: Any) -> None:
        self.retained = retained
        self.sent_bytes = 0
        super().__init__(sock)

    def send(self, kind: Kind, body: Body) -> None:
        """As Outbox does; what is state is kept, also while nobody reads."""
        body = self.retained.add(kind, body)
        before = self.queued_bytes
        super().send(kind, body)
        self.sent_bytes += max(0, self.queued_bytes - before)

    def send_records(self, batch: Drained) -> None:
        """As Outbox does, and counts them."""
        self.retained.count(batch)
        super().send_records(batch)

    def hang_up(self) -> None:
        """Let this reader go: another one is asked for at the next look."""
        self._socket.close()
        self.broken = True
        self._queue.clear()

    def tell_again(self, hello: Body, now: int) -> int:
        """Begin a stream: who is there, and what is known of it. How many calls it will have no records of."""
        told = self.retained.renew()
        self.sent_bytes = 0
        Outbox.send(self, Kind.HELLO, hello)
        for kind, body in self.retained.frames(now):
            Outbox.send(self, kind, body)
        return told

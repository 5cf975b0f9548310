"""Processes that are read through the segment of the shim in them: whose it is, draining, counters, losses, the end.

A segment is written by the process that is watched: `Segment` checks each offset, and one that makes no sense is given
up, with a note and a gap. All of it is bounded: one segment a process slot.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from stallscope.capture.counting import send_changes
from stallscope.capture.gaps import Losses
from stallscope.capture.held import WITNESS, Held, ShimSettings, added, gap_of, is_of, losses_of, rank_rows, table_row
from stallscope.capture.outbox import Outbox
from stallscope.capture.rings import MAX_UIDS, Drained, InflightRow, SlotChanges, Thread
from stallscope.capture.segment import BadSegment, Clock, Comm, Segment
from stallscope.capture.segments import Unready, candidates, has_let_go, lock
from stallscope.capture.shimlinks import ShimLinks
from stallscope.capture.shimsites import ShimSites
from stallscope.capture.sums import abandoned
from stallscope.capture.target import Target
from stallscope.wire.frames import Kind
from stallscope.wire.hook_table import BY_NAME

__all__ = ["Shims"]

BATCH_RECORDS = 8192
MAX_REFUSALS_TOLD = 32
CATCH_UP_ROUNDS, CATCH_UP_BULK = 32, 1024
LATE_NS = 1_000_000_000
NCCL_HOOK = BY_NAME["ncclCommInitRank"].id
NOTHING = SlotChanges([], b"", [], b"")


class Shims:
    """All segments of a capture.

    Args:
        outbox: takes the frames.
        clock: CLOCK_MONOTONIC in ns.
        links: tells which libraries the shim stands before.
        settings: written to each segment.

    Attributes:
        sites: tells which Python lines wait.
        prepare: asked before a segment is taken; False when the process can get no slot.
        injected: whether those of injected libraries count.
    """

    def __init__(
        self, outbox: Outbox, clock: Callable[[], int], links: ShimLinks, settings: ShimSettings, sites: ShimSites
    ) -> None:
        self._outbox, self._now, self._links, self._settings = outbox, clock, links, settings
        self.sites = sites
        self._counter: Clock | None = None
        self._held: dict[int, Held] = {}
        self._lost: Counter[str] = Counter()
        self._begun_ns = clock()
        self._tap = False
        self._unready = Unready()
        self.refused, self.injected = 0, False
        self.prepare: Callable[[Target], bool] = lambda target: True

    def has(self, target: Target) -> bool:
        """Whether the process is, or was until it ended, read through its segment."""
        return target.proc in self._held

    def watch(self, targets: list[Target]) -> None:
        """Look for segments of processes that have the shim and had made no call yet."""
        for target in targets:
            if target.preloaded and target.proc not in self._held:
                self.find(target)

    def find(self, target: Target) -> bool:
        """Take the process's segment if it has one; whether it has."""
        fds = candidates(target.pid, injected=self.injected)
        return any(self.adopt(target, fd, is_own=False) for fd in fds) or self.has(target)

    def adopt(self, target: Target, fd: int, *, is_own: bool = True) -> bool:
        """Read this process through the segment behind `fd`, which is taken over; whether it is read.

        Args:
            is_own: the process itself handed it over; False where it was only found with it.
        """
        info = os.fstat(fd)
        file = info.st_dev, info.st_ino
        try:
            if (known := self._held.get(target.proc)) is not None and known.file == file:
                os.close(fd)
                return True
            segment = Segment(fd)
        except (BadSegment, OSError) as error:
            os.close(fd)
            self._unreadable(target, file, str(error), is_own=is_own)
            return False
        if (is_mine := is_of(segment, target)) and self.prepare(target):
            self._take(target, segment, fd, file)
            return True
        segment.close()
        os.close(fd)
        if is_own and not is_mine:
            self.refuse(target, "it is not of the process that handed it over")
        return False

    def _take(self, target: Target, segment: Segment, fd: int, file: tuple[int, int]) -> None:
        self.retire(target, self._now())
        if self._counter is None:
            self._counter = self.sites.counter = Clock()
        begun_ns = min(segment.header.mono_ns, self._now())  # the target's word, and nobody's clock may be set by it
        losses = Losses(partial(losses_of, segment), self._outbox.send, "shim", target.proc, since_ns=begun_ns)
        held = Held(target, segment, fd, file, not lock(fd), losses, begun_ns)
        if before := self._held.get(target.proc):
            held.sums, held.lost_before = before.sums, before.lost_before
        self._held[target.proc] = held
        target.preloaded = True
        self._set_mode(held)
        self._guarded(held, partial(self.sites.begin, held), None)
        if self.injected:
            self._links.tell_mapped(target, begun_ns)
        self._begin(held, is_late=begun_ns < self._now() - LATE_NS)
        if begun_ns < self._begun_ns - LATE_NS and not segment.header.readers:
            age_s = (self._now() - begun_ns) / 1e9
            self._note(target, f"its shim counts since its first call, which was {age_s:.0f} s before it was looked at")

    def _begin(self, held: Held, *, is_late: bool) -> None:
        """Tell the libraries while they can be looked up. Of what was there before anybody looked, rings keep the
        newest part and the table the outcome.

        The table is read first, so as not to be ahead of the records, and told last: a creation that was recorded must
        not look like another one than the table's. Before it the counters: how many records there should have been.
        """
        table = self._guarded(held, held.segment.comms, []) if is_late else []
        if is_late:  # hundreds of thousands of old launches would keep the aggregator from what happens now
            self._guarded(held, partial(held.segment.come_late, CATCH_UP_BULK), None)
        if table:
            self._links.tell(held.target, (NCCL_HOOK,), held.begun_ns)
        rounds = CATCH_UP_ROUNDS if is_late else 0
        while rounds and self._drain(held):
            rounds -= 1
        now, target = self._now(), held.target
        send_changes(self._outbox.send, target, self.changed(target), now)
        if table:
            rows = [table_row(comm) for comm in table]
            self._outbox.send(Kind.COMMS, {"at_ns": now, "proc": target.proc, "comms": rows})
        if is_late and (gap := self._guarded(held, lambda: held.history(self._counter), None)):
            self._outbox.send(Kind.GAP, gap)

    def _unreadable(self, target: Target, file: tuple[int, int], why: str, *, is_own: bool) -> None:
        """One that is only found may not be finished yet: it is looked at again, and told when it stays as it is."""
        if self._unready.is_due(file, self._now(), is_own=is_own):
            self.refuse(target, why)

    def refuse(self, target: Target | None, why: str) -> None:
        """Count a segment that is not read, and tell the first ones."""
        self.refused += 1
        if self.refused > MAX_REFUSALS_TOLD:
            return
        self._note(target, f"a shim's segment is not read: {why}")
        if target is not None:
            self._outbox.send(Kind.GAP, gap_of(target, self._now(), f"the segment of its shim is not read: {why}"))

    def _note(self, target: Target | None, text: str) -> None:
        proc = target.proc if target else None
        self._outbox.send(Kind.NOTE, {"at_ns": self._now(), "proc": proc, "text": text})

    def calibrate(self) -> None:
        """Compare the processes' counter with the clock; once a second."""
        if self._counter is not None:
            self._counter.recalibrate()
        for held in self._held.values():
            if held.is_passive and held.is_open and lock(held.fd):
                held.is_passive = False  # the capture that had it is gone
                self._set_mode(held)
            self._tell_nccl(held)
        self.sites.check()

    def _tell_nccl(self, held: Held) -> None:
        """Not every creation says which rank it makes, and memory can't be read everywhere. Records come first."""
        rows = rank_rows(self._guarded(held, held.segment.comms, []))
        if rows != held.ranks and not self._drain(held):
            held.ranks = rows
            self._outbox.send(Kind.COMMS, {"at_ns": self._now(), "proc": held.target.proc, "comms": rows})
        said = WITNESS.get(self._guarded(held, lambda: held.segment.gpu, 0))
        if said is not None and held.witness is None:
            held.witness = said
            self._note(held.target, said)

    def open_tap(self, on: bool) -> None:
        """Record every call that tells of completion, or as many as of other calls again."""
        self._tap = on
        for held in self._held.values():
            self._set_mode(held)

    def sample(self, one_in: float) -> None:
        """Record another share from now on."""
        self._settings = self._settings._replace(one_in=one_in)
        self.open_tap(self._tap)

    def _set_mode(self, held: Held) -> None:
        """Unless another capture has the say."""
        if held.is_open and not held.is_passive:
            mode = held.segment.header.mode if self._settings.mode is None else self._settings.mode
            held.segment.set_mode(mode, self._settings.one_in, tap=self._tap)

    def mark(self) -> None:
        """From now on `is_told` is about records that exist now."""
        for held in self._held.values():
            held.unread, held.rest = True, 0

    def hasten(self, target: Target) -> None:
        """The process has ended: what it left is read at the next look."""
        if (held := self._held.get(target.proc)) is not None:
            held.unread, held.rest = held.is_open, 0

    def is_unread(self, target: Target) -> bool:
        """Whether the process may have left more than was read since `hasten`."""
        held = self._held.get(target.proc)
        return held is not None and held.unread

    def made(self, target: Target) -> int:
        """How many calls the process has made, as its shim counts them."""
        held = self._held.get(target.proc)
        return sum(thread.calls for thread in self._guarded(held, held.segment.threads, [])) if held else 0

    def is_told(self) -> bool:
        """Whether every record from before the mark has been sent."""
        return not any(held.unread for held in self._held.values())

    def drain(self) -> bool:
        """One batch of each process; whether any has more.

        Those that had nothing for a while are passed over for some looks: a look at each of a hundred segments would
        cost a tenth of a processor.
        """
        self.sites.configure()
        due = [held for held in self._held.values() if held.rest == 0]
        for held in self._held.values():
            held.rest = max(0, held.rest - 1)
        more = [self._drain(held) for held in due]
        return any(more)

    def _drain(self, held: Held) -> bool:
        """Whether there is more: a batch that is not full holds all that was there when it was asked for."""
        batch = self._guarded(held, lambda: self._one_batch(held), None)
        held.unread = batch is not None and (batch.n_recs >= BATCH_RECORDS or batch.n_uids >= MAX_UIDS)
        if batch is not None:
            held.pace(batch)
            if batch.n_uids:  # which NCCL it is says how a communicator's hash comes about: before its creation
                self._links.tell(held.target, (NCCL_HOOK,), held.begun_ns)
            self._outbox.send_records(batch)
            if batch.n_recs:  # at once: the code that waited may be freed
                self._guarded(held, partial(self.sites.look, held), None)
        return held.unread

    def _one_batch(self, held: Held) -> Drained:
        assert self._counter is not None
        return held.segment.drain(held.target.slot, held.target.pid, self._counter, BATCH_RECORDS)

    def _guarded(self, held: Held, read: Callable[[], Any], otherwise: Any) -> Any:
        """What `read` finds; a segment that makes no sense any more is given up."""
        if not held.is_open:
            return otherwise
        try:
            return read()
        except (BadSegment, OSError) as error:
            held.close()
            self.refuse(held.target, str(error))
            return otherwise

    def changed(self, target: Target, otherwise: SlotChanges = NOTHING) -> SlotChanges:
        """Counters of a process that changed since the last call, over all programs that it has run.

        Args:
            otherwise: those of a later program of it that has no shim.
        """
        held = self._held[target.proc]
        self._guarded(held, partial(self.sites.tell, held), None)  # sites never add up to more
        return held.sums.add(self._guarded(held, partial(self._counts, held), otherwise))

    def _counts(self, held: Held, *, is_over: bool = False) -> SlotChanges:
        """With the libraries told first that are new in them."""
        found = held.segment.counts(is_over=is_over)
        self._links.tell(held.target, found.hooks, held.begun_ns)
        return found

    def inflight(self, min_age_ns: int, now_ns: int, *, as_counted: bool = False) -> list[Any]:
        """Calls that have not returned and are at least so old, as INFLIGHT frames want them.

        `as_counted`: those that had not when the counters were read: the processes go on meanwhile.
        """
        rows = []
        for held in self._held.values():
            for row in self._rows(held, as_counted):
                frames = [[f.hook, f.ts_ns, f.n, f.flags, list(f.a)] for f in row.frames]
                if frames and now_ns - row.frames[0].ts_ns >= min_age_ns:
                    rows.append([held.target.proc, row.tid, frames])
        return rows

    def _rows(self, held: Held, as_counted: bool = False) -> list[InflightRow]:
        target, counter = held.target, self._counter
        assert counter is not None
        read = partial(held.segment.inflight, counter, target.slot, target.pid, as_counted=as_counted)
        found: list[InflightRow] = self._guarded(held, read, [])
        return found

    def threads(self, target: Target) -> list[Thread]:
        """Threads of a process that made calls."""
        held = self._held.get(target.proc)
        found = self._guarded(held, held.segment.threads, []) if held else []
        return [Thread(thread.tid, target.slot, thread.calls) for thread in found if thread.alive]

    def retire(self, target: Target, at_ns: int) -> None:
        """The process runs another program now, or has ended: what its segment still holds is told.

        Calls that were under way have been abandoned; there is nobody left in the process to say so.
        """
        held = self._held.get(target.proc)
        if held is None or not held.is_open:
            return
        rounds = CATCH_UP_ROUNDS
        while rounds and self._drain(held):
            rounds -= 1
        lost = [record for row in self._rows(held) for record in abandoned(row, target.pid, target.slot, at_ns)]
        if lost:
            self._outbox.send(Kind.EVENTS, {"count": len(lost), "data": b"".join(lost)})
        self._guarded(held, partial(self._read_last, held), None)
        held.close()
        self._links.forget(target)

    def retire_if_left(self, target: Target, at_ns: int) -> None:
        """The same, if the process has let go of its segment: it runs another program, which made no call yet."""
        held = self._held.get(target.proc)
        if held is not None and held.is_open and has_let_go(target.pid, held.file, injected=self.injected):
            self.retire(target, at_ns)

    def _read_last(self, held: Held) -> None:
        self.sites.end(held)
        send_changes(self._outbox.send, held.target, held.sums.add(self._counts(held, is_over=True)), self._now())
        held.sums.close()
        held.losses.finish(self._now())
        held.lost_before = added(held.lost_before, held.losses.totals())
        self._tell_odd(held)

    def _tell_odd(self, held: Held) -> None:
        for text in held.odd():
            self._note(held.target, text)

    def forget(self, target: Target) -> None:
        """The process has ended and all of it was told."""
        held = self._held.pop(target.proc, None)
        if held is not None:
            held.close()
            self._lost.update(held.lost_before)

    def comms_made(self) -> int:
        """Communicators whose creation has returned, in all processes that are there now."""
        return sum(self._guarded(held, held.segment.losses, {}).get("comms_made", 0) for held in self._held.values())

    def comms(self) -> list[tuple[int, list[Comm]]]:
        """(pid, its communicators) of each process."""
        return [(held.target.pid, self._guarded(held, held.segment.comms, [])) for held in self._held.values()]

    def rows(self) -> list[InflightRow]:
        """Threads that are inside a call now."""
        return [row for held in self._held.values() if held.is_open for row in self._rows(held)]

    def poll_losses(self, now: int) -> None:
        """Place losses in time."""
        for held in self._held.values():
            self._guarded(held, partial(self._poll_one, held, now), None)

    def _poll_one(self, held: Held, now: int) -> None:
        # Also while nothing is read because the aggregator is slow: what waits must not be overwritten.
        held.losses.poll(now)
        held.segment.hold()

    def close_losses(self, now: int) -> None:
        """Tell what was lost since the last look."""
        for held in self._held.values():
            self._guarded(held, partial(held.losses.finish, now), None)
            self._guarded(held, partial(self._tell_odd, held), None)

    def lost_by(self) -> dict[str, int]:
        """Losses so far, by place."""
        total = Counter(self._lost)
        for held in self._held.values():
            total.update(held.lost_before)
            if held.is_open:
                total.update(held.losses.totals())
        return dict(total)

    def close(self) -> None:
        """Let all segments go; the processes go on."""
        for held in self._held.values():
            held.close()
        self._held.clear()

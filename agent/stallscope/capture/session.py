"""The capture loop: one thread, no locks, about a hundred looks a second.

Order inside a look matters: process events before mapping events (a child must be known before its libraries), vital
ring before bulk ring, and the counters last, so that they are never older than the records that were sent.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable
from dataclasses import dataclass

from stallscope.capture.costs import Costs
from stallscope.capture.discovery import Discovery, Mapped
from stallscope.capture.gaps import Losses
from stallscope.capture.inference import Inference
from stallscope.capture.linker import Linker
from stallscope.capture.links import RawTracepoint, close_all
from stallscope.capture.loader import Loaded
from stallscope.capture.outbox import Outbox
from stallscope.capture.parser_client import ParserClient
from stallscope.capture.population import Population
from stallscope.capture.procfs import Mapping
from stallscope.capture.reaper import Reaper
from stallscope.capture.sharing import LINKS_PER_FILE, Sharing
from stallscope.capture.tables import Tables
from stallscope.capture.target import Target
from stallscope.wire.frames import Kind

__all__ = ["Session", "Settings"]

POLL_MS = 10
BATCH_RECORDS = 8192
ROUNDS = 16
SLOW_PERIOD_NS = 1_000_000_000
INFLIGHT_MIN_NS = 100_000_000
_LIFE_KINDS = b"\x04\x05\x06"
_REC_BYTES, _KIND_AT = 104, 26


@dataclass
class Settings:
    """What the user asked for.

    Attributes:
        pids: processes to attach to.
        children: whether their children are traced too.
        one_in: record one in so many launches, copies and short waits.
        long_ns: waits from this duration on are always recorded.
        links_per_file: filtered links a file before unfiltered ones take over (capture/sharing.py).
        duration_s: end after so many seconds; None = when the targets end.
    """

    pids: list[int]
    children: bool = True
    one_in: float = 100.0
    long_ns: int = 200_000
    duration_s: float | None = None
    links_per_file: int = LINKS_PER_FILE


class Session:
    """Links, loops, unlinks. Use `start`, then `run`, then `finish`, and always `close`."""

    def __init__(self, settings: Settings, loaded: Loaded, outbox: Outbox, parser: ParserClient, costs: Costs) -> None:
        self.settings = settings
        self.outbox = outbox
        self._loaded = loaded
        self._clock = time.monotonic_ns
        self.tables = Tables(loaded.maps, settings)
        reaper = Reaper()
        sharing = Sharing(loaded.programs, self.tables.share, reaper.close_later, self._clock, settings.links_per_file)
        self._linker = Linker(sharing, parser, self.tables.ranges.set, outbox.send, self._clock)
        self.population = Population(
            self.tables, self._linker, sharing, reaper, outbox.send, self._clock, follow=settings.children
        )
        self._inference = Inference(parser, self.tables.rows, outbox.send, self._clock)
        self._losses = Losses(self.tables.ctl.get, outbox.send)
        self._costs = costs
        self._tracepoints: list[RawTracepoint] = []
        self._discovery: Discovery | None = None
        self._next_slow_ns = 0
        self._poller = select.epoll()
        self.stop_reason: str | None = None

    def start(self) -> None:
        """Everything that can be linked now is linked when this returns.

        Raises TargetProblem when no given process is there, PermissionProblem or CaptureProblem when the kernel
        refuses.
        """
        self.tables.find_namespace(self._loaded.programs["who_am_i"])
        for program, tracepoint in self._loaded.tracepoints.items():
            if program == "who_am_i":
                continue
            self._tracepoints.append(RawTracepoint.attach(self._loaded.programs[program], tracepoint))
        # Discovery before the scan of the maps: what is mapped in between is seen twice rather than never.
        self._discovery = Discovery()
        # Edge-triggered: only the wakeups that process events force end a pause early. Level-triggered, any record that
        # waits in the ring would, and the loop would spin as long as the target makes calls.
        self._poller.register(self.tables.vital.fileno(), select.EPOLLIN | select.EPOLLET)
        self._losses.poll(self._clock())
        self.population.adopt(self.settings.pids)
        for target in self.population.live():
            self._inference.search(target)
        self._slow(self._clock())

    def run(self, stopping: Callable[[], bool]) -> None:
        """Loop until `stopping()`, the duration is over, every target has ended, or the aggregator is gone."""
        seconds = self.settings.duration_s
        end_ns = None if seconds is None else self._clock() + int(seconds * 1e9)
        while self.stop_reason is None:
            self._poller.poll(POLL_MS / 1000)
            self.look()
            now = self._clock()
            if stopping():
                self.stop_reason = "asked to stop"
            elif end_ns is not None and now >= end_ns:
                self.stop_reason = "duration over"
            elif not self.population.any_live():
                self.stop_reason = "targets ended"
            elif self.outbox.broken:
                self.stop_reason = "aggregator gone"

    def look(self) -> None:
        """One look at everything that may have news."""
        now = self._clock()
        self.outbox.flush()
        self._drain_vital()
        self._read_mappings()
        self._drain_bulk()
        self._losses.poll(now)
        self.population.bury(self._drain_all)
        if now >= self._next_slow_ns:
            self._slow(now)

    def _slow(self, now: int) -> None:
        self._next_slow_ns = now + SLOW_PERIOD_NS
        self.population.check()
        for target in self.population.live():
            self._inference.check(target)
            self._send_counts(target, now)
        self._send_inflight(now, final=False)
        self._losses.report(now)
        self.outbox.send(Kind.COST, self._costs.measure(now))
        self.outbox.send(Kind.TICK, {"at_ns": now})

    def _drain_vital(self, force: bool = False) -> int:
        total = 0
        for _ in range(ROUNDS):
            if not (force or self.outbox.vital_ok):
                break
            drained = self.tables.vital.drain(BATCH_RECORDS)
            if not drained.n_recs and not drained.n_uids:
                break
            total += drained.n_recs + drained.n_uids
            self._ship(bytes(drained.recs), drained.n_recs, bytes(drained.uids), drained.n_uids)
            if drained.n_recs:
                self._life(bytes(drained.recs), drained.n_recs)
        return total

    def _drain_bulk(self, force: bool = False) -> int:
        total = 0
        for _ in range(ROUNDS):
            if not (force or self.outbox.bulk_ok):
                break
            drained = self.tables.bulk.drain(BATCH_RECORDS)
            if not drained.n_recs:
                break
            total += drained.n_recs
            self._ship(bytes(drained.recs), drained.n_recs, b"", 0)
        return total

    def _ship(self, recs: bytes, n_recs: int, uids: bytes, n_uids: int) -> None:
        # Ids first: a creation's entry carries the id and must not come after its return.
        if n_uids:
            self.outbox.send(Kind.UIDS, {"count": n_uids, "data": uids})
        if n_recs:
            self.outbox.send(Kind.EVENTS, {"count": n_recs, "data": recs})

    def _life(self, recs: bytes, count: int) -> None:
        """Process events are in the same ring as the calls, so that their order is right."""
        kinds = recs[_KIND_AT::_REC_BYTES][:count]
        if not kinds.translate(None, b"\x00\x01\x02\x03"):
            return
        for index, kind in enumerate(kinds):
            if kind in _LIFE_KINDS:
                self.population.event(recs[index * _REC_BYTES : (index + 1) * _REC_BYTES])

    def _read_mappings(self) -> None:
        if self._discovery is None:
            return
        for event in self._discovery.read():
            if isinstance(event, Mapped):
                target = self.population.by_pid(event.pid)
                if target is not None:
                    self._link_mapped(target, event)

    def _link_mapped(self, target: Target, event: Mapped) -> None:
        mapping = Mapping(event.address, event.address + event.length, event.pgoff, event.dev, event.inode, event.path)
        self._linker.link_mapping(target, mapping, event.at_ns, self.population.is_program(target, event.inode))

    def _send_counts(self, target: Target, now: int) -> None:
        self.population.send_counts(target, now)

    def _send_inflight(self, now: int, *, final: bool) -> None:
        rows = self.tables.inflight(0 if final else INFLIGHT_MIN_NS, now, self.population.proc_of_slot)
        if rows or final:
            self.outbox.send(Kind.INFLIGHT, {"at_ns": now, "final": final, "rows": rows})

    def _drain_all(self) -> None:
        """Everything in the rings into the queue, however long it is: what follows relies on it."""
        while self._drain_vital(force=True) or self._drain_bulk(force=True):
            self._wait_for_aggregator()

    def _wait_for_aggregator(self) -> None:
        """At the end, nothing is lost for want of queue space; the target no longer waits for us."""
        deadline = self._clock() + 30_000_000_000
        while not self.outbox.bulk_ok and not self.outbox.broken and self._clock() < deadline:
            self.outbox.flush()
            time.sleep(0.001)

    def finish(self) -> None:
        """Unlink, then send what is left: the counters after the last hit and the calls still in flight."""
        self._read_mappings()
        self.population.unlink_all()
        now = self._clock()
        self._drain_all()
        self.population.bury(self._drain_all)  # who ended while the links were taken away
        for target in self.population.live():
            self._inference.check(target)
            self._send_counts(target, now)
        self._send_inflight(now, final=True)
        self._losses.finish(now)
        self.outbox.send(Kind.COST, self._costs.measure(now))
        self.outbox.send(Kind.TICK, {"at_ns": now})
        self.outbox.send(Kind.BYE, {"at_ns": now, "reason": self.stop_reason or "error"})

    def close(self) -> None:
        """Give every descriptor back; safe to call at any point."""
        with contextlib.suppress(OSError):
            self.population.unlink_all()
        close_all(list(self._tracepoints), [])
        self._tracepoints = []
        self._poller.close()
        if self._discovery is not None:
            self._discovery.close()
            self._discovery = None
        self.tables.close()
        self._loaded.close()

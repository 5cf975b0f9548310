"""The capture loop: one thread, no locks, about a hundred looks a second, four ticks, one look at the slow things.

Order inside a look matters: process events before mapping events (a child must be known before its libraries), and the
counters last, so that they are never older than the records that were sent.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stallscope.capture.carriers import Carriers
from stallscope.capture.commreader import CommReader
from stallscope.capture.costs import Costs
from stallscope.capture.discovery import Discovery, Lost, Mapped
from stallscope.capture.forward import Poller
from stallscope.capture.gaps import Losses
from stallscope.capture.inference import Inference
from stallscope.capture.libmatch import WANTED
from stallscope.capture.linker import Linker
from stallscope.capture.links import RawTracepoint, close_all
from stallscope.capture.loader import Loaded
from stallscope.capture.outbox import Outbox
from stallscope.capture.parser_client import ParserClient
from stallscope.capture.population import Population
from stallscope.capture.procfs import Mapping
from stallscope.capture.reaper import Reaper
from stallscope.capture.returns import Returns
from stallscope.capture.sharing import LINKS_PER_FILE, Sharing
from stallscope.capture.stacks import Stacks
from stallscope.capture.suspicion import EARLY_NS, Suspicion
from stallscope.capture.tables import Tables
from stallscope.capture.target import Target
from stallscope.capture.ways import NO_LIMIT, way_of
from stallscope.wire.frames import Kind

__all__ = ["Session", "Settings"]

POLL_MS = 10
BATCH_RECORDS = 8192
ROUNDS = 16
TICK_PERIOD_NS = 250_000_000
SLOW_PERIOD_NS = 1_000_000_000
INFLIGHT_MIN_NS = 100_000_000
STANDSTILL_NS = 10_000_000_000
_REC_BYTES = 104


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
        kernel_release: decide about return probes as on that kernel (capture/seccomp.py); None = this one's.
        returns: whether returns are probed (capture/returns.py).
    """

    pids: list[int]
    children: bool = True
    one_in: float = 100.0
    long_ns: int = 200_000
    duration_s: float | None = None
    links_per_file: int = LINKS_PER_FILE
    kernel_release: str | None = None
    returns: str = "auto"


class Session:
    """Links, loops, unlinks. Use `start`, then `run`, then `finish`, and always `close`."""

    poller: Poller | None = None

    def __init__(self, settings: Settings, loaded: Loaded, outbox: Outbox, parser: ParserClient, costs: Costs) -> None:
        self.settings = settings
        self.outbox = outbox
        self._loaded = loaded
        self._clock = time.monotonic_ns
        self.tables = Tables(loaded.maps, settings)
        reaper = Reaper()
        returns = Returns(parser, settings.returns, settings.kernel_release)
        sharing = Sharing(
            way_of(loaded),
            self.tables.share,
            reaper.close_later,
            self.tables.spans.set,
            self._clock,
            # Unfiltered return probes would stand in strangers, whose seccomp filters nobody asked for.
            settings.links_per_file if returns.anywhere else NO_LIMIT,
            returns_anywhere=returns.anywhere,
        )
        self._linker = Linker(sharing, parser, self.tables.ranges.set, outbox.send, self._clock, returns)
        self.population = Population(
            self.tables, self._linker, sharing, reaper, outbox.send, self._clock, follow=settings.children
        )
        self._carriers = Carriers(self._linker, self._clock)
        self._inference = Inference(parser, self.tables.rows, outbox.send, self._clock)
        self._losses = Losses(self.tables.ctl.get, outbox.send)
        self._stacks = Stacks(outbox.send, self._clock)
        self._suspicion = Suspicion(self.tables, outbox.send, self._clock, self._stacks)
        self._comms = CommReader(self.tables, parser, outbox.send)
        self._costs = costs
        self._tracepoints: list[RawTracepoint] = []
        self._discovery: Discovery | None = None
        self._next_tick_ns = self._next_slow_ns = self._next_early_ns = 0
        self._told_flying = False
        self._mappings_read_ns = 0
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
        self._discovery = Discovery(wanted=WANTED, whole=lambda pid: self.population.by_pid(pid) is not None)
        self._mappings_read_ns = self._clock()
        # Edge-triggered: only the wakeups that process events force end a pause early. Level-triggered, any record that
        # waits in the ring would, and the loop would spin as long as the target makes calls.
        self._poller.register(self.tables.life.fileno(), select.EPOLLIN | select.EPOLLET)
        self._losses.poll(self._clock())
        self.population.adopt(self.settings.pids)
        self._carriers.rush(self.population.live())
        for target in self.population.live():
            self._inference.search(target)
        self.look()  # what came while the stacks were searched
        self._tick(self._clock(), told=False)
        # Who attaches to a block is answered soon: calls that began before are looked for again at the next tick.
        self._next_tick_ns = self._next_early_ns = self._clock() + EARLY_NS

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
        mark = self.tables.newest() if now >= self._next_tick_ns else None
        self.outbox.flush()
        self._pump()
        # Before the news: a file is asked for a library inside it only when the library had time to come by its name.
        self._carriers.step(self.population.live())
        self._read_mappings()
        self._losses.poll(now)
        self.population.bury()
        if self.poller is not None:
            self.poller.forward(self.outbox, now)
        if mark is not None:
            self._tick(now, told=self.tables.read_up_to(mark))
        if self.outbox.bulk_ok:
            self._suspicion.step()

    def _tick(self, now: int, *, told: bool) -> None:
        """`told`: whether every record made before `now` has been sent: only then may a tick say so."""
        self._next_tick_ns = now + TICK_PERIOD_NS
        is_slow = now >= self._next_slow_ns
        if is_slow:
            self.population.check()
        if not self.outbox.bulk_ok:
            return  # a stalled aggregator: all of this comes again, and the queue must not grow without end
        if is_slow:
            self._slow(now)
        elif self._next_early_ns and now >= self._next_early_ns:
            self._check_inferred()
        self._comms.look(self.population.live(), now)
        flying = self._send_inflight(now, final=False)
        suspected = self._suspicion.on
        self._suspicion.judge(now, flying, self.population.live())
        if self.poller is not None and self._suspicion.on and not suspected:
            self.poller.ask()
        if told:
            self.outbox.send(Kind.TICK, {"at_ns": now})

    def _slow(self, now: int) -> None:
        self._next_slow_ns = now + SLOW_PERIOD_NS
        self._check_inferred()
        for target in self.population.live():
            self._send_counts(target, now)
        self._losses.report(now)
        self.outbox.send(Kind.COST, self._costs.measure(now))

    def _check_inferred(self) -> None:
        self._next_early_ns = 0
        for target in self.population.live():
            self._inference.check(target)

    def _pump(self, *, force: bool = False) -> None:
        """Take what the rings hold, at most ROUNDS batches; with `force` all of it, however full the queue is."""
        rounds = 0
        while (force or rounds < ROUNDS) and self._pump_once(force) and not self.outbox.broken:
            rounds += 1
            if force:
                self._wait_for_aggregator()

    def _pump_once(self, force: bool) -> bool:
        calls = self.tables.vital.drain(BATCH_RECORDS) if force or self.outbox.vital_ok else None
        bulk = self.tables.bulk.drain(BATCH_RECORDS) if force or self.outbox.bulk_ok else None
        # Process events are read after the calls and told before them: whoever made a call had been forked by then.
        life = self.tables.life.drain(BATCH_RECORDS)
        for index in range(life.n_recs):
            self.population.event(bytes(life.recs[index * _REC_BYTES : (index + 1) * _REC_BYTES]))
        if calls is not None:
            self._ship(bytes(calls.recs), calls.n_recs, bytes(calls.uids), calls.n_uids)
        if bulk is not None:
            self._ship(bytes(bulk.recs), bulk.n_recs, b"", 0)
        return any(d is not None and (d.n_recs or d.n_uids) for d in (calls, bulk, life))

    def _ship(self, recs: bytes, n_recs: int, uids: bytes, n_uids: int) -> None:
        # Ids first: a creation's entry carries the id and must not come after its return.
        if n_uids:
            self.outbox.send(Kind.UIDS, {"count": n_uids, "data": uids})
        if n_recs:
            self.outbox.send(Kind.EVENTS, {"count": n_recs, "data": recs})

    def _read_mappings(self) -> None:
        if self._discovery is None:
            return
        since, self._mappings_read_ns = self._mappings_read_ns, self._clock()
        for event in self._discovery.read():
            if isinstance(event, Mapped):
                target = self.population.by_pid(event.pid)
                if target is not None:
                    self._link_mapped(target, event)
            elif isinstance(event, Lost):
                self._look_again(event, since)

    def _look_again(self, event: Lost, since_ns: int) -> None:
        """The kernel had more news of mappings than fitted: look at every process instead."""
        text = f"{event.missing} mapping records were lost; every process was looked at again"
        self.outbox.send(Kind.NOTE, {"at_ns": self._clock(), "proc": None, "text": text})
        for target in self.population.live():
            self._linker.link_process(target, since_ns)  # what is new may be as old as the last read

    def _link_mapped(self, target: Target, event: Mapped) -> None:
        mapping = Mapping(event.address, event.address + event.length, event.pgoff, event.dev, event.inode, event.path)
        self._linker.link_mapping(target, mapping, event.at_ns, self.population.is_program(target, event.inode))

    def _send_counts(self, target: Target, now: int) -> None:
        self.population.send_counts(target, now)

    def _send_inflight(self, now: int, *, final: bool) -> list[Any]:
        rows = self.tables.inflight(0 if final else INFLIGHT_MIN_NS, now, self.population.proc_of_slot)
        if rows or final or self._told_flying:
            self.outbox.send(Kind.INFLIGHT, {"at_ns": now, "final": final, "rows": rows})
        self._told_flying = bool(rows)
        return rows

    def _wait_for_aggregator(self) -> None:
        """At the end nothing is lost for want of queue space, unless the aggregator stands still for long."""
        deadline, left = self._clock() + STANDSTILL_NS, self.outbox.queued_bytes
        while not self.outbox.bulk_ok and not self.outbox.broken:
            self.outbox.flush()
            if self.outbox.queued_bytes < left:
                deadline, left = self._clock() + STANDSTILL_NS, self.outbox.queued_bytes
            if self._clock() > deadline:
                self.outbox.broken = True
            time.sleep(0.001)

    def finish(self) -> None:
        """Unlink, then send what is left: the counters after the last hit and the calls still in flight."""
        self._read_mappings()
        self.population.unlink_all()
        now = self._clock()
        self._pump(force=True)
        self.population.bury()  # who ended while the links were taken away
        for target in self.population.live():
            self._inference.check(target)
            self._linker.tell_silent(target, final=True)
            self._send_counts(target, now)
        self._send_inflight(now, final=True)
        self._losses.finish(now)
        self._tell_oddities(now)
        self.outbox.send(Kind.COST, self._costs.measure(now))
        self.outbox.send(Kind.TICK, {"at_ns": now})
        self.outbox.send(Kind.BYE, {"at_ns": now, "reason": self.stop_reason or "error"})

    def _tell_oddities(self, now: int) -> None:
        """What should never happen; where it did, numbers above may be too small."""
        rings = (self.tables.vital, self.tables.bulk, self.tables.life)
        odd = {
            "times a ring made no sense and was emptied": sum(ring.corrupt for ring in rings),
            "records of unknown size were skipped": sum(ring.skipped for ring in rings),
            "times a thread's calls under way could not be read": self.tables.rows.torn,
        }
        for what, count in odd.items():
            if count:
                self.outbox.send(Kind.NOTE, {"at_ns": now, "proc": None, "text": f"{count} {what}"})

    def close(self) -> None:
        """Give every descriptor back; safe to call at any point."""
        with contextlib.suppress(OSError):
            self.population.unlink_all()
        self._stacks.close()
        close_all(list(self._tracepoints), [])
        self._tracepoints = []
        self._poller.close()
        if self._discovery is not None:
            self._discovery.close()
            self._discovery = None
        self.tables.close()
        self._loaded.close()

"""The rhythm of every capture: one thread, no locks, about a hundred looks a second, four ticks, one slow look.

Order inside a look matters: process events before mapping events (a child must be known before its libraries), and the
counters last, so that they are never older than the records that were sent.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from stallscope.capture.ancestors import Ancestors
from stallscope.capture.commreader import CommReader
from stallscope.capture.contexts import Contexts
from stallscope.capture.costs import Costs
from stallscope.capture.forward import Poller
from stallscope.capture.gaps import Totals
from stallscope.capture.longwaits import LongWaits
from stallscope.capture.outbox import Outbox
from stallscope.capture.parser_client import ParserClient
from stallscope.capture.rings import Thread
from stallscope.capture.shimcomms import ShimComms
from stallscope.capture.shims import Shims
from stallscope.capture.stacks import Stacks
from stallscope.capture.startplaces import StartPlaces
from stallscope.capture.suspicion import EARLY_NS, Suspicion
from stallscope.capture.target import Target
from stallscope.capture.workers import Workers
from stallscope.wire.frames import Kind

__all__ = ["POLL_MS", "Crowd", "Loop"]

POLL_MS = 10
ROUNDS, FORCED_ROUNDS = 16, 4096
TICK_PERIOD_NS = 250_000_000
SLOW_PERIOD_NS = 1_000_000_000
INFLIGHT_MIN_NS = 100_000_000
STANDSTILL_NS = 10_000_000_000


class Crowd(Protocol):
    """The processes of a capture, however they are found.

    Attributes:
        on_image: called for each process that is announced, and when it runs another program.
    """

    ancestors: Ancestors
    on_image: Callable[[Target], None]

    def live(self) -> list[Target]:
        """Those that have not ended."""

    def any_live(self) -> bool:
        """Whether anything is left to trace."""

    def by_pid(self, pid: int) -> Target | None:
        """The live process with this pid."""

    def check(self) -> None:
        """Once a second: who came or went unseen."""

    def bury(self, *, final: bool = False) -> None:
        """Tell the end of those whose last records have been sent; `final`: nothing more comes."""

    def send_counts(self, target: Target, now: int) -> None:
        """Counters of one process that changed since they were last sent."""


class Loop(ABC):
    """What captures have in common; a subclass knows where processes and records come from.

    Attributes:
        poller: asked while a block is suspected.
        stop_reason: why `run` returned.
    """

    poller: Poller | None = None
    population: Crowd

    def __init__(
        self, outbox: Outbox, shims: Shims, parser: ParserClient, costs: Costs, duration_s: float | None
    ) -> None:
        self.outbox, self.shims = outbox, shims
        self.stop_reason: str | None = None
        self._clock = time.monotonic_ns
        self._costs, self._duration_s = costs, duration_s
        self._totals = Totals(outbox.send)
        self._shim_comms = CommReader(ShimComms(shims.comms_made, shims.comms), parser, outbox.send, samples=False)
        self._contexts = Contexts(parser, outbox.send, self._clock)
        self._start_places = StartPlaces(outbox.send, self._clock)
        self._stacks = Stacks(outbox.send, self._clock, parser)
        self._suspicion = Suspicion(self._open_tap, self._callers, outbox.send, self._clock, self._stacks)
        self._long_waits = LongWaits(self._stacks.want)
        self._workers = Workers(outbox.send, self._clock, self._inside)
        self._next_tick_ns = self._next_slow_ns = 0
        self._told_flying = False
        self._flying_sites: list[list[int]] = []

    def _begin_ticking(self) -> None:
        """The first tick; the next one is soon: who attaches to a block is answered soon."""
        self._tick(self._clock(), told=False)
        self._next_tick_ns = self._clock() + EARLY_NS

    def run(self, stopping: Callable[[], bool]) -> None:
        """Loop until `stopping()`, the duration is over, every target has ended, or the aggregator is gone."""
        end_ns = None if self._duration_s is None else self._clock() + int(self._duration_s * 1e9)
        while self.stop_reason is None:
            self._pause()
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

    @abstractmethod
    def _pause(self) -> None:
        """Wait for at most POLL_MS."""

    def look(self) -> None:
        """One look at everything that may have news."""
        now = self._clock()
        is_due = now >= self._next_tick_ns
        if is_due:
            self._mark()
        self.outbox.flush()
        self._pump()
        self._read_news()
        self._poll_losses(now)
        self.population.bury()
        if self.poller is not None:
            self.poller.forward(self.outbox, now)
        if is_due:
            self._tick(now, told=self._is_told())
        if self.outbox.bulk_ok:
            self._suspicion.step()
            self._start_places.step()
            self._workers.step()
        self.outbox.flush()

    @abstractmethod
    def _mark(self) -> None:
        """Remember how far the records reach now."""

    @abstractmethod
    def _is_told(self) -> bool:
        """Whether everything up to the mark has been sent."""

    @abstractmethod
    def _read_news(self) -> None:
        """What else may have changed, after the records."""

    @abstractmethod
    def _poll_losses(self, now: int) -> None:
        """Place what was lost in time."""

    def _tick(self, now: int, *, told: bool) -> None:
        """`told`: whether every record made before `now` has been sent: only then may a tick say so."""
        self._next_tick_ns = now + TICK_PERIOD_NS
        is_slow = now >= self._next_slow_ns
        self.shims.poll_losses(now)
        if is_slow:
            self.population.check()
        if not self.outbox.bulk_ok:
            return  # a stalled aggregator: all of this comes again, and the queue must not grow without end
        self._look_closer(now, slow=is_slow)
        if is_slow:
            self._slow(now)
        self._shim_comms.look(self.population.live(), now)
        self._contexts.look(self._everybody(), now)
        self._workers.find(self.population.live(), now)
        flying = self._send_inflight(now, final=False)
        suspected = self._suspicion.on
        live = self.population.live()
        self._suspicion.judge(now, flying, live)
        self._long_waits.judge(now, flying, live, self._suspicion.idle(), self._suspicion.since_ns)
        if self.poller is not None and self._suspicion.on and not suspected:
            self.poller.ask()
        if told:
            self.outbox.send(Kind.TICK, {"at_ns": now})

    def _inside(self) -> set[tuple[int, int]]:
        return {(proc, tid) for proc, tid, _ in self._flying(self._clock(), final=True)}

    def _watch_images(self) -> None:
        self.population.ancestors.on_image = self._contexts.began
        self.population.on_image = self._image

    def _image(self, target: Target) -> None:
        self._contexts.began(target)
        self._start_places.began(target)

    def _everybody(self) -> list[Target]:
        return [*self.population.ancestors.live(), *self.population.live()]

    def _look_closer(self, now: int, *, slow: bool) -> None:  # noqa: B027
        """What a tick does besides."""

    def _slow(self, now: int) -> None:
        self._next_slow_ns = now + SLOW_PERIOD_NS
        self.shims.calibrate()
        for target in self.population.live():
            self.population.send_counts(target, now)
        self._totals.report(now, self._lost_by())
        self.outbox.send(Kind.COST, self._costs.measure(now))

    @abstractmethod
    def _lost_by(self) -> dict[str, int]:
        """Losses so far, by place."""

    def _open_tap(self, on: bool) -> None:
        self.shims.open_tap(on)

    def _callers(self, target: Target) -> list[Thread]:
        """Threads of a process that made calls."""
        return self.shims.threads(target)

    def _pump(self, *, force: bool = False) -> None:
        """Take what the rings hold, at most ROUNDS batches; with `force` all of it, however full the queue is.

        Even then not for ever: a segment's positions are the target's word.
        """
        rounds, most = 0, FORCED_ROUNDS if force else ROUNDS
        while rounds < most and self._pump_once(force) and not self.outbox.broken:
            rounds += 1
            if force:
                self._wait_for_aggregator()

    @abstractmethod
    def _pump_once(self, force: bool) -> bool:
        """One batch of each ring; whether there was anything."""

    @abstractmethod
    def _flying(self, now: int, *, final: bool) -> list[Any]:
        """Calls in flight as INFLIGHT frames have them."""

    def _send_inflight(self, now: int, *, final: bool) -> list[Any]:
        rows = self._flying(now, final=final)
        if rows or final or self._told_flying:
            sites = {"sites": self._flying_sites} if self._flying_sites else {}
            self.outbox.send(Kind.INFLIGHT, {"at_ns": now, "final": final, "rows": rows, **sites})
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
        """Let go of the targets, then send what is left: the counters after the last hit and the calls in flight."""
        self._let_go()
        now = self._clock()
        self._pump(force=True)
        self.population.bury(final=True)  # who ended while the links were taken away
        self._contexts.finish(self._everybody(), now)
        for target in self.population.live():
            self._last_look(target)
            self.population.send_counts(target, now)
        self._workers.find(self.population.live(), now)
        self._send_inflight(self._clock(), final=True)  # calls that have begun meanwhile are counted, too
        self._close_losses(now)
        self._totals.report(now, self._lost_by())
        self._tell_oddities(now)
        self.outbox.send(Kind.COST, self._costs.measure(now))
        self.outbox.send(Kind.TICK, {"at_ns": now})
        self.outbox.send(Kind.BYE, {"at_ns": now, "reason": self.stop_reason or "error"})

    def _let_go(self) -> None:  # noqa: B027
        """Take probes away."""

    def _last_look(self, target: Target) -> None:  # noqa: B027
        """What is said of a live process at the end."""

    @abstractmethod
    def _close_losses(self, now: int) -> None:
        """Tell what was lost since the last look."""

    def _tell_oddities(self, now: int) -> None:
        """What should never happen; where it did, numbers above may be too small."""
        unseen = {
            "programs were not asked what they waited for": self._start_places.turned_away,
            "processes' threads were not looked at: too many waited at a time": self._stacks.turned_away,
            "workers at a time were not looked at: there are too many": self._workers.crews.turned_away,
        }
        for what, count in (self._oddities() | unseen).items():
            if count:
                self._note(now, f"{count} {what}")

    def _oddities(self) -> dict[str, int]:
        return {}

    def _note(self, now: int, text: str) -> None:
        self.outbox.send(Kind.NOTE, {"at_ns": now, "proc": None, "text": text})

    def close(self) -> None:
        """Give every descriptor back; safe to call at any point."""
        self._stacks.close()
        self.shims.close()
        self.population.ancestors.close()

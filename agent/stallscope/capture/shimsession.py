"""A capture without privileges: processes and records come from the shims in them, and from looking at /proc."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any

from stallscope.capture.costs import Costs
from stallscope.capture.handover import HandOver
from stallscope.capture.injections import Injections
from stallscope.capture.kin import Kin
from stallscope.capture.loop import POLL_MS, Loop
from stallscope.capture.outbox import Outbox
from stallscope.capture.parser_client import ParserClient
from stallscope.capture.shims import Shims

__all__ = ["ShimSession"]

INFLIGHT_MIN_NS = 100_000_000


class ShimSession(Loop):
    """Use `start_command` or `start`, then `run`, then `finish`, and always `close`.

    Args:
        helpers: pids of our own processes.
        handover: where the command's processes hand over their segments, None when they are only looked for.
        follow: whether descendants are traced.
        inject: pids that the library is to be put into; None: it is there.
    """

    def __init__(
        self, outbox: Outbox, shims: Shims, parser: ParserClient, costs: Costs, helpers: Callable[[], set[int]],
        handover: HandOver | None = None, *, duration_s: float | None = None, follow: bool = True,
        inject: list[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(outbox, shims, parser, costs, duration_s, came_late=inject is not None)
        self._injections = Injections(inject, parser, outbox.send, self._clock) if inject is not None else None
        shims.injected = inject is not None
        self.population: Kin = self._population(helpers, follow)
        self._watch_images()
        self._handover = handover
        self._is_command = False
        self._poller = select.epoll()
        if handover is not None:
            self._poller.register(handover.fileno(), select.EPOLLIN)

    def _population(self, helpers: Callable[[], set[int]], follow: bool) -> Kin:
        return Kin(self.shims, self.outbox.send, self._clock, helpers, follow=follow)

    def start(self, pids: list[int], more: list[int]) -> None:
        """Trace running processes; `more`: others of their job. Raises StallscopeError."""
        self.population.adopt(pids, more)
        if self._injections is not None:
            self._injections.put_into(self.population.live())
            self.population.check()
        self._begin()

    def start_command(self, pid: int) -> None:
        """Trace a child of this process, which is a subreaper, and all below it."""
        self._is_command = True
        self.population.adopt_command(pid)
        self._begin()

    def _begin(self) -> None:
        self.shims.calibrate()
        self.look()
        self._begin_ticking()

    def _pause(self) -> None:
        self._poller.poll(POLL_MS / 1000)

    def _mark(self) -> None:
        self.shims.mark()

    def _is_told(self) -> bool:
        return self.shims.is_told()

    def _pump_once(self, force: bool) -> bool:
        # Before the records: a process that has ended by now has handed over what it had.
        came = self._handover.take(self._clock()) if self._handover else []
        for handed in came:
            self.population.take(handed)
        has_more = self.shims.drain() if force or self.outbox.bulk_ok else False
        return has_more or bool(came)

    def _read_news(self) -> None:
        self.population.watch()

    def _poll_losses(self, now: int) -> None:
        """With each tick is often enough for what the shims themselves count."""

    def _lost_by(self) -> dict[str, int]:
        return self.shims.lost_by()

    def _close_losses(self, now: int) -> None:
        self.shims.close_losses(now)

    def _flying(self, now: int, *, final: bool) -> list[Any]:
        return self.shims.inflight(0 if final else INFLIGHT_MIN_NS, now, as_counted=final)

    def _look_closer(self, now: int, *, slow: bool) -> None:
        if slow and self._injections is not None:
            self._injections.beat()

    def _let_go(self) -> None:
        if self._injections is not None:
            self._injections.tell_children(self.population.live(), self.shims.has)
            self._injections.release()
        self._pump(force=True)  # what was handed over and not taken yet, too
        self.population.watch()
        others = len(self.population.live())
        if self._is_command and others:
            are = "process of the command still runs" if others == 1 else "processes of the command still run"
            self._note(self._clock(), f"{others} {are}: what happens there from now on is not recorded")

    def _oddities(self) -> dict[str, int]:
        turned_away = self.population.turned_away
        return {
            "hand-overs of segments made no sense and were refused": self._handover.refused if self._handover else 0,
            "segments of shims were not read": self.shims.refused,
            "processes with a shim got no slot": turned_away["segments"],
            "times a process was not listed: there are too many": turned_away["processes"],
            "processes have ended whose parents alone know how: their exit codes are null": self.population.no_code,
            "processes were ended by a signal whose sender is not known: that takes BPF": self.population.no_sender,
        }

    def close(self) -> None:
        """Give every descriptor back; safe to call at any point. Processes that were traced go on."""
        if self._injections is not None:
            self._injections.close()
        super().close()
        for target in self.population.live():
            target.close()
        self._poller.close()
        if self._handover is not None:
            self._handover.close()

"""Native frames of new call sites: sends SITE_STACK frames, one site after the other, when there is time.

BPF has copied the machine's stack when the site was new (probes/python.h). To unwind it takes 5 to 10 ms: a tenth of a
core is spent on it at most, but for a program's first sites. What is left at the end of the capture, or of its process,
is said to be truncated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from stallscope.capture.natives import Row, Unwinder, truncated
from stallscope.capture.parser_client import ParserClient
from stallscope.capture.sitetable import Machine
from stallscope.wire.frames import Kind

__all__ = ["Unwoven", "Weaver"]

MAX_QUEUE = 256
SHARE = 10  # of the time, one part
CREDIT_NS = 1_000_000_000  # of work at most that may be made up for
LOOK_NS = 10_000_000  # in one look of the loop
LAST_NS = 500_000_000  # at the end of the capture
Send = Callable[[Kind, dict[str, Any]], None]


class Unwoven(NamedTuple):
    """A site that was told without native frames. `entries` and `cut` as in `Site`; `image` is compared by identity:
    another one means that the process runs another program by now."""

    number: int
    proc: int
    pid: int
    frames: list[Row]
    entries: list[int]
    cut: bool
    machine: Machine | None
    image: object


class Weaver:
    """Args:
    image_of: the image that a process runs now, None when it has ended."""

    def __init__(
        self, parser: ParserClient, send: Send, clock: Callable[[], int], image_of: Callable[[int], object]
    ) -> None:
        self._unwinder = Unwinder(parser)
        self._send, self._clock, self._image_of = send, clock, image_of
        self._queue: deque[Unwoven] = deque()
        self._credit_ns, self._credited_ns = CREDIT_NS, clock()

    def offer(self, site: Unwoven) -> None:
        """Queue a site; where there is no room, or nothing to unwind, it is told at once."""
        if site.machine is None or len(self._queue) >= MAX_QUEUE:
            self._tell(site, truncated(site.frames))
        else:
            self._queue.append(site)

    def step(self) -> None:
        """Some sites, if there are and it is time."""
        begin = now = self._clock()
        self._credit_ns = min(CREDIT_NS, self._credit_ns + (now - self._credited_ns) // SHARE)
        self._credited_ns = now
        while self._queue and self._credit_ns > 0 and now - begin < LOOK_NS:
            self._weave(self._queue.popleft())
            spent = self._clock() - now
            self._credit_ns -= spent
            now += spent

    def finish(self) -> None:
        """All that are left."""
        end = self._clock() + LAST_NS
        while self._queue:
            site = self._queue.popleft()
            if self._clock() < end:
                self._weave(site)
            else:
                self._tell(site, truncated(site.frames))

    def _weave(self, site: Unwoven) -> None:
        machine = site.machine
        if machine is None or self._image_of(site.proc) is not site.image:
            self._tell(site, truncated(site.frames))
            return
        back = int.from_bytes(machine.stack[:8], "little")
        woven = self._unwinder.woven(
            site.pid, machine.sp + 8, back - 1, machine.bp, machine.stack[8:], site.frames, site.entries, site.cut
        )
        self._tell(site, woven)

    def _tell(self, site: Unwoven, frames: list[Row]) -> None:
        self._send(Kind.SITE_STACK, {"at_ns": self._clock(), "id": site.number, "frames": frames})

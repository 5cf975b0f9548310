"""Native frames of new call sites: sends SITE_STACK frames, one site after the other, when there is time.

BPF has copied the machine's stack when the site was new (probes/python.h). To unwind it takes 5 to 10 ms: a tenth of a
core is spent on it at most, but for a program's first sites. What is left at the end of the capture is said to be
truncated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from stallscope.capture.natives import Row, Unwinder, truncated
from stallscope.capture.parser_client import ParserClient
from stallscope.capture.scene import Scene
from stallscope.capture.sitetable import Machine
from stallscope.wire.frames import Kind

__all__ = ["Unwoven", "Weaver"]

MAX_QUEUE = 256
SHARE = 10  # of the time, one part
CREDIT_NS = 1_000_000_000  # of work at most that may be made up for
LOOK_NS = 10_000_000  # in one look of the loop
FRESH_NS = 1_000_000_000  # so old may be what is known of a process's mappings
LAST_NS = 500_000_000  # at the end of the capture
Send = Callable[[Kind, dict[str, Any]], None]


class Unwoven(NamedTuple):
    """A site that was told without native frames. `entries` and `cut` as in `Site`."""

    number: int
    proc: int
    frames: list[Row]
    entries: list[int]
    cut: bool


@dataclass
class _Code:
    """The files of a process, open as long as stacks of it wait: it may end meanwhile."""

    scene: Scene
    since_ns: int
    waiting: int = 0


class _Waiting(NamedTuple):
    site: Unwoven
    machine: Machine
    code: _Code


class Weaver:
    """`offer` at once, when a site is new; `step` at every look of the loop."""

    def __init__(self, parser: ParserClient, send: Send, clock: Callable[[], int]) -> None:
        self._unwinder = Unwinder(parser)
        self._send, self._clock = send, clock
        self._queue: deque[_Waiting] = deque()
        self._code: dict[int, _Code] = {}
        self._credit_ns, self._credited_ns = CREDIT_NS, clock()

    def offer(self, site: Unwoven, pid: int, machine: Machine | None) -> None:
        """Queue a site; where there is no room, or nothing to unwind, it is told at once."""
        code = self._code_of(site.proc, pid) if machine is not None and len(self._queue) < MAX_QUEUE else None
        if machine is None or code is None:
            self._tell(site, truncated(site.frames))
            return
        code.scene.relevant(machine.stack, 0)  # opens its files
        code.waiting += 1
        self._queue.append(_Waiting(site, machine, code))

    def _code_of(self, proc: int, pid: int) -> _Code | None:
        known, now = self._code.get(proc), self._clock()
        if known is not None and now - known.since_ns < FRESH_NS:
            return known
        scene = Scene.of(pid, [])
        if scene is None:
            return None
        self._code[proc] = _Code(scene, now)
        if known is not None and not known.waiting:
            known.scene.close()
        return self._code[proc]

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
            waiting = self._queue.popleft()
            if self._clock() < end:
                self._weave(waiting)
            else:
                self._tell(waiting.site, truncated(waiting.site.frames))
                self._done(waiting)

    def _weave(self, waiting: _Waiting) -> None:
        site, machine, code = waiting
        pc = int.from_bytes(machine.stack[:8], "little") - 1
        woven = self._unwinder.woven(
            code.scene, machine.sp + 8, pc, machine.bp, machine.stack[8:], site.frames, site.entries, site.cut
        )
        self._tell(site, woven)
        self._done(waiting)

    def _done(self, waiting: _Waiting) -> None:
        code = waiting.code
        code.waiting -= 1
        if not code.waiting:
            code.scene.close()
            if self._code.get(waiting.site.proc) is code:
                del self._code[waiting.site.proc]

    def _tell(self, site: Unwoven, frames: list[Row]) -> None:
        self._send(Kind.SITE_STACK, {"at_ns": self._clock(), "proc": site.proc, "id": site.number, "frames": frames})

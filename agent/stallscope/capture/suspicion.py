"""The one rule by which capture decides alone: something does not go on, so look at who is where while it lasts.

A block is suspected when a call that may wait has been in flight for over a second, when a call that began before the
attach is still found on its stack, or when a process that used NCCL makes no call at all for over a second. While it
lasts, HOST frames of every process with NCCL are taken at fixed ages of the block, STACK frames of those that are
inside no call, and the completion tap is open. Nothing here judges: that is the aggregator's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from stallscope.capture.hoststate import WrittenFiles, read_threads
from stallscope.capture.procfs import own_tid
from stallscope.capture.rings import Thread
from stallscope.capture.stacks import Stacks, Wanted
from stallscope.capture.tables import LEFT
from stallscope.capture.target import Target
from stallscope.wire.frames import Kind
from stallscope.wire.hook_table import HOOKS

__all__ = ["EARLY_NS", "MAY_WAIT", "Suspicion"]

SUSPECT_NS = 1_000_000_000
EARLY_NS = 200_000_000
INSIDE_NS = 500_000_000
MAY_WAIT = frozenset(
    hook.id for hook in HOOKS if hook.kind in ("wait", "copy", "alloc", "collective", "p2p", "group", "comm")
)
# Ages of a block at which is looked: (ns, whether stacks too). The second look shows how fast files are written.
AGES = ((1_000_000_000, True), (2_000_000_000, False), (4_000_000_000, True))
EARLY_AGES = ((EARLY_NS, True), (1_000_000_000, True), *AGES[1:])
AGAIN_NS = 30_000_000_000
# A call that began later than this after the block's start is no consequence of it, but perhaps of another block.
CASCADE_NS = 5_000_000_000
WAVE_NS = 10_000_000_000
LOOK_BUDGET_NS = 10_000_000
MAX_LOOKED = 128
MAX_STACKS = 8
Send = Callable[[Kind, dict[str, Any]], None]
Flying = list[Any]


class Suspect(NamedTuple):
    """What does not go on: a thread's call, or (tid 0) a process as a whole."""

    proc: int
    tid: int
    since_ns: int


class _Plan:
    """When to look, counted from the start of a block."""

    def __init__(self, since_ns: int, now: int, *, early: bool) -> None:
        self.since_ns = since_ns
        self.begun_ns = now
        self._ages = deque(EARLY_AGES if early else AGES)
        self._next: tuple[int, bool] = self._take()

    def _take(self) -> tuple[int, bool]:
        if self._ages:
            return self._ages.popleft()
        return self._next[0] + AGAIN_NS, False

    def due(self, now: int) -> bool | None:
        """Whether to take stacks too, None while no look is due. What was missed is made up by one look."""
        stacks: bool | None = None
        while now - self.since_ns >= self._next[0]:
            stacks = bool(stacks) or self._next[1]
            self._next = self._take()
        return stacks


class Suspicion:
    """`judge` at every tick, `step` at every look of the loop.

    Args:
        open_tap: records every call that tells of completion, or as many as of others again.
        callers: threads of a process that made calls.

    Attributes:
        on: whether a block is suspected now.
    """

    def __init__(
        self, open_tap: Callable[[bool], None], callers: Callable[[Target], list[Thread]], send: Send,
        clock: Callable[[], int], stacks: Stacks,
    ) -> None:  # fmt: skip
        self._open_tap, self._callers = open_tap, callers
        self._send, self._clock, self._stacks = send, clock, stacks
        self._plan: _Plan | None = None
        self._known: set[Suspect] = set()
        self._inside: set[int] = set()
        self._targets: list[Target] = []
        self._todo: deque[Target] = deque()
        self._outside: list[Target] = []
        self._written: dict[int, WrittenFiles] = {}

    @property
    def on(self) -> bool:
        return self._plan is not None

    @property
    def since_ns(self) -> int | None:
        """When the block began; None while there is none."""
        return self._plan.since_ns if self._plan else None

    def idle(self) -> list[Target]:
        """Processes with NCCL that are inside no call: who is waited for is among them."""
        return [target for target in self._targets if target.proc not in self._inside][:MAX_STACKS]

    def judge(self, now: int, flying: list[Flying], targets: list[Target]) -> None:
        """`flying`: rows as INFLIGHT frames have them."""
        self._targets = [target for target in targets if _has_nccl(target)]
        suspects = self._suspects(now, flying, targets)
        fresh = {s.since_ns for s in suspects - self._known}
        self._known = suspects
        if not suspects:
            self._end(now)
        elif self._plan is None:
            since = min(s.since_ns for s in suspects)
            early = all(now - s.since_ns < SUSPECT_NS for s in suspects)
            self._begin(now, since, early)
        elif fresh and min(fresh) - self._plan.since_ns > CASCADE_NS and now - self._plan.begun_ns >= WAVE_NS:
            # Something waits for ever: another block counts all the same.
            self._plan = _Plan(min(fresh), now, early=False)

    def _suspects(self, now: int, flying: list[Flying], targets: list[Target]) -> set[Suspect]:
        found, self._inside = set(), set()
        for proc, tid, frames in flying:
            since = next((f[1] for f in frames if f[0] in MAY_WAIT and not f[3] & LEFT), now)
            if now - since >= INSIDE_NS:
                self._inside.add(proc)
            if now - since >= SUSPECT_NS:
                found.add(Suspect(proc, tid, since))
        for target in targets:
            calls = [call for call in target.inferred if call.hook in MAY_WAIT]
            self._inside |= {target.proc for _ in calls}
            found |= {Suspect(target.proc, call.tid, call.since_ns) for call in calls
                      if now - call.since_ns >= EARLY_NS}  # fmt: skip
            if target.used_nccl and now - target.counted_ns > SUSPECT_NS:
                found.add(Suspect(target.proc, 0, target.counted_ns))
        return found

    def _begin(self, now: int, since_ns: int, early: bool) -> None:
        self._plan = _Plan(since_ns, now, early=early)
        self._open_tap(True)
        self._send(Kind.SUSPECT, {"at_ns": now, "since_ns": since_ns, "on": True})

    def _end(self, now: int) -> None:
        if self._plan is None:
            return
        self._open_tap(False)
        self._send(Kind.SUSPECT, {"at_ns": now, "since_ns": self._plan.since_ns, "on": False})
        self._plan = None
        self._stacks.forget()
        self._look_at(stacks=False)

    def _look_at(self, *, stacks: bool) -> None:
        """Queue a look at everybody, those outside every call first: the one who is waited for is among them."""
        everybody = sorted(self._targets[:MAX_LOOKED], key=lambda target: target.proc in self._inside)
        self._todo = deque(everybody)
        self._outside = [t for t in everybody if t.proc not in self._inside][:MAX_STACKS] if stacks else []
        there = {target.proc for target in everybody}
        self._written = {proc: files for proc, files in self._written.items() if proc in there}

    def step(self) -> None:
        """Go on with a look, for at most 10 ms."""
        now = self._clock()
        if self._plan is not None and not self._todo and (stacks := self._plan.due(now)) is not None:
            self._look_at(stacks=stacks)
        while self._todo and self._clock() - now < LOOK_BUDGET_NS:
            target = self._todo.popleft()
            if not target.ended:
                self._look(target)
        self._stacks.step()

    def _look(self, target: Target) -> None:
        rows = sorted(self._callers(target), key=lambda row: -row.calls)
        threads = read_threads(target.pid, [row.tid for row in rows])
        alive = next((thread.tid for thread in threads if thread.state not in "ZX"), None)
        if alive is None:
            return
        files = self._written.setdefault(target.proc, WrittenFiles())
        written = files.advance(target.pid, alive)
        self._send(
            Kind.HOST,
            {"at_ns": self._clock(), "proc": target.proc, "calls": sum(row.calls for row in rows),
             "threads": [list(thread) for thread in threads], "writing": list(written) if written else None},
        )  # fmt: skip
        if target in self._outside:
            tids = dict.fromkeys([target.pid, *[row.tid for row in rows[:1]]])
            self._stacks.want(Wanted(target.proc, target.pid, {tid: own_tid(target.pid, tid) for tid in tids}))


def _has_nccl(target: Target) -> bool:
    """Of a process with the shim a library is known from its first call on: it may be on its way to NCCL."""
    known = [library.library for library in target.linked.values()]
    return "NCCL" in known or (target.preloaded and bool(known))

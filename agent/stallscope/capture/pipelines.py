"""Where a main thread waits that makes no call of CUDA while native threads feed the device: 50 looks a second.

DALI's shape: Python asks a pipeline for its next batch and sleeps on a condition variable, threads in C++ copy and
launch. No probe sees that wait. A look that finds the main thread in futex(2) without a time limit stands for the time
since the look before; a wait for the GIL has a limit. What it waits for is not looked at: another thread may wake it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stallscope.capture.pycode import CodeReader, PyFrame
from stallscope.capture.pyconfig import Python
from stallscope.capture.pystack import UNSTEADY, NotThere, frames_now
from stallscope.capture.target import Target
from stallscope.capture.whereabouts import is_in_futex, turns_of
from stallscope.wire.frames import Kind

__all__ = ["Pipelines"]

EVERY_NS, MOST_NS = 20_000_000, 500_000_000
MAX_TARGETS, MAX_STACKS, MAX_FRAMES = 4, 32, 32
Send = Callable[[Kind, dict[str, Any]], None]
Stack = tuple[PyFrame, ...]


class _Seen:
    """Sums over the looks at one process; `here` is the stack of the wait under way, since `began_ns`.

    `turns`: how often the thread had been given a CPU: another number is another wait, also from the same line.
    """

    def __init__(self) -> None:
        self.last_ns = self.began_ns = self.turns = 0
        self.looks = self.watched_ns = 0
        self.here: Stack = ()
        self.sums: dict[Stack, list[int]] = {}
        self.frames: dict[Stack, list[Any]] = {}

    def elapsed(self, now: int) -> int:
        """Time that this look stands for, ns; 0 where nobody knows what was meanwhile."""
        passed, self.last_ns = now - self.last_ns, now
        self.looks += 1
        if passed > MOST_NS:
            return 0
        self.watched_ns += passed
        return passed

    def move(self, stack: Stack, turns: int, passed: int, now: int) -> None:
        """A wait begins or ends at any time between two looks."""
        is_same, self.turns = stack == self.here and turns == self.turns, turns
        if self.here and not is_same:
            self.sums[self.here][0] += passed // 2
        if not stack or (stack not in self.sums and len(self.sums) >= MAX_STACKS):
            self.here = ()
            return
        row = self.sums.setdefault(stack, [0, 0, 0])
        if not is_same:
            self.began_ns = now
            row[1] += 1
            passed //= 2
        row[0] += passed
        row[2] = max(row[2], now - self.began_ns)
        self.here = stack


class Pipelines:
    """`find` once a second, `step` at every look of the loop.

    Args:
        reader_of: how to read the Python stacks of a process, None where nobody can.
        is_fed: whether threads that are none of Python's have given the device work in a process.
        is_inside: whether a thread is inside a hooked call now.
    """

    def __init__(
        self, send: Send, clock: Callable[[], int], reader_of: Callable[[int], tuple[Python, CodeReader] | None],
        is_fed: Callable[[int], bool], is_inside: Callable[[int, int], bool],
    ) -> None:  # fmt: skip
        self._send, self._clock, self._reader_of = send, clock, reader_of
        self._is_fed, self._is_inside = is_fed, is_inside
        self._watched: list[Target] = []
        self._seen: dict[int, _Seen] = {}
        self._next_ns = 0

    def find(self, targets: list[Target], now: int) -> None:
        """Whom to look at, and tell what was seen."""
        self._tell(now)
        live = {target.proc for target in targets}
        self._seen = {proc: seen for proc, seen in self._seen.items() if proc in live}
        self._watched = [t for t in targets if self._reader_of(t.proc) and self._is_fed(t.proc)][:MAX_TARGETS]

    def step(self) -> None:
        """Look at those that are due."""
        now = self._clock()
        if now < self._next_ns or not self._watched:
            return
        self._next_ns = now + EVERY_NS
        for target in self._watched:
            seen = self._seen.setdefault(target.proc, _Seen())
            turns = turns_of(target.pid)
            seen.move(self._stack(target, seen), turns, seen.elapsed(now), now)

    def _stack(self, target: Target, seen: _Seen) -> Stack:
        """Of the main thread, where it waits; nothing where it does not."""
        reading = self._reader_of(target.proc)
        if reading is None or not is_in_futex(target.pid) or self._is_inside(target.pid, target.pid):
            return ()
        python, reader = reading
        try:
            stack = tuple(frames_now(target.pid, python, reader, target.facts.ns_pid or target.pid).frames[:MAX_FRAMES])
        except NotThere:
            return ()
        if UNSTEADY in stack or not is_in_futex(target.pid):
            return ()
        if stack not in seen.frames and len(seen.frames) < MAX_STACKS:
            places = reader.places(stack)
            seen.frames[stack] = [
                [p.file, p.line, p.function, "python"] if p else [None, None, "?", "python"] for p in places
            ]
        return stack if stack in seen.frames else ()

    def _tell(self, now: int) -> None:
        for target in self._watched:
            seen = self._seen.get(target.proc)
            if seen is not None and seen.sums:
                rows = [[seen.frames[stack], *numbers] for stack, numbers in seen.sums.items()]
                body = {
                    "at_ns": now,
                    "proc": target.proc,
                    "looks": seen.looks,
                    "watched_ns": seen.watched_ns,
                    "rows": rows,
                }
                self._send(Kind.PIPELINE, body)

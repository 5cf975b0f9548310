"""Python stacks of processes that may hold up the others, read from their memory; nobody is stopped.

One process a look of the loop. What a stack shows is checked: a frame whose code can't be told is "?", and a stack
that can't is a STACK frame with the reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from stallscope.capture.blocked import read_blocked
from stallscope.capture.natives import Row, Unwinder, entries_by_version, truncated
from stallscope.capture.parser_client import ParserClient
from stallscope.capture.pycode import CodeReader, Place, PyFrame
from stallscope.capture.pyconfig import Python, PythonFinder, Unknown
from stallscope.capture.pystack import MAX_FRAMES, NotThere, frames_now
from stallscope.capture.scene import Scene
from stallscope.wire.frames import Kind

__all__ = ["BY", "Stacks", "Wanted"]

MAX_QUEUE = 16
BY = "memory"
NO_PYTHON = "there is no Python in the process, or its memory can't be read"
NOT_RUNNING = "its Python has not begun to run"
Send = Callable[[Kind, dict[str, Any]], None]


class Wanted(NamedTuple):
    """A process to look at, and which of its threads: {tid: tid in its own pid namespace}, the main one first."""

    proc: int
    pid: int
    tids: dict[int, int]


class Stacks:
    """Takes stacks one process after the other and sends STACK frames, with the reason where there is none."""

    def __init__(self, send: Send, clock: Callable[[], int], parser: ParserClient) -> None:
        self._send, self._clock, self._parser = send, clock, parser
        self._finder = PythonFinder(parser)
        self._unwinder = Unwinder(parser)
        self._queue: deque[Wanted] = deque()

    def want(self, wanted: Wanted) -> None:
        """Queue a process; one that waits already is not queued twice."""
        if len(self._queue) < MAX_QUEUE and wanted not in self._queue:
            self._queue.append(wanted)

    def forget(self) -> None:
        """The block is over: what has not been looked at is not wanted any more."""
        self._queue.clear()

    def step(self) -> None:
        """Look at one process: a few ms, where its files are new to the parser some more."""
        if self._queue:
            self._take(self._queue.popleft())

    def _take(self, wanted: Wanted) -> None:
        found = self._finder.find(wanted.pid)
        if not isinstance(found, Python):
            why = found.why if isinstance(found, Unknown) else NO_PYTHON if found is None else NOT_RUNNING
            self._tell(wanted.proc, next(iter(wanted.tids)), [], why)
            return
        reader = CodeReader(wanted.pid, found, self._parser)
        for is_main, (tid, own) in zip((True, *[False] * len(wanted.tids)), wanted.tids.items(), strict=False):
            try:
                frames = self._stack_of(wanted.pid, reader, tid, own)
            except NotThere as problem:
                if is_main:  # other threads that call CUDA need not be Python's
                    self._tell(wanted.proc, tid, [], str(problem))
            else:
                self._tell(wanted.proc, tid, frames, None)

    def _stack_of(self, pid: int, reader: CodeReader, tid: int, own: int) -> list[Row]:
        """Python frames with native ones, if the thread does not move meanwhile. Raises NotThere."""
        machine = read_blocked(pid, tid)
        now = frames_now(pid, reader.python, reader, own)
        rows = _named(reader, now.frames)
        scene = Scene.of(pid, []) if machine is not None and machine == read_blocked(pid, tid) else None
        if machine is None or scene is None or now.entries is None:
            return truncated(rows)
        sp, pc, stack = machine
        entries = entries_by_version(reader.python, len(rows), now.entries)
        try:
            return self._unwinder.woven(scene, sp, pc, None, stack, rows, entries, len(rows) >= MAX_FRAMES)
        finally:
            scene.close()

    def _tell(self, proc: int, tid: int, frames: list[Row], why: str | None) -> None:
        body = {"at_ns": self._clock(), "proc": proc, "tid": tid, "by": BY, "frames": frames,
                "why": why}  # fmt: skip
        self._send(Kind.STACK, body)

    def close(self) -> None:
        """Nothing more is wanted."""
        self._queue.clear()


def _named(reader: CodeReader, frames: list[PyFrame]) -> list[Row]:
    """As STACK frames want them."""
    places: list[Place | None] = []
    for begin in range(0, len(frames), 32):  # so many line tables go to the parser at once
        places += reader.places(frames[begin : begin + 32])
    return [[p.file, p.line, p.function, "python"] if p else [None, None, "?", "python"] for p in places]

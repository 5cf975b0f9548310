"""Python stacks of processes that wait or may hold up others, read from their memory; nobody is stopped.

A few ms of a look of the loop. What a stack shows is checked: a frame whose code can't be told is "?", and a stack
that can't is a STACK frame with the reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from stallscope.capture.blocked import read_blocked
from stallscope.capture.natives import Row, Unwinder, entries_by_version, truncated
from stallscope.capture.parser_client import ParserClient
from stallscope.capture.procfs import own_tid, thread_name, threads_of
from stallscope.capture.pycode import CodeReader, Place, PyFrame
from stallscope.capture.pyconfig import Python, PythonFinder, Unknown
from stallscope.capture.pystack import MAX_FRAMES, NotThere, Now, frames_now, frames_of, states_now
from stallscope.capture.scene import Scene
from stallscope.wire.frames import Kind

__all__ = ["BY", "MAX_THREADS", "Everybody", "Stacks", "Wanted"]

MAX_QUEUE = 16
STEP_NS = 3_000_000
MAX_TASKS, MAX_THREADS, ROUND_FRAMES, MAX_WOVEN = 1024, 64, 32, 8
BY = "memory"
NO_PYTHON = "there is no Python in the process, or its memory can't be read"
NOT_RUNNING = "its Python has not begun to run"
Send = Callable[[Kind, dict[str, Any]], None]


class Wanted(NamedTuple):
    """A process to look at, and which of its threads: {tid: tid in its own pid namespace}, the main one first."""

    proc: int
    pid: int
    tids: dict[int, int]


class Everybody(NamedTuple):
    """A process whose Python threads all are looked at, first those that wait (`waits`), the longest since then."""

    proc: int
    pid: int
    waits: tuple[int, ...]
    since_ns: int


class Stacks:
    """Takes stacks one process after the other and sends STACK frames, with the reason where there is none.

    Attributes:
        turned_away: processes that were not looked at, because there were too many at a time.
    """

    def __init__(self, send: Send, clock: Callable[[], int], parser: ParserClient) -> None:
        self._send, self._clock, self._parser = send, clock, parser
        self._finder = PythonFinder(parser)
        self._unwinder = Unwinder(parser)
        self._queue: deque[Wanted | Everybody] = deque()
        self._work: Iterator[None] = iter(())
        self.turned_away = 0

    def want(self, wanted: Wanted | Everybody) -> None:
        """Queue a process; one that waits already is not queued twice."""
        if wanted in self._queue:
            return
        if len(self._queue) < MAX_QUEUE:
            self._queue.append(wanted)
        else:
            self.turned_away += 1

    def forget(self) -> None:
        """The block is over: whom it made suspicious is not wanted any more."""
        self._queue = deque(wanted for wanted in self._queue if isinstance(wanted, Everybody))

    def step(self) -> None:
        """Go on for a few ms; where a file is new to the parser, some more."""
        begin = self._clock()
        while self._clock() - begin < STEP_NS:
            if next(self._work, self) is self:  # that process is done
                if not self._queue:
                    return
                wanted = self._queue.popleft()
                self._work = self._take(wanted) if isinstance(wanted, Wanted) else self._take_all(wanted)

    def _python(self, proc: int, pid: int, tid: int) -> Python | None:
        found = self._finder.find(pid)
        if isinstance(found, Python):
            return found
        why = found.why if isinstance(found, Unknown) else NO_PYTHON if found is None else NOT_RUNNING
        self._tell(proc, tid, [], why)
        return None

    def _take(self, wanted: Wanted) -> Iterator[None]:
        found = self._python(wanted.proc, wanted.pid, next(iter(wanted.tids)))
        if found is None:
            return
        reader = CodeReader(wanted.pid, found, self._parser)
        for is_main, (tid, own) in zip((True, *[False] * len(wanted.tids)), wanted.tids.items(), strict=False):
            try:
                look = partial(frames_now, wanted.pid, found, reader, own)
                frames = self._stack_of(wanted.pid, reader, tid, look, MAX_FRAMES)
            except NotThere as problem:
                if is_main:  # other threads that call CUDA need not be Python's
                    self._tell(wanted.proc, tid, [], str(problem))
            else:
                self._tell(wanted.proc, tid, frames, None)
            yield

    def _take_all(self, wanted: Everybody) -> Iterator[None]:
        """A round: main thread and those that wait first. Threads that are none of Python's are not told."""
        pid, began_ns = wanted.pid, self._clock()
        found = self._python(wanted.proc, pid, pid)
        if found is None:
            return
        reader, states = CodeReader(pid, found, self._parser), states_now(pid, found)
        left, left_out = MAX_THREADS, max(0, len(states) - MAX_THREADS)
        for tid in list(dict.fromkeys((*wanted.waits, pid, *threads_of(pid)[:MAX_TASKS]))):
            state = states.get(own_tid(pid, tid))
            if state is None:
                continue
            if not left:
                break
            left -= 1
            try:
                frames, why = self._in_round(wanted, reader, tid, state), None
            except NotThere as problem:
                frames, why = [], str(problem)
            waits = tid in wanted.waits
            more = {"round_ns": began_ns, "since_ns": wanted.since_ns, "waits": waits, "left_out": left_out}
            self._tell(wanted.proc, tid, frames, why, name=thread_name(pid, tid), **more)
            yield

    def _in_round(self, wanted: Everybody, reader: CodeReader, tid: int, state: int) -> list[Row]:
        """With native frames where it waits in CUDA: to unwind all threads would take seconds. Raises NotThere."""
        look = partial(frames_of, wanted.pid, reader.python, reader, state)
        if tid in wanted.waits[:MAX_WOVEN]:
            return self._stack_of(wanted.pid, reader, tid, look, ROUND_FRAMES)
        return _named(reader, look().frames[:ROUND_FRAMES])

    def _stack_of(self, pid: int, reader: CodeReader, tid: int, look: Callable[[], Now], most: int) -> list[Row]:
        """Python frames with native ones, if the thread does not move meanwhile. Raises NotThere.

        Args:
            look: takes the Python stack.
            most: Python frames that are told.
        """
        machine = read_blocked(pid, tid)
        now = look()
        rows = _named(reader, now.frames[:most])
        scene = Scene.of(pid, []) if machine is not None and machine == read_blocked(pid, tid) else None
        if machine is None or scene is None or now.entries is None:
            return truncated(rows)
        sp, pc, stack = machine
        entries = entries_by_version(reader.python, len(rows), now.entries)
        try:
            return self._unwinder.woven(scene, sp, pc, None, stack, rows, entries, len(rows) >= most)
        finally:
            scene.close()

    def _tell(self, proc: int, tid: int, frames: list[Row], why: str | None, **more: Any) -> None:
        body = {"at_ns": self._clock(), "proc": proc, "tid": tid, "by": BY, "frames": frames,
                "why": why, **more}  # fmt: skip
        self._send(Kind.STACK, body)

    def close(self) -> None:
        """Nothing more is wanted."""
        self._queue.clear()
        self._work = iter(())


def _named(reader: CodeReader, frames: list[PyFrame]) -> list[Row]:
    """As STACK frames want them."""
    places: list[Place | None] = []
    for begin in range(0, len(frames), 32):  # so many line tables go to the parser at once
        places += reader.places(frames[begin : begin + 32])
    return [[p.file, p.line, p.function, "python"] if p else [None, None, "?", "python"] for p in places]

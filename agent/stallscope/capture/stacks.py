"""Python stacks of processes that may hold up the others, taken by py-spy beside the capture loop.

py-spy copies the target's memory and never stops it (--nonblocking), so a stack may be torn. Its output is made from
the target's memory: bounded, and checked field by field. One child at a time, looked at from the loop, never waited
for.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from stallscope.capture.procfs import clean
from stallscope.wire.frames import Kind
from stallscope.wire.privdrop import PrivilegeDropError, keep_capabilities

__all__ = ["BadDump", "PythonThread", "Stacks", "parse_dump"]

TIMEOUT_NS = 2_000_000_000
MAX_BYTES = 1 << 20
MAX_STDERR = 4096
MAX_QUEUE = 16
MAX_THREADS = 4096
MAX_FRAMES = 128
MAX_TEXT = 512
MAX_STUCK = 2
BY = "py-spy"
CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE = 2, 19
Frame = tuple[str | None, int | None, str, str]
Send = Callable[[Kind, dict[str, Any]], None]


class BadDump(ValueError):
    """Output that is no dump."""


class PythonThread(NamedTuple):
    """One thread of a dump: `tid` as its own pid namespace numbers it, frames innermost first."""

    tid: int | None
    name: str | None
    frames: list[Frame]


class Wanted(NamedTuple):
    """A process to look at, and which of its threads: {tid: tid in its own pid namespace}, the main one first."""

    proc: int
    pid: int
    tids: dict[int, int]


def parse_dump(data: bytes) -> list[PythonThread]:
    """The threads of `py-spy dump --json`. Raises BadDump."""
    try:
        threads = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadDump(f"no JSON ({error})"[:MAX_TEXT]) from error
    if not isinstance(threads, list) or len(threads) > MAX_THREADS or not all(isinstance(t, dict) for t in threads):
        raise BadDump("no list of threads")
    return [_parse_thread(thread) for thread in threads]


def _parse_thread(thread: dict[str, Any]) -> PythonThread:
    frames = thread.get("frames")
    if not isinstance(frames, list):
        raise BadDump("a thread without frames")
    tid = thread.get("os_thread_id")
    parsed = [_parse_frame(frame) for frame in frames[:MAX_FRAMES]]
    return PythonThread(tid if type(tid) is int else None, _text(thread.get("thread_name")), parsed)


def _parse_frame(frame: Any) -> Frame:
    function = _text(frame.get("name")) if isinstance(frame, dict) else None
    if function is None:
        raise BadDump("a frame without a function")
    line = frame.get("line")
    known = type(line) is int and 0 < line < 1 << 31  # 0: py-spy could not read it
    return _text(frame.get("filename")), line if known else None, function, "python"


def _text(value: Any) -> str | None:
    return clean(value[:MAX_TEXT])[:MAX_TEXT] if isinstance(value, str) else None


class _Child:
    """One run of py-spy."""

    def __init__(self, program: Path, wanted: Wanted, now: int) -> None:
        self.wanted, self.deadline_ns = wanted, now + TIMEOUT_NS
        self.out, self.err = bytearray(), bytearray()
        self.process = subprocess.Popen(
            [str(program), "dump", "--nonblocking", "--json", "--pid", str(wanted.pid)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/", env={},
            preexec_fn=_confine,
        )  # fmt: skip
        for pipe in self._pipes():
            os.set_blocking(pipe, False)

    def _pipes(self) -> tuple[int, int]:
        assert self.process.stdout and self.process.stderr
        return self.process.stdout.fileno(), self.process.stderr.fileno()

    def read(self) -> None:
        """Take what has come; what is beyond the limits is thrown away."""
        for fd, buffer, limit in zip(self._pipes(), (self.out, self.err), (MAX_BYTES, MAX_STDERR), strict=True):
            with contextlib.suppress(BlockingIOError):
                while piece := os.read(fd, 65536):
                    buffer += piece[: limit + 1 - len(buffer)]

    def problem(self, code: int) -> str | None:
        """Why there is no dump."""
        if code:
            said = self.err.decode("utf-8", "replace").strip().splitlines()
            return f"{BY}: {clean(said[0][:MAX_TEXT]) if said else f'ended with code {code}'}"
        return f"{BY}: more than {MAX_BYTES} bytes" if len(self.out) > MAX_BYTES else None

    def close(self) -> None:
        """Its pipes; the process is ended by who owns it."""
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def _confine() -> None:
    """In the child: only what reading another process takes, and no hurry."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    with contextlib.suppress(PrivilegeDropError):  # without rights it fails by itself, and says why
        keep_capabilities((CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE))


class Stacks:
    """Takes stacks one process after the other and sends STACK frames, with the reason where there is none."""

    def __init__(self, send: Send, clock: Callable[[], int], program: Path | None = None) -> None:
        self._send, self._clock = send, clock
        self._program = program or Path(sys.prefix) / "bin" / BY
        self._queue: deque[Wanted] = deque()
        self._child: _Child | None = None
        self._stuck: list[_Child] = []

    def pids(self) -> set[int]:
        """Of children that run now."""
        children = [*self._stuck, *([self._child] if self._child else [])]
        return {child.process.pid for child in children}

    def want(self, wanted: Wanted) -> None:
        """Queue a process; one that waits already is not queued twice."""
        if len(self._queue) < MAX_QUEUE and wanted not in self._queue:
            self._queue.append(wanted)

    def forget(self) -> None:
        """The block is over: what has not begun is not wanted any more."""
        self._queue.clear()

    def step(self) -> None:
        """Look at the child, or start the next one. Takes a few ms at most."""
        if self._child is not None:
            self._look(self._child)
        elif self._queue:
            self._start(self._queue.popleft())

    def _start(self, wanted: Wanted) -> None:
        self._stuck = [child for child in self._stuck if child.process.poll() is None]
        if len(self._stuck) >= MAX_STUCK:
            self._tell_nothing(wanted, f"{BY} hangs")
            return
        if not self._program.is_file():
            self._tell_nothing(wanted, f"{BY} is not installed ({self._program})")
            return
        try:
            self._child = _Child(self._program, wanted, self._clock())
        except (OSError, subprocess.SubprocessError) as error:
            self._tell_nothing(wanted, f"{BY} can't be started: {error}")

    def _look(self, child: _Child) -> None:
        code = child.process.poll()
        child.read()
        if code is None and self._clock() < child.deadline_ns:
            return
        if code is None:
            child.process.kill()
            why: str | None = f"{BY} took more than {TIMEOUT_NS / 1e9:g} s"
            self._stuck.append(child)
        else:
            why = child.problem(code)
        child.close()
        self._child = None
        if why is None:
            self._tell(child)
        else:
            self._tell_nothing(child.wanted, why)

    def _tell(self, child: _Child) -> None:
        try:
            threads = parse_dump(bytes(child.out))
        except BadDump as error:
            self._tell_nothing(child.wanted, f"{BY}: {error}")
            return
        main = next(iter(child.wanted.tids))
        for tid, own in child.wanted.tids.items():
            found = next((t for t in threads if t.tid in (own, tid)), None)
            if found is None and tid == main:
                found = next((t for t in threads if t.name == "MainThread"), None)
            frames = found.frames if found else []
            why = None if frames else f"{BY} shows no frames of this thread"
            if frames or tid == main:  # other threads that call CUDA need not be Python's
                self._send_stack(child.wanted.proc, tid, frames, why)

    def _tell_nothing(self, wanted: Wanted, why: str) -> None:
        self._send_stack(wanted.proc, next(iter(wanted.tids)), [], why)

    def _send_stack(self, proc: int, tid: int, frames: list[Frame], why: str | None) -> None:
        body = {"at_ns": self._clock(), "proc": proc, "tid": tid, "by": BY, "frames": [list(f) for f in frames],
                "why": why}  # fmt: skip
        self._send(Kind.STACK, body)

    def close(self) -> None:
        """End a child that still runs."""
        self._queue.clear()
        child, self._child = self._child, None
        if child is not None:
            child.process.kill()
            child.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(0.2)

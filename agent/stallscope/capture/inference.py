"""Calls that were already under way when the probes came: found on the threads' stacks.

A return probe placed now never fires for a call that entered before; its entry was not seen either. Without this a job
that hangs would show nothing to somebody who attaches to the hang.
"""

from __future__ import annotations

import bisect
import os
import struct
from collections.abc import Callable
from typing import Any

from stallscope.capture.blocked import read_blocked, read_memory
from stallscope.capture.linker import open_mapping
from stallscope.capture.parser_client import ParserClient, ParserFailed
from stallscope.capture.procfs import Mapping, executable_mappings, threads_of
from stallscope.capture.rings import Rows
from stallscope.capture.spinning import sample_running
from stallscope.capture.target import InferredCall, Target
from stallscope.wire.frames import Kind

__all__ = ["Inference"]

MAX_THREADS = 512
MAX_FILES = 32
Send = Callable[[Kind, dict[str, Any]], None]
SEARCH_BUDGET_NS = 1_000_000_000  # of one process: the attach waits meanwhile, and nothing is drained


class Inference:
    """Finds such calls once, after the links of a process are in place, and watches until each has ended."""

    def __init__(self, parser: ParserClient, rows: Rows, send: Send, clock: Callable[[], int]) -> None:
        self._parser = parser
        self._rows = rows
        self._send = send
        self._clock = clock

    def search(self, target: Target) -> None:
        """Look at every thread of the process. Costs some ms a blocked thread, and some 10 ms a spinning one."""
        if not target.linked:
            return
        scene = _Scene.of(target)
        if scene is None:
            return
        end_ns = self._clock() + SEARCH_BUDGET_NS
        threads = threads_of(target.pid)
        try:
            running = self._blocked_ones(target, scene, threads[:MAX_THREADS], end_ns)
            skipped = max(len(threads) - MAX_THREADS, 0) + self._spinning(target, scene, running, end_ns)
        except OSError as error:
            self._note(target, f"running threads were not searched for calls that began before the attach: {error}")
            return
        finally:
            scene.close()
        if skipped:
            self._note(target, f"{skipped} threads were not searched for calls that began before the attach")

    def _note(self, target: Target, text: str) -> None:
        self._send(Kind.NOTE, {"at_ns": self._clock(), "proc": target.proc, "text": text})

    def _blocked_ones(self, target: Target, scene: _Scene, tids: list[int], end_ns: int) -> list[int]:
        """Search them; the threads that run, and those that the budget of time did not reach."""
        running: list[int] = []
        for index, tid in enumerate(tids):
            if self._clock() > end_ns:
                return running + tids[index:]
            if not self._blocked(target, scene, tid):
                running.append(tid)
        return running

    def _blocked(self, target: Target, scene: _Scene, tid: int) -> bool:
        """False when the thread runs."""
        found = read_blocked(target.pid, tid)
        if found is None:
            return False
        sp, pc, stack = found
        self._ask(target, scene, tid, sp, pc, None, stack)
        return True

    def _spinning(self, target: Target, scene: _Scene, tids: list[int], end_ns: int) -> int:
        """How many threads the budget of time did not reach. Raises OSError when the kernel refuses to sample."""
        for index, tid in enumerate(tids):
            if self._clock() > end_ns:
                return len(tids) - index
            for sample in sample_running(tid):
                if self._ask(target, scene, tid, sample.sp, sample.pc, sample.bp, sample.stack):
                    break
        return 0

    def _ask(self, target: Target, scene: _Scene, tid: int, sp: int, pc: int, bp: int | None, stack: bytes) -> bool:
        if self._rows.thread_calls(target.pid, tid):
            return False  # it has made a hooked call since the link: whatever the stack held is over
        maps, files = scene.relevant(stack, pc)
        try:
            frames = self._parser.infer(
                sp=sp, pc=pc, bp=bp, stack=stack, maps=maps, files=files, hooks=scene.hooks,
                read=lambda ranges: read_memory(target.pid, ranges),
            )  # fmt: skip
        except ParserFailed as error:
            self._note(target, f"the stack of thread {tid} could not be read: {error}")
            return False
        if not frames:
            return False
        outer = frames[0]
        call = InferredCall(tid, outer.hook_id, outer.slot_addr, outer.return_addr, self._clock())
        target.inferred.append(call)
        self._tell(target, call, None)
        return True

    def _tell(self, target: Target, call: InferredCall, ended: str | None) -> None:
        body = {"proc": target.proc, "tid": call.tid, "hook": call.hook, "since_ns": call.since_ns,
                "at_ns": self._clock(), "ended": ended}  # fmt: skip
        self._send(Kind.INFERRED, body)

    def check(self, target: Target) -> None:
        """See which of them have ended since."""
        for call in list(target.inferred):
            ended = self._ended(target.pid, call)
            if ended is not None:
                target.inferred.remove(call)
                self._tell(target, call, ended)

    def _ended(self, pid: int, call: InferredCall) -> str | None:
        if self._rows.thread_calls(pid, call.tid):
            return "made another hooked call"
        word = read_memory(pid, [(call.slot_addr, 8)])[0]
        if int.from_bytes(word, "little") != call.return_addr:
            return "left the frame"
        found = read_blocked(pid, call.tid)
        if found is not None and found[0] > call.slot_addr:
            return "left the frame"
        if found is None and call.tid not in threads_of(pid):
            return "the thread ended"
        return None


class _Scene:
    """What is the same for all threads of one process: executable ranges, files, hook addresses."""

    def __init__(self, pid: int, mappings: list[Mapping], hooks: list[tuple[int, int, int]]) -> None:
        self._pid = pid
        self._mappings = mappings
        self._starts = [m.start for m in mappings]
        self._fds: dict[int, int] = {}
        self.hooks = hooks

    @classmethod
    def of(cls, target: Target) -> _Scene | None:
        """None when the process is gone or may not be read."""
        try:
            mappings = sorted(executable_mappings(target.pid))
        except OSError:
            return None
        hooks = [(hook, address, size) for lib in target.linked.values() for hook, (address, size) in lib.hooks.items()]
        return cls(target.pid, mappings, hooks)

    def relevant(self, stack: bytes, pc: int) -> tuple[list[tuple[int, int, int, int]], list[int]]:
        """(executable ranges for the parser, descriptors of the files that the stack's words point into)."""
        words = struct.unpack(f"<{len(stack) // 8}Q", stack[: len(stack) // 8 * 8])
        wanted = {i for word in (*words, pc) if (i := self._index(word)) is not None}
        files: list[int] = []
        maps = []
        for index, m in enumerate(self._mappings):
            place = -1
            if index in wanted and len(files) < MAX_FILES:
                fd = self._open(index)
                if fd is not None:
                    place = len(files)
                    files.append(fd)
            maps.append((m.start, m.end, place, m.offset))
        return maps, files

    def _index(self, address: int) -> int | None:
        index = bisect.bisect_right(self._starts, address) - 1
        return index if index >= 0 and address < self._mappings[index].end else None

    def _open(self, index: int) -> int | None:
        if index not in self._fds:
            try:
                self._fds[index] = open_mapping(self._pid, self._mappings[index])
            except OSError:
                return None
        return self._fds[index]

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds.values():
            os.close(fd)

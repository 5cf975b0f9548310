"""Calls that were already under way when the probes came: found on the threads' stacks.

A return probe placed now never fires for a call that entered before; its entry was not seen either. Without this a job
that hangs would show nothing to somebody who attaches to the hang.
"""

from __future__ import annotations

import bisect
import os
import struct
import zlib
from collections.abc import Callable
from typing import Any

from stallscope.capture.blocked import read_blocked, read_memory
from stallscope.capture.mapped import open_mapping
from stallscope.capture.parser_client import Inferred, ParserClient, ParserFailed
from stallscope.capture.procfs import Mapping, executable_mappings, threads_of, vdso_of
from stallscope.capture.rings import Rows
from stallscope.capture.spinning import sample_running
from stallscope.capture.target import InferredCall, Target
from stallscope.wire.frames import Kind

__all__ = ["Inference"]

MAX_THREADS = 512
MAX_FILES = 32
MAX_VDSO = 64 << 10
Send = Callable[[Kind, dict[str, Any]], None]
SEARCH_BUDGET_NS = 1_000_000_000  # of one process: the attach waits meanwhile, and nothing is drained
CHECK_BUDGET_NS = 50_000_000
SPIN_ROUNDS = 3


class Inference:
    """Finds such calls once, after the links of a process are in place, and watches until each has ended."""

    def __init__(self, parser: ParserClient, rows: Rows, send: Send, clock: Callable[[], int]) -> None:
        self._parser = parser
        self._rows = rows
        self._send = send
        self._clock = clock

    def search(self, target: Target) -> None:
        """Look at every thread of the process. Costs some ms a blocked thread, and some 10 ms a spinning one."""
        if not target.linked or target.preloaded:  # the shim knows its calls from the first one on
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
        self._look(target, scene, tid, sp, pc, None, stack)
        return True

    def _spinning(self, target: Target, scene: _Scene, tids: list[int], end_ns: int) -> int:
        """How many threads the budget of time did not reach. Raises OSError when the kernel refuses to sample."""
        for _ in range(SPIN_ROUNDS):
            again: list[int] = []
            for index, tid in enumerate(tids):
                if self._clock() > end_ns:
                    return len(tids) - index + len(again)
                samples = sample_running(tid)
                if not samples and not self._blocked(target, scene, tid):
                    again.append(tid)  # no CPU was free for it meanwhile
                any(self._look(target, scene, tid, s.sp, s.pc, s.bp, s.stack) for s in samples)
            tids = again
        return 0

    def _look(self, target: Target, scene: _Scene, tid: int, sp: int, pc: int, bp: int | None, stack: bytes) -> bool:
        """Note the outermost call of a thread; False when it is inside none."""
        if self._rows.thread_calls(target.pid, tid):
            return False  # it has made a hooked call since the link: whatever the stack held is over
        inferred = self._ask(target, scene, tid, sp, pc, bp, stack)
        if inferred is None or not inferred.frames:
            return False
        outer = inferred.frames[0]
        seen = _trace(sp, pc, stack, outer.slot_addr) if bp is None else None
        call = InferredCall(tid, outer.hook_id, outer.slot_addr, outer.return_addr, self._clock(), seen)
        target.inferred.append(call)
        self._tell(target, call, None)
        return True

    def _ask(
        self, target: Target, scene: _Scene, tid: int, sp: int, pc: int, bp: int | None, stack: bytes
    ) -> Inferred | None:
        """Hand a copy of a stack to the parser; a failure is a note and None."""
        maps, files = scene.relevant(stack, pc)
        try:
            return self._parser.infer(
                sp=sp, pc=pc, bp=bp, stack=stack, maps=maps, files=files, hooks=scene.hooks,
                read=lambda ranges: read_memory(target.pid, ranges),
            )  # fmt: skip
        except ParserFailed as error:
            self._note(target, f"the stack of thread {tid} could not be read: {error}")
            return None

    def _tell(self, target: Target, call: InferredCall, ended: str | None) -> None:
        body = {"proc": target.proc, "tid": call.tid, "hook": call.hook, "since_ns": call.since_ns,
                "at_ns": self._clock(), "ended": ended}  # fmt: skip
        self._send(Kind.INFERRED, body)

    def check(self, target: Target) -> None:
        """See which of them have ended since. What a small budget of time does not reach comes first the next time."""
        end_ns = self._clock() + CHECK_BUDGET_NS
        scene: _Scene | None = None
        try:
            for call in list(target.inferred):
                found = read_blocked(target.pid, call.tid)
                ended = self._ended(target.pid, call, found)
                if ended is not None:
                    self._end(target, call, ended)
                    continue
                if (found and call.seen == _trace(*found, call.slot_addr)) or self._clock() > end_ns:
                    continue
                if not any(call.hook == hook for library in target.linked.values() for hook, _, _ in library.places):
                    continue  # its library's links are closed, at the end of the capture: nobody could tell its frame
                scene = scene or _Scene.of(target)
                target.inferred.remove(call)
                target.inferred.append(call)
                if scene is not None and self._has_left(target, scene, call, found):
                    self._end(target, call, "left the frame")
        finally:
            if scene is not None:
                scene.close()

    def _ended(self, pid: int, call: InferredCall, found: tuple[int, int, bytes] | None) -> str | None:
        """Why the call has ended, as far as that is seen without unwinding."""
        if self._rows.thread_calls(pid, call.tid):
            return "made another hooked call"
        word = read_memory(pid, [(call.slot_addr, 8)])[0]
        if int.from_bytes(word, "little") != call.return_addr or (found and found[0] > call.slot_addr):
            return "left the frame"
        if found is None and call.tid not in threads_of(pid):
            return "the thread ended"
        return None

    def _end(self, target: Target, call: InferredCall, ended: str) -> None:
        target.inferred.remove(call)
        self._tell(target, call, ended)

    def _has_left(
        self, target: Target, scene: _Scene, call: InferredCall, found: tuple[int, int, bytes] | None
    ) -> bool:
        """Unwind again: the word in the slot may be a leftover in the room of another frame."""
        bp: int | None = None
        if found is None:
            try:
                samples = sample_running(call.tid, most=1)
            except OSError:
                return False
            if not samples:
                return False
            sp, pc, bp, stack = samples[0]
        else:
            sp, pc, stack = found
        if sp > call.slot_addr:
            return True
        inferred = self._ask(target, scene, call.tid, sp, pc, bp, stack)
        if inferred is None:
            return False
        if any(frame.slot_addr == call.slot_addr for frame in inferred.frames):
            call.seen = _trace(sp, pc, stack, call.slot_addr) if bp is None else None
            return False
        return call.slot_addr < inferred.known_to


def _trace(sp: int, pc: int, stack: bytes, slot: int) -> tuple[int, int, int]:
    """What a blocked thread's frames up to a slot depend on: while it stays the same, so do they."""
    return sp, pc, zlib.crc32(stack[: max(slot + 8 - sp, 0)])


class _Scene:
    """What is the same for all threads of one process: executable ranges, files, hook addresses."""

    def __init__(
        self, pid: int, mappings: list[Mapping], hooks: list[tuple[int, int, int]], vdso: Mapping | None
    ) -> None:
        self._pid = pid
        self._vdso = vdso
        self._mappings = mappings
        self._starts = [m.start for m in mappings]
        self._fds: dict[int, int] = {}
        self.hooks = hooks

    @classmethod
    def of(cls, target: Target) -> _Scene | None:
        """None when the process is gone or may not be read."""
        try:
            mappings = executable_mappings(target.pid)
            place = vdso_of(target.pid)
        except OSError:
            return None
        # Threads that spin on the clock are mostly there.
        vdso = Mapping(*place, 0, (0, 0), 0, "[vdso]") if place and place[1] - place[0] <= MAX_VDSO else None
        mappings = sorted([*mappings, vdso] if vdso else mappings)
        hooks = [point for lib in target.linked.values() for point in sorted(lib.places)]
        return cls(target.pid, mappings, hooks, vdso)

    def relevant(self, stack: bytes, pc: int) -> tuple[list[tuple[int, int, int, int]], list[int]]:
        """(executable ranges for the parser, descriptors of the files that the stack's words point into)."""
        words = struct.unpack(f"<{len(stack) // 8}Q", stack[: len(stack) // 8 * 8])
        places: dict[int, int] = {}
        files: list[int] = []
        # The innermost frames' files first: without them nothing is proven.
        for word in (pc, *words):
            index = self._index(word)
            if index is not None and index not in places and len(files) < MAX_FILES:
                fd = self._open(index)
                places[index] = len(files) if fd is not None else -1
                files.extend([] if fd is None else [fd])
        return [(m.start, m.end, places.get(i, -1), m.offset) for i, m in enumerate(self._mappings)], files

    def _index(self, address: int) -> int | None:
        index = bisect.bisect_right(self._starts, address) - 1
        return index if index >= 0 and address < self._mappings[index].end else None

    def _open(self, index: int) -> int | None:
        if index not in self._fds:
            mapping = self._mappings[index]
            try:
                self._fds[index] = self._copy(mapping) if mapping is self._vdso else open_mapping(self._pid, mapping)
            except OSError:
                return None
        return self._fds[index]

    def _copy(self, mapping: Mapping) -> int:
        """Put memory that no file stands behind into a file without a name. Raises OSError."""
        fd = os.memfd_create("vdso", os.MFD_CLOEXEC)
        os.write(fd, read_memory(self._pid, [(mapping.start, mapping.end - mapping.start)])[0])
        return fd

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds.values():
            os.close(fd)

"""Calls that were already under way when the probes came: found on the threads' stacks.

A return probe placed now never fires for a call that entered before; its entry was not seen either. Without this a job
that hangs would show nothing to somebody who attaches to the hang.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from stallscope.capture.blocked import read_blocked, read_memory
from stallscope.capture.parser_client import Inferred, ParserClient, ParserFailed
from stallscope.capture.procfs import threads_of
from stallscope.capture.rings import Rows
from stallscope.capture.scene import Scene
from stallscope.capture.spinning import sample_running
from stallscope.capture.target import InferredCall, Target
from stallscope.wire.frames import Kind

__all__ = ["Inference"]

MAX_THREADS = 512
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
        scene = Scene.of(target.pid, _hooks(target))
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

    def _blocked_ones(self, target: Target, scene: Scene, tids: list[int], end_ns: int) -> list[int]:
        """Search them; the threads that run, and those that the budget of time did not reach."""
        running: list[int] = []
        for index, tid in enumerate(tids):
            if self._clock() > end_ns:
                return running + tids[index:]
            if not self._blocked(target, scene, tid):
                running.append(tid)
        return running

    def _blocked(self, target: Target, scene: Scene, tid: int) -> bool:
        """False when the thread runs."""
        found = read_blocked(target.pid, tid)
        if found is None:
            return False
        sp, pc, stack = found
        self._look(target, scene, tid, sp, pc, None, stack)
        return True

    def _spinning(self, target: Target, scene: Scene, tids: list[int], end_ns: int) -> int:
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

    def _look(self, target: Target, scene: Scene, tid: int, sp: int, pc: int, bp: int | None, stack: bytes) -> bool:
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
        self, target: Target, scene: Scene, tid: int, sp: int, pc: int, bp: int | None, stack: bytes
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
        scene: Scene | None = None
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
                scene = scene or Scene.of(target.pid, _hooks(target))
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

    def _has_left(self, target: Target, scene: Scene, call: InferredCall, found: tuple[int, int, bytes] | None) -> bool:
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


def _hooks(target: Target) -> list[tuple[int, int, int]]:
    return [point for lib in target.linked.values() for point in sorted(lib.places)]

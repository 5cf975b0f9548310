"""Puts the library into a running process, and takes it out of its way again.

A thread of the process is borrowed for a moment (native/inject/) and starts another one, which loads the library. From
then on both sides talk through a block of memory in the process (native/shim/control.h).
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from stallscope.capture._drain import ffi, lib
from stallscope.capture.injectplan import ROOM, NoPlace, Plan, find_gap, find_room, make_plan
from stallscope.capture.parser_client import ParserClient
from stallscope.capture.procfs import clean, executable_mappings, is_leaderless, live_path, name_of, threads_of
from stallscope.capture.remoteexec import asked, is_asked, script
from stallscope.errors import PermissionProblem, StallscopeError, TargetProblem
from stallscope.paths import SHIM_INJECT

__all__ = ["Borrowed", "Injection", "inject"]

ENTRY, OURS = "stallscope_inject", "stallscope"  # OURS: name of its thread
PATIENCE_S, LOADING_S, RELEASE_S, ASKED_S = 5.0, 10.0, 5.0, 1.0
STOP_US, BLOCKED_US, BACK_US = 100_000, 30_000, 5_000_000
_LEFT_CODE = frozenset((lib.INJECT_ABANDONED, lib.INJECT_GONE, lib.INJECT_ODD))
A_ROUND, MAX_THREADS = 4, 256
# Calls in which threads wait for long, and hold nothing (x86-64): read, poll, select, pause, nanosleep, accept,
# recvfrom, recvmsg, futex, epoll_wait, clock_nanosleep, pselect6, ppoll, epoll_pwait.
LONG_WAITS = frozenset(("0", "7", "23", "34", "35", "43", "45", "47", "202", "232", "230", "270", "271", "281"))
_TRACED = "end the debugger or tracer that holds it, then attach again"
_BY_PROBES = "trace it by probes: as root, with --method bpf"
_AGAIN = "attach again, or start the program under `stallscope run`"
_WORDS = {
    lib.INJECT_NO_STOP: "a thread did not stop in time",
    lib.INJECT_AVOIDED: "every thread was inside malloc or the loader each time it was looked at",
    lib.INJECT_SIGNAL: "every thread was inside a signal handler, or about to be, each time it was looked at",
    lib.INJECT_ODD: "no thread was in code that can be interrupted",
    lib.INJECT_ABANDONED: "pthread_create did not go on in the borrowed thread, which was put back: malloc is held",
    lib.INJECT_GONE: "the threads that were asked have ended",
}


class Borrowed(NamedTuple):
    """What a try cost the thread: `stopped_ns` at a stretch, `away_ns` until it was back; `at`: why it failed."""

    tid: int
    code: int
    stopped_ns: int
    away_ns: int
    at: str


class Injection:
    """The library in one process; `release` it, or it lets go by itself five seconds after the last `beat`.

    Attributes:
        tries: every thread that was asked, the one that did it last.
        slots: how many slots were set.
        control: address of the block of memory.
    """

    def __init__(self, pid: int, memory: int, control: int, tries: list[Borrowed]) -> None:
        self.pid, self.tries = pid, tries
        self._memory, self.control = memory, control
        self._beats = self.slots = 0
        self._is_over = False

    def _get(self, field: str) -> int | None:
        """None: the process, or the block, is gone."""
        with contextlib.suppress(OSError):
            data = os.pread(self._memory, 4, self.control + ffi.offsetof("struct seg_control", field))
            return int.from_bytes(data, "little") if len(data) == 4 else None
        return None

    def _set(self, field: str, value: int) -> bool:
        with contextlib.suppress(OSError):
            at = self.control + ffi.offsetof("struct seg_control", field)
            return os.pwrite(self._memory, value.to_bytes(4, "little"), at) == 4
        return False

    def state(self) -> int | None:
        """SEG_CONTROL_..., None when the process runs another program or has ended."""
        return self._get("state")

    def has_begun(self) -> bool:
        """Whether the new thread was made, and the borrowed one needs nothing here any more."""
        return self._get("left") == 1 and self._get("thread") not in (0, None)

    def wait_ready(self) -> None:
        """Until the slots are set. Raises TargetProblem."""
        end = time.monotonic() + LOADING_S
        while (state := self.state()) == lib.SEG_CONTROL_BEGUN and time.monotonic() < end:
            time.sleep(0.001)
        if state == lib.SEG_CONTROL_READY:
            self.slots = self._get("slots") or 0
            return
        text = self._text()
        self._set("cancelled", 1)
        self._set("seen", 1)
        if state == lib.SEG_CONTROL_FAILED:
            self._wait_unmapped()
            raise _problem(self.pid, f"the library is not loaded: {text or 'no reason given'}", _hint_of(text))
        if state is None:
            raise _problem(self.pid, "the process ended or runs another program by now", _AGAIN)
        raise _problem(
            self.pid, f"its loader did not load the library within {LOADING_S:.0f} s: another thread loads one", _AGAIN
        )

    def _text(self) -> str:
        with contextlib.suppress(OSError):
            at = self.control + ffi.offsetof("struct seg_control", "text")
            data = os.pread(self._memory, lib.SEG_CONTROL_TEXT, at)
            return clean(data.partition(b"\0")[0].decode("utf-8", "replace"))
        return ""

    def _wait_unmapped(self) -> None:
        end = time.monotonic() + RELEASE_S
        while self.state() is not None and time.monotonic() < end:
            time.sleep(0.001)

    def erase(self, room: int) -> None:
        """Leave the page as it was: both threads have left it. Where the kernel refuses, dead code stays."""
        with contextlib.suppress(OSError):
            os.pwrite(self._memory, bytes(ROOM), room)

    def beat(self) -> bool:
        """Say that we live; once a second. False: the library has let go."""
        self._beats += 1
        return self._set("beat", self._beats) and self.state() == lib.SEG_CONTROL_READY

    def turned_away(self) -> int:
        """Slots that were left as they are, since the table of them was full."""
        return self._get("turned_away") or 0

    def release(self) -> tuple[int, int] | None:
        """Set the slots back: (set back, left since they held something else by then). None: it was not heard."""
        if self._is_over:
            return None
        self._is_over = True
        self._set("release", 1)
        end = time.monotonic() + RELEASE_S
        while self.state() == lib.SEG_CONTROL_READY and time.monotonic() < end:
            time.sleep(0.001)
        is_released = self.state() == lib.SEG_CONTROL_RELEASED
        found = (self._get("restored") or 0, self._get("foreign") or 0) if is_released else None
        self._set("seen", 1)
        self._wait_unmapped()
        return found

    def close(self) -> None:
        """Release it if nobody did."""
        self.release()
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


def inject(pid: int, parser: ParserClient, library: Path = SHIM_INJECT, *, patience_s: float = PATIENCE_S) -> Injection:
    """Load the library into a process and wait until it stands before CUDA's functions.

    Raises TargetProblem, PermissionProblem.
    """
    try:
        memory = os.open(f"{live_path(pid)}/mem", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _problem(pid, f"its memory can't be written ({error.strerror or 'it has ended'})", _AGAIN) from error
    try:
        return _by_python(pid, memory, library) or _start(pid, make_plan(pid, parser), memory, library, patience_s)
    except BaseException as error:
        os.close(memory)
        if isinstance(error, NoPlace):
            raise _problem(pid, str(error), _BY_PROBES if error.is_for_good else _AGAIN) from error
        if isinstance(error, OSError):
            raise _problem(pid, f"it can't be read ({error.strerror or 'it has ended'})", _AGAIN) from error
        raise


def _by_python(pid: int, memory: int, library: Path) -> Injection | None:
    """Where the interpreter can be asked, and answers; None where its main thread does not come to it in time."""
    if not is_asked(pid):
        return None
    found = Injection(pid, memory, find_gap(pid, lib.SEG_CONTROL_BYTES), [])
    with contextlib.suppress(OSError, RuntimeError, ValueError), asked(pid, script(library, ENTRY, found.control)):
        end = time.monotonic() + ASKED_S
        while found.state() is None and time.monotonic() < end:
            time.sleep(0.001)
    if found.state() is None:
        return None
    found.wait_ready()
    return found


def _start(pid: int, plan: Plan, memory: int, library: Path, patience_s: float) -> Injection:
    tries: list[Borrowed] = []
    end = time.monotonic() + patience_s
    while True:
        for tid in _candidates(pid)[:A_ROUND]:
            control, code = _try(pid, tid, plan, library, tries)
            found = Injection(pid, memory, control, tries)
            # A thread may end as soon as it is back: what it was borrowed for is done.
            if code == lib.INJECT_DONE or (code == lib.INJECT_GONE and found.has_begun()):
                found.wait_ready()  # where it fails the code stays: when the thread has left it nothing tells
                found.erase(plan.room)
                return found
            if code in _LEFT_CODE:
                plan = plan._replace(room=find_room(pid, executable_mappings(pid)))
        if time.monotonic() > end:
            why, hint = (_WORDS[tries[-1].code], _AGAIN) if tries else _why_nobody(pid)
            raise _problem(pid, f"{why} ({len(tries)} tries in {patience_s:.0f} s)", hint)
        time.sleep(min(0.05, 0.001 * len(tries)))


def _candidates(pid: int) -> list[int]:
    """Threads, those first that are likely to hold nothing; without ours, and those that are stopped or can't be."""
    found = []
    for tid in threads_of(pid)[:MAX_THREADS]:
        try:
            name, _, rest = Path(f"/proc/{pid}/task/{tid}/stat").read_text(errors="replace").rpartition(")")
            state = rest.split()[0] if not name.endswith(f"({OURS}") else ""
            call = Path(f"/proc/{pid}/task/{tid}/syscall").read_text().split()[0]
        except (OSError, IndexError):
            continue
        if state in ("S", "R"):
            found.append((0 if call in LONG_WAITS else 1 if call != "running" else 2, os.urandom(4), tid))
    return [tid for _, _, tid in sorted(found)]


def _why_nobody(pid: int) -> tuple[str, str]:
    """Why no thread can be asked, and what to do, by the states that proc(5) has for them."""
    states = set()
    for tid in threads_of(pid)[:MAX_THREADS]:
        with contextlib.suppress(OSError, IndexError):
            stat = Path(f"/proc/{pid}/task/{tid}/stat").read_text(errors="replace")
            states.add(stat.rpartition(")")[2].split()[0])
    if "t" in states:
        return "a debugger or tracer has stopped it", _TRACED
    if "T" in states:
        return "its threads are stopped (by SIGSTOP, or as a job of a shell)", f"let it go on: kill -CONT {pid}"
    if "D" in states:
        return "its threads sleep where nothing may stop them (state D, as in vfork or on a disk)", _AGAIN
    return "no thread of it can be asked", _AGAIN


def _try(pid: int, tid: int, plan: Plan, library: Path, tries: list[Borrowed]) -> tuple[int, int]:
    """(where the control block is, enum inject_code). Raises StallscopeError where no other thread would do better."""
    control = find_gap(pid, lib.SEG_CONTROL_BYTES)
    result = ffi.new("struct inject_result *")
    asked = _filled(pid, tid, plan, control, library)
    error = lib.inject__try(asked, result)
    if error:
        raise _problem(pid, f"no thread can be made here ({os.strerror(-error)})", "free some memory")
    at = ffi.string(result.at).decode()
    tries.append(Borrowed(tid, result.code, result.stopped_ns, result.away_ns, at))
    if result.code in (lib.INJECT_ERROR, lib.INJECT_REFUSED):
        raise _refused(pid, at, result.error, is_another=not _is_there(pid, plan.room))
    return control, result.code


def _filled(pid: int, tid: int, plan: Plan, control: int, library: Path) -> Any:
    p = ffi.new("struct inject_plan *")
    p.pid, p.tid, p.lock = pid, tid, 0 if is_leaderless(pid) else pid
    p.create, p.self, p.detach, p.open, p.symbol, p.error, p.errno_of = plan.functions
    p.room, p.control, p.restorer = plan.room, control, plan.restorer
    p.stop_us, p.blocked_us, p.back_us = STOP_US, BLOCKED_US, BACK_US
    for i, (begin, end) in enumerate(plan.avoid):
        p.avoid[i].__setattr__("from", begin)
        p.avoid[i].to = end
    p.n_avoid = len(plan.avoid)
    path = os.fsencode(library)
    if len(path) >= len(p.path):
        raise _problem(
            pid, f"the path of {library} is too long", "install stallscope into a folder with a shorter name"
        )
    p.path, p.entry = path, ENTRY.encode()
    return p


def _is_there(pid: int, address: int) -> bool:
    return any(m.start <= address < m.end for m in executable_mappings(pid))


def _refused(pid: int, at: str, error: int, *, is_another: bool) -> StallscopeError:
    if at == "PTRACE_SEIZE" and error == errno.EPERM:
        if _is_traced(pid):
            return _problem(pid, "another program traces it (TracerPid in /proc/PID/status)", _TRACED)
        return PermissionProblem(
            _what(pid), why="the kernel refuses ptrace (EPERM)",
            hint="run it as root, or grant CAP_SYS_PTRACE; see kernel.yama.ptrace_scope",
        )  # fmt: skip
    if is_another:
        return _problem(pid, "it runs another program by now: it execed meanwhile", _AGAIN)
    return _problem(pid, f"{at} failed in it ({os.strerror(error)})", _AGAIN)


def _is_traced(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "\nTracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text(errors="replace")
    return False


def _hint_of(text: str) -> str:
    if "ermission denied" in text or "cannot open" in text:
        return "install stallscope where the user of that process may read it"
    return _AGAIN


def _what(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"cannot inject into pid {pid} ({name_of(pid)})"
    return f"cannot inject into pid {pid}"


def _problem(pid: int, why: str, hint: str) -> TargetProblem:
    return TargetProblem(_what(pid), why=why, hint=hint)

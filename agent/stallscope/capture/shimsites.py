"""Which Python line waits, by the shim: SITE and SITES frames of processes that are read through a segment.

The shim looks up the stacks of waits that took long (native/shim/sites.c), by numbers that are written into its segment
here: the interpreter is found from outside, as for BPF. Shorter waits have no site, and `least_ns` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from stallscope.capture.blocked import is_refused
from stallscope.capture.causes import SITE_KINDS
from stallscope.capture.held import Held
from stallscope.capture.parser_client import ParserClient
from stallscope.capture.procfs import has_own_filter
from stallscope.capture.pycode import CodeReader
from stallscope.capture.pyconfig import NotYet, Python, PythonFinder, Unknown, has_hidden_threads
from stallscope.capture.pystack import NotThere, frames_now
from stallscope.capture.segment import Clock
from stallscope.capture.sites import (
    BUDGET_NS,
    LOOKED_AT_ONCE,
    MAX_SENT,
    OTHERS,
    RETRIES,
    RETRY_NS,
    resolved,
    tell_others,
    tell_unknown,
)
from stallscope.capture.sitetable import MAX_FRAMES, Site, Times, python_words, site_of, times_of
from stallscope.wire.columns import bucket_bounds
from stallscope.wire.frames import Kind
from stallscope.wire.hook_table import BY_ID, HOOKS

__all__ = ["LEAST_NS", "ShimSites"]

# A bucket of the histograms begins here, so that how many waits were shorter is exact.
LEAST_NS = 1 << 20
FIRST_NUMBER = 1 << 40  # of a site: those of the BPF table begin at 1
WALKED = [hook.id for hook in HOOKS if hook.kind in SITE_KINDS]
SANDBOXED = "it has a seccomp filter of its own, and the shim makes no system call there"
NO_TABLE = "its shim has no table of call sites"
REFUSED = "its memory may not be read (kernel.yama.ptrace_scope, or a program that protects itself)"
STACK_AGE_NS, LAST_AGE_NS = 1_000_000_000, 100_000_000
STACKS_AT_ONCE, MAX_STACKS = 8, 64
LIMIT = 1 << 63
Send = Callable[[Kind, dict[str, Any]], None]


@dataclass
class _Row:
    number: int
    calls: int = 0


@dataclass
class _Program:
    """What a segment's process runs, until it ends or execs. `before`: what earlier readers were told."""

    held: Held
    before: dict[int, Times]
    due_ns: int = 0
    tries: int = 0
    is_known: bool = False
    python: Python | None = None
    reader: CodeReader | None = None
    has_others: bool = False
    seen: int = 0
    rows: dict[int, _Row | None] = field(default_factory=dict)


class ShimSites:
    """Told of every segment that is read.

    Args:
        parser: finds runtimes in files and lines in tables.
        send: takes frames.
        clock: CLOCK_MONOTONIC in ns.

    Attributes:
        counter: of the segments; there before the first of them.
    """

    counter: Clock

    def __init__(self, parser: ParserClient, send: Send, clock: Callable[[], int]) -> None:
        self._parser, self._send, self._now = parser, send, clock
        self._finder = PythonFinder(parser)
        self._programs: dict[int, _Program] = {}
        self._stacks: dict[tuple[int, int, int], int | None] = {}
        self._next_number = FIRST_NUMBER
        self._missed = 0

    def begin(self, held: Held) -> None:
        """A segment is read from now on."""
        segment = held.segment
        rows = segment.site_rows() if segment.header.readers else []
        before = {row: times_of(data) for row in rows if (data := segment.site(self.counter, row)) is not None}
        self._programs[held.target.proc] = _Program(held, before)

    def configure(self) -> None:
        """Find the interpreters of processes that are new, some of them a look."""
        now = self._now()
        due = [p for p in self._programs.values() if not p.is_known and now >= p.due_ns and p.held.is_open]
        for program in due[:LOOKED_AT_ONCE]:
            self._configure(program, now)

    def _configure(self, program: _Program, now: int) -> None:
        held, target = program.held, program.held.target
        program.due_ns, program.tries = now + RETRY_NS, program.tries + 1
        found = self._find(held)
        program.is_known = not isinstance(found, NotYet) or program.tries >= RETRIES
        if isinstance(found, Python):
            program.python, program.reader = found, CodeReader(target.pid, found, self._parser)
            _walk(held, found)
            self._send(Kind.SITES, {"at_ns": now, "proc": target.proc, "rows": [], "least_ns": LEAST_NS})
        elif program.is_known:
            _stop(held)  # a forked child has its parent's numbers
            tell_unknown(self._send, now, target.proc, found)

    def _find(self, held: Held) -> Python | Unknown | NotYet | None:
        pid = held.target.pid
        if not held.segment.sites().has_table:
            return Unknown(NO_TABLE)
        if is_refused(pid):
            return Unknown(REFUSED)
        return Unknown(SANDBOXED) if has_own_filter(pid) else self._finder.find(pid)

    def check(self) -> None:
        """Once a second: a program that has locked itself up is let be; who read along may have the say now."""
        for program in self._programs.values():
            held = program.held
            if program.python is None or not held.is_open:
                continue
            if not held.segment.sites().is_walked:
                _walk(held, program.python)
            if has_own_filter(held.target.pid):
                program.python = None
                _stop(held)
                text = f"no more Python call sites from now on: {SANDBOXED}"
                self._send(Kind.NOTE, {"at_ns": self._now(), "proc": held.target.proc, "text": text})

    def look(self, held: Held, *, is_over: bool = False) -> None:
        """Tell sites that are new. `is_over`: also where the interpreter is not known yet."""
        program = self._programs.get(held.target.proc)
        if program is None or not (program.is_known or is_over):
            return
        taken = held.segment.sites().taken
        if taken != program.seen and self._tell_new(program):
            program.seen = taken

    def _tell_new(self, program: _Program) -> bool:
        """Whether all rows were told; one may just be being written, or there are many."""
        begun, all_read = self._now(), True
        for row in program.held.segment.site_rows():
            if row in program.rows:
                continue
            if self._now() - begun > BUDGET_NS:
                return False  # the rings must be drained
            data = program.held.segment.site(self.counter, row)
            site = site_of(data, row) if data is not None else None
            if site is None:
                all_read = False
            else:
                program.rows[row] = self._tell(program, site, begun)
        return all_read

    def _tell(self, program: _Program, site: Site, now: int) -> _Row | None:
        """None: the segment names a function that there is not."""
        if site.hook not in BY_ID:
            return None
        frames, why = ([], OTHERS) if self._has_others(program) else resolved(site, program.reader)
        return _Row(self._tell_site(program, site.hook, site.tid, frames, site.is_cut, why, now))

    def _has_others(self, program: _Program) -> bool:
        """As in `Sites`: whether frames may be another interpreter's; no more are walked then."""
        target, reader = program.held.target, program.reader
        if reader is not None and not program.has_others and has_hidden_threads(target.pid, reader.python):
            program.has_others, program.python = True, None
            _stop(program.held)
            tell_others(self._send, self._now(), target.proc)
        return program.has_others

    def _tell_site(
        self, program: _Program, hook: int, tid: int, frames: list[Any], is_cut: bool, why: str | None, now: int
    ) -> int:
        number, self._next_number = self._next_number, self._next_number + 1
        body = {"at_ns": now, "proc": program.held.target.proc, "id": number, "hook": hook, "tid": tid,
                "frames": frames, "cut": is_cut, "why": why}  # fmt: skip
        self._send(Kind.SITE, body)
        return number

    def tell(self, held: Held) -> None:
        """Sites that are new, and what was counted; before the process's counters are read."""
        self.look(held)
        self.send(held)

    def send(self, held: Held) -> None:
        """Numbers that changed since they were last sent."""
        program, changed = self._programs.get(held.target.proc), []
        for index, row in program.rows.items() if program else ():
            data = held.segment.site(self.counter, index) if row is not None else None
            times = times_of(data) if data is not None else None
            if row is None or times is None or times.calls == row.calls:
                continue
            row.calls = times.calls
            if program and (since := program.before.get(index)):
                times = _less(times, since)
            if max(times[:4]) < LIMIT and min(times[:4]) >= 0:
                changed.append([row.number, *times])
        for begin in range(0, len(changed), MAX_SENT):
            body = {"at_ns": self._now(), "proc": held.target.proc, "rows": changed[begin : begin + MAX_SENT]}
            self._send(Kind.SITES, body)

    def end(self, held: Held) -> None:
        """The last of a program."""
        self.look(held, is_over=True)
        self.send(held)
        self._missed += held.segment.sites().turned_away
        self._programs.pop(held.target.proc, None)

    def turned_away(self) -> int:
        """Long waits that found no row so far."""
        return self._missed + sum(p.held.segment.sites().turned_away for p in self._programs.values() if p.held.is_open)

    def stacks(self, rows: Iterable[list[Any]], now: int, *, final: bool) -> list[list[int]]:
        """[proc, tid, id] of calls in flight whose stack is known; those that last for a second are looked at, once.

        Args:
            rows: as INFLIGHT frames have them.
        """
        least_ns, left = (LAST_AGE_NS, MAX_STACKS) if final else (STACK_AGE_NS, STACKS_AT_ONCE)
        known: dict[tuple[int, int, int], int | None] = {}
        for proc, tid, frames in rows:
            key, program = (proc, tid, frames[0][1]), self._programs.get(proc)
            if key in self._stacks:
                known[key] = self._stacks[key]
            elif program is not None and program.reader is not None and now - key[2] >= least_ns and left:
                left -= 1
                known[key] = self._take(program, tid, frames[0][0], now)
        self._stacks = known
        return [[proc, tid, number] for (proc, tid, _), number in known.items() if number is not None]

    def _take(self, program: _Program, tid: int, hook: int, now: int) -> int | None:
        reader, python = program.reader, program.python
        if reader is None or python is None:
            return None
        try:
            found = frames_now(program.held.target.pid, python, reader, tid).frames
        except NotThere:
            return None
        places = reader.places(found[:MAX_FRAMES])
        frames = [[p.file, p.line, p.function, "python"] if p else [None, None, "?", "python"] for p in places]
        why = None if places[0] else "its thread does not stand still"
        return self._tell_site(program, hook, tid, frames, len(found) > MAX_FRAMES, why, now)


def _walk(held: Held, python: Python) -> None:
    """Unless another capture has the say."""
    if not held.is_passive:
        held.segment.walk(python_words(held.segment.header.pid, 0, python), WALKED, LEAST_NS)


def _stop(held: Held) -> None:
    if not held.is_passive:
        held.segment.stop_walking()


def _less(times: Times, before: Times) -> Times:
    """What came since. The longest of before is not the longest since: then its bucket tells from where on it is."""
    then = dict(zip(before.buckets[::2], before.buckets[1::2], strict=True))
    now = zip(times.buckets[::2], times.buckets[1::2], strict=True)
    left = [(bucket, count - then.get(bucket, 0)) for bucket, count in now if count > then.get(bucket, 0)]
    longest = times.max_ns
    if longest == before.max_ns and left:
        longest = bucket_bounds(left[-1][0])[0]
    pairs = [number for pair in left for number in pair]
    return Times(times.calls - before.calls, times.total_ns - before.total_ns, longest, times.max_at_ns, pairs)

"""Which Python line waits: sends SITE frames for new call sites, and SITES frames for what was counted there.

BPF walks the frames of each waiting thread and counts by stack, so that no call is missed whatever the sampling
(probes/python.h). Here processes are configured for that, new stacks are resolved at once (their code may be freed
any moment), and the counts are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stallscope.capture.natives import entries_by_version
from stallscope.capture.parser_client import ParserClient
from stallscope.capture.procfs import Facts
from stallscope.capture.pycode import CodeReader
from stallscope.capture.pyconfig import NotYet, Python, PythonFinder, Unknown, has_hidden_threads
from stallscope.capture.sitetable import NO_THREAD, UNREADABLE, Site, SiteTable
from stallscope.capture.target import Target
from stallscope.capture.weaving import Unwoven, Weaver
from stallscope.wire.frames import Kind

__all__ = ["BUDGET_NS", "LOOKED_AT_ONCE", "MAX_SENT", "OTHERS", "RETRIES", "RETRY_NS", "Sites", "resolved",
           "tell_others", "tell_unknown"]  # fmt: skip

NOT_PYTHON = "the thread is none of Python's"
NO_FRAME = "the thread runs no Python code"
UNREADABLE_FRAME = "its Python frame could not be read"
NO_PYTHON = "there is no Python in the process"
NOT_RUNNING = "its Python has not begun to run"
OTHERS = "there is more than one Python interpreter in the process"
CODE_GONE = "its code object was gone, or could not be read"
RETRY_NS, RETRIES = 250_000_000, 240
LOOKED_AT_ONCE = 4  # processes to configure in one look of the loop
RUSH_NS, BUDGET_NS = 300_000_000, 20_000_000
MAX_SENT = 512  # rows of one frame
Send = Callable[[Kind, dict[str, Any]], None]


@dataclass
class _Image:
    """The program that a process runs: `facts` are replaced when it is another one."""

    facts: Facts
    due_ns: int = 0
    tries: int = 0
    is_known: bool = False
    python: Python | None = None
    reader: CodeReader | None = None
    has_others: bool = False


@dataclass
class _Row:
    """A site that was told; `calls` and `idle` when its times were last sent."""

    number: int
    proc: int
    calls: int = 0
    idle: int = 0


def resolved(site: Site, reader: CodeReader | None) -> tuple[list[Any], str | None]:
    """Frames as in SITE frames, and why the innermost one is not known."""
    if not site.frames:
        if site.flags & NO_THREAD:
            return [], NOT_PYTHON
        return [], UNREADABLE_FRAME if site.flags & UNREADABLE else NO_FRAME
    places = reader.places(site.frames) if reader else [None] * len(site.frames)
    frames = [[p.file, p.line, p.function, "python"] if p else [None, None, "?", "python"] for p in places]
    return frames, None if places[0] else CODE_GONE


def tell_unknown(send: Send, now: int, proc: int, found: Unknown | NotYet | None) -> None:
    """Why there will be no sites; where there is no Python at all that is no news."""
    why = found.why if isinstance(found, Unknown) else NO_PYTHON if found is None else NOT_RUNNING
    send(Kind.SITES, {"at_ns": now, "proc": proc, "rows": [], "unknown": why})
    if found is not None:
        send(Kind.NOTE, {"at_ns": now, "proc": proc, "text": f"no Python call sites: {why}"})


def tell_others(send: Send, now: int, proc: int) -> None:
    """That a second interpreter ends it."""
    send(Kind.NOTE, {"at_ns": now, "proc": proc, "text": f"no Python call sites from now on: {OTHERS}"})


class Sites:
    """`look` at every look of the loop, before processes are buried; `send` before their counters are.

    Args:
        table: rows of stacks.
        parser: finds runtimes in files and lines in tables.
        proc_of_slot: whose slot it is, also of a process that has just ended.
        works: whether the programs that are loaded walk stacks.
    """

    def __init__(
        self, table: SiteTable, parser: ParserClient, send: Send, clock: Callable[[], int],
        proc_of_slot: Callable[[int], int | None], works: bool,
    ) -> None:  # fmt: skip
        self._table, self._parser, self._send, self._clock = table, parser, send, clock
        self._proc_of_slot, self._works = proc_of_slot, works
        self._finder = PythonFinder(parser)
        self._weaver = Weaver(parser, send, clock)
        self._images: dict[int, _Image] = {}
        self._rows: dict[int, _Row] = {}
        self._rows_of: dict[int, list[int]] = {}
        self._next_number = self._next_image = 1
        self._seen = 0

    def look(self, targets: Sequence[Target]) -> None:
        """Configure processes that are new, tell sites that are new, and the last numbers of processes that ended."""
        if not self._works:
            return
        now = self._clock()
        for target in [target for target in targets if self._is_due(target, now)][:LOOKED_AT_ONCE]:
            self._configure(target, now)
        taken = self._table.taken()
        if taken != self._seen and self._tell_new(now):
            self._seen = taken
        live = {target.proc for target in targets}
        for proc in self._rows_of.keys() - live:
            self._bury(self._rows_of.pop(proc))
        self._weaver.step()
        if len(self._images) > len(live):
            self._images = {proc: image for proc, image in self._images.items() if proc in live}

    def rush(self, targets: Sequence[Target]) -> None:
        """Configure all that can be in a short time: what they wait for from now on has its line."""
        now = self._clock()
        for target in targets:
            if self._is_due(target, now) and self._clock() - now < RUSH_NS:
                self._configure(target, now)

    def reader_of(self, proc: int) -> tuple[Python, CodeReader] | None:
        """How to read the Python stacks of a process; None where there are none, or nobody knows how."""
        image = self._images.get(proc)
        return (image.python, image.reader) if image and image.python and image.reader else None

    def python_of(self, proc: int) -> Python | None:
        """How its Python is laid out, None as above."""
        image = self._images.get(proc)
        return image.python if image else None

    def _is_due(self, target: Target, now: int) -> bool:
        if not target.linked or target.preloaded or not self._works:
            return False
        image = self._images.get(target.proc)
        if image is None or image.facts is not target.facts:
            image = self._images[target.proc] = _Image(target.facts)
        return not image.is_known and now >= image.due_ns

    def _configure(self, target: Target, now: int) -> None:
        image = self._images[target.proc]
        image.due_ns, image.tries = now + RETRY_NS, image.tries + 1
        found = self._finder.find(target.pid)
        image.is_known = not isinstance(found, NotYet) or image.tries >= RETRIES
        if isinstance(found, Python):
            image.python, image.reader = found, CodeReader(target.pid, found, self._parser)
            self._table.configure(target.slot, target.pid, self._next_image, found)
            self._next_image += 1
        elif image.is_known:
            tell_unknown(self._send, now, target.proc, found)

    def _tell_new(self, now: int) -> bool:
        """Whether all rows were told; one may just be being written, or there are many."""
        all_read = True
        for row in self._table.used():
            if row in self._rows:
                continue
            if self._clock() - now > BUDGET_NS:
                return False  # the rings must be drained
            site = self._table.site(row)
            if site is None or self._is_early(site):
                all_read = False
            else:
                self._tell(site, now)
        return all_read

    def _is_early(self, site: Site) -> bool:
        """Whether its process, a forked child that has its parent's configuration, has not been looked at yet."""
        image = self._images.get(self._proc_of_slot(site.slot) or 0)
        return image is not None and not image.is_known

    def _tell(self, site: Site, now: int) -> None:
        proc = self._proc_of_slot(site.slot)
        if proc is None:
            self._table.take_stack(site.stack)
            self._table.free(site.row)  # its process came and went between two looks
            return
        frames, why = ([], OTHERS) if self._has_others(site, proc) else resolved(site, self._reader_of(proc))
        self._rows[site.row] = _Row(self._next_number, proc)
        self._rows_of.setdefault(proc, []).append(site.row)
        self._send(
            Kind.SITE,
            {"at_ns": now, "proc": proc, "id": self._next_number, "hook": site.hook, "tid": site.tid, "frames": frames,
             "cut": site.is_cut, "why": why, "what": site.what},
        )  # fmt: skip
        self._weave_later(site, proc, frames)
        self._next_number += 1

    def _weave_later(self, site: Site, proc: int, frames: list[Any]) -> None:
        machine, reader = self._table.take_stack(site.stack), self._reader_of(proc)
        # None is known of a program that has been replaced by another one since: its stack is not of that one's files.
        if reader is not None and any(file for file, *_ in frames):
            entries = entries_by_version(reader.python, len(frames), site.entries)
            self._weaver.offer(Unwoven(self._next_number, proc, frames, entries, site.is_cut), site.pid, machine)

    def _reader_of(self, proc: int) -> CodeReader | None:
        image = self._images.get(proc)
        return image.reader if image else None

    def _has_others(self, site: Site, proc: int) -> bool:
        """Whether the frames may be those of another interpreter than the one that waits; no more are walked then."""
        image = self._images.get(proc)
        if image is None or image.reader is None:
            return False
        if not image.has_others and has_hidden_threads(site.pid, image.reader.python):
            image.has_others = True
            self._table.forget(site.slot)
            tell_others(self._send, self._clock(), proc)
        return image.has_others

    def _bury(self, rows: list[int]) -> None:
        """The last numbers of a process that has ended; its rows are free then."""
        self._send_times({row: self._rows[row] for row in rows})
        for row in rows:
            del self._rows[row]
            self._table.free(row)

    def send(self) -> None:
        """Numbers that changed since they were last sent."""
        self._send_times(self._rows)

    def numbers(self, rows: Sequence[tuple[int, int, int]]) -> list[list[int]]:
        """[proc, tid, id] of those (proc, tid, row) whose site has been told."""
        return [[proc, tid, self._rows[row].number] for proc, tid, row in rows if row in self._rows]

    def _send_times(self, rows: dict[int, _Row]) -> None:
        changed: dict[int, list[list[Any]]] = {}
        for row, known in rows.items():
            idle = self._table.idle(row)
            if self._table.calls(row) == known.calls and idle[0] == known.idle:
                continue
            times = self._table.times(row)
            known.calls, known.idle = times.calls, idle[0]
            changed.setdefault(known.proc, []).append([known.number, *times, *idle])
        for proc, all_of_it in changed.items():
            for begin in range(0, len(all_of_it), MAX_SENT):
                self._send(
                    Kind.SITES, {"at_ns": self._clock(), "proc": proc, "rows": all_of_it[begin : begin + MAX_SENT]}
                )

    def finish(self, targets: Sequence[Target]) -> None:
        """The links are gone: the last new sites, and the last numbers of all."""
        self.look(targets)
        self._weaver.finish()
        self.send()

"""Where programs begin to end: probes on exit(3) and on the end of an interpreter, which runs Python's handlers.

They are no hooks: hit once in a process's life, they write one number and make no event. Python's handlers run in
Py_FinalizeEx, before exit(3); a worker that multiprocessing forked leaves by _exit(2), which runs none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from stallscope.capture.environ import LIBC
from stallscope.capture.links import UprobeLink
from stallscope.capture.mapped import open_mapping
from stallscope.capture.parser_client import ParserClient, ParserFailed
from stallscope.capture.procfs import Facts, Mapping, executable_mappings
from stallscope.capture.target import Target
from stallscope.errors import StallscopeError

__all__ = ["NAMES", "ExitProbes"]

NAMES = ("exit", "Py_FinalizeEx", "_Py_Finalize", "Py_Exit")
_PYTHON = re.compile(r"libpython\d[\w.]*")
# Most programs are over sooner: their probes would cost more than they do.
LEAST_AGE_NS = 300_000_000
A_LOOK = 8
MAX_FILES, MAX_REASONS = 256, 64
DEADLINE_S = 1.0


class ExitProbes:
    """Links of the processes that have lived for a while, a few at each look.

    Args:
        program: descriptor of the program; None where the kernel has no uprobe_multi.
        close_later: takes links whose process has ended.

    Attributes:
        failed: why a file could not be probed -> in how many processes.
    """

    def __init__(
        self, program: int | None, parser: ParserClient, close_later: Callable[[list[Any], list[Any]], None]
    ) -> None:
        self._program, self._parser, self._close_later = program, parser, close_later
        self._done: dict[int, Facts] = {}
        self._links: dict[int, dict[tuple[int, ...], UprobeLink]] = {}
        self._offsets: dict[tuple[int, ...], list[int]] = {}
        self.failed: dict[str, int] = {}

    def look(self, targets: list[Target], now: int) -> None:
        """Link those that are due, and let go of those that have ended."""
        if self._program is None:
            return
        there = {target.proc for target in targets}
        for proc in self._done.keys() - there:
            del self._done[proc]
            self._close_later(list(self._links.pop(proc, {}).values()), [])
        # An exec gives a process new facts.
        due = [t for t in targets if self._done.get(t.proc) is not t.facts and now - t.facts.start_ns >= LEAST_AGE_NS]
        for target in due[:A_LOOK]:
            self._done[target.proc] = target.facts
            self._link(target)

    def _link(self, target: Target) -> None:
        try:
            program = os.stat(f"/proc/{target.pid}/exe").st_ino
            mappings = executable_mappings(target.pid)
        except OSError:
            return  # it has ended
        seen: set[int] = set()
        for mapping in mappings:
            if mapping.inode not in seen and (mapping.inode == program or _may_define(mapping.path)):
                seen.add(mapping.inode)
                self._link_file(target, mapping)

    def _link_file(self, target: Target, mapping: Mapping) -> None:
        try:
            fd = open_mapping(target.pid, mapping)
        except OSError:
            return
        links = self._links.setdefault(target.proc, {})
        try:
            info = os.fstat(fd)
            key = (info.st_dev, info.st_ino, info.st_mtime_ns, info.st_size)
            offsets = self._find(fd, key)
            if offsets and key not in links and self._program is not None:
                cookies = [0] * len(offsets)
                links[key] = UprobeLink.attach(self._program, fd, offsets, cookies, target.pid, is_return=False)
        except StallscopeError as problem:
            if not target.ended and os.path.exists(f"/proc/{target.pid}"):
                self._fail(problem.why)
        finally:
            os.close(fd)

    def _find(self, fd: int, key: tuple[int, ...]) -> list[int]:
        if key not in self._offsets:
            if len(self._offsets) >= MAX_FILES:
                self._offsets.clear()
            # A file that can't be read defines nothing that could be probed, nor would it at the next process.
            self._offsets[key] = []
            try:
                found = self._parser.symbols(fd, NAMES, deadline_s=DEADLINE_S).symbols
            except (ParserFailed, OSError) as problem:
                self._fail(problem.why if isinstance(problem, ParserFailed) else str(problem))
                return []
            self._offsets[key] = sorted({symbol.probe_offset for symbol in found.values()})
        return self._offsets[key]

    def _fail(self, why: str) -> None:
        if why not in self.failed and len(self.failed) >= MAX_REASONS:
            why = "other reasons"
        self.failed[why] = self.failed.get(why, 0) + 1

    def close(self) -> None:
        """Take every probe away, soon."""
        for links in self._links.values():
            self._close_later(list(links.values()), [])
        self._links.clear()


def _may_define(path: str) -> bool:
    name = path.rpartition("/")[2].removesuffix(" (deleted)")
    return bool(LIBC.fullmatch(name) or _PYTHON.match(name))

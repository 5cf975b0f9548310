"""Whether a process can cancel threads: one that is cancelled inside a return-probed call skips its destructors.

The program counts, and what it is linked with. What it loads later does not: gRPC, FFmpeg, JAX and XGBoost import
pthread_cancel too (docs/limits.md), and a job that uses one of them is to be timed.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from typing import NamedTuple

from stallscope.capture.libmatch import match
from stallscope.capture.mapped import open_mapping
from stallscope.capture.parser_client import Imports, ParserClient, ParserFailed
from stallscope.capture.procfs import Mapping, clean, executable_mappings, live_path

__all__ = ["Cancelling"]

CANCEL = "pthread_cancel"
MAX_KNOWN, MAX_LINKED = 4096, 256
LIBRARY_DEADLINE_S, BUDGET_NS = 0.5, 150_000_000
FRESH_NS = 50_000_000
NOTHING = Imports(frozenset(), [])
# The C library, and NVIDIA's, whose threads don't call the functions that are probed at their return.
_OWN = re.compile(r"(ld-linux.*|libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|libnvidia-.*)[.-]")
_FileId = tuple[int, int, int, int, int]


class _Seen(NamedTuple):
    """The last answer: the libraries of a process are linked one right after the other."""

    pid: int
    program: tuple[int, int]
    at_ns: int
    path: str | None


class Cancelling:
    """Looks, and remembers each file.

    Args:
        parser: asked once a file.
    """

    def __init__(self, parser: ParserClient) -> None:
        self._parser = parser
        self._files: dict[_FileId, Imports] = {}
        self._last: _Seen | None = None

    def who(self, pid: int) -> str | None:
        """Path of the first file found that imports pthread_cancel; None: there is none, or the libraries are too many.

        Then the next look goes on where this one stopped, for files are remembered.
        """
        try:
            info = os.stat(f"{live_path(pid)}/exe")
        except OSError:
            return None
        program, now, last = (info.st_dev, info.st_ino), time.monotonic_ns(), self._last
        if last and (last.pid, last.program) == (pid, program) and now - last.at_ns < FRESH_NS:
            return last.path
        path, is_whole = self._look(pid)
        self._last = _Seen(pid, program, time.monotonic_ns(), path) if is_whole else None
        return path

    def _look(self, pid: int) -> tuple[str | None, bool]:
        """The same, and whether it was the whole truth."""
        end_ns: int | None = None
        for mapping, imports in self._linked(pid):
            if CANCEL in imports.imported:
                return clean(mapping.path), True
            end_ns = end_ns or time.monotonic_ns() + BUDGET_NS
            if time.monotonic_ns() > end_ns:
                return None, False
        return None, True

    def loaded_later(self, pid: int) -> Iterator[str | None]:
        """Asks one mapped file after the other that `who` does not: its path if it imports pthread_cancel, or None."""
        linked = {(m.device, m.inode) for m, _ in self._linked(pid)}
        for mapping in _files_of(pid):
            if (mapping.device, mapping.inode) not in linked and not _is_own(mapping):
                imports = self._imports(pid, mapping, LIBRARY_DEADLINE_S)
                yield clean(mapping.path) if CANCEL in imports.imported else None

    def _linked(self, pid: int) -> Iterator[tuple[Mapping, Imports]]:
        """The program, the libraries it is linked with, those that they are linked with, and so on."""
        files = _files_of(pid)
        try:
            program = os.stat(f"{live_path(pid)}/exe").st_ino
        except OSError:
            return
        todo, rest = [m for m in files if m.inode == program], [m for m in files if not _is_own(m)]
        seen: set[str] = set()
        for mapping in todo:
            # The program has the parser's usual time, for the parser may only be starting.
            imports = self._imports(pid, mapping, None if mapping.inode == program else LIBRARY_DEADLINE_S)
            yield mapping, imports
            stems = {_stem(name) for name in imports.needed} - seen
            seen |= stems
            found = [m for m in rest if m not in todo and _stem(m.path) in stems]
            todo += found[: MAX_LINKED - len(todo)]

    def _imports(self, pid: int, mapping: Mapping, deadline_s: float | None) -> Imports:
        try:
            fd = open_mapping(pid, mapping)
        except OSError:
            return NOTHING
        try:
            return self._of_file(fd, deadline_s)
        finally:
            os.close(fd)

    def _of_file(self, fd: int, deadline_s: float | None) -> Imports:
        info = os.fstat(fd)
        key = (info.st_dev, info.st_ino, info.st_mtime_ns, info.st_ctime_ns, info.st_size)
        if key not in self._files:
            if len(self._files) >= MAX_KNOWN:
                self._files.clear()
            found = NOTHING
            with contextlib.suppress(ParserFailed):  # no file that the loader would take, or a parser that was busy
                found = self._parser.imports(fd, [CANCEL], deadline_s=deadline_s)
            if found is NOTHING and deadline_s is None:
                return found  # a program is asked about again: its threads' lives may hang on the answer
            self._files[key] = found
        return self._files[key]


def _files_of(pid: int) -> list[Mapping]:
    """One mapping of each file, in the order of addresses; empty when the process is gone."""
    try:
        mappings = executable_mappings(pid)
    except OSError:
        return []
    return list({(m.device, m.inode): m for m in reversed(mappings)}.values())[::-1]


def _stem(path: str) -> str:
    """What a file's name has in common with that of the symbolic link by which a program is linked with it."""
    return path.rpartition("/")[2].partition(".so")[0]


def _is_own(mapping: Mapping) -> bool:
    return match(mapping.path) is not None or _OWN.match(mapping.path.rpartition("/")[2]) is not None

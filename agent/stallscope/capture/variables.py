"""Where variables of a traced program's files lie in its memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from stallscope.capture.mapped import open_mapping
from stallscope.capture.parser_client import Objects, ParserClient, ParserFailed
from stallscope.capture.procfs import Mapping

__all__ = ["Variables", "address_in"]

PAGE = 4096
MAX_FILES, MAX_TRIES = 256, 2
DEADLINE_S = 1.0
NOTHING = Objects({}, [])


class Variables:
    """Asks the parser once a file for variables of some names.

    Args:
        names: at most 8.
    """

    def __init__(self, parser: ParserClient, names: Sequence[str]) -> None:
        self._parser, self._names = parser, names
        self._files: dict[tuple[int, ...], Objects] = {}
        self._failures: Counter[tuple[int, ...]] = Counter()

    def of(self, pid: int, mapping: Mapping) -> Objects | None:
        """What the mapped file defines; a file that can't be read defines nothing. None: the parser was held up, ask
        again."""
        try:
            fd = open_mapping(pid, mapping)
        except OSError:
            return NOTHING
        try:
            info = os.fstat(fd)
            key = (info.st_dev, info.st_ino, info.st_mtime_ns, info.st_size)
            if key not in self._files:
                if len(self._files) >= MAX_FILES:
                    self._files.clear()
                    self._failures.clear()
                self._ask(fd, key)
            return self._files.get(key)
        finally:
            os.close(fd)

    def _ask(self, fd: int, key: tuple[int, ...]) -> None:
        try:
            self._files[key] = self._parser.objects(fd, self._names, deadline_s=DEADLINE_S)
        except (ParserFailed, OSError) as problem:
            # One that can't be read tells as much as one without such a variable. A parser that was held up may do
            # better the next time, and not for ever: meanwhile nobody drains the rings.
            self._failures[key] += 1
            if not (isinstance(problem, ParserFailed) and problem.died) or self._failures[key] >= MAX_TRIES:
                self._files[key] = NOTHING


def address_in(objects: Objects, mapping: Mapping, names: Sequence[str]) -> int | None:
    """Where the first of the names that the file defines lies, by where one executable segment of it was mapped."""
    vaddr = next((objects.vaddrs[name] for name in names if name in objects.vaddrs), None)
    if vaddr is None:
        return None
    for begin, size, offset in objects.exec_segments:
        if offset // PAGE * PAGE <= mapping.offset < offset + size:
            return mapping.start - mapping.offset + offset - begin + vaddr
    return None

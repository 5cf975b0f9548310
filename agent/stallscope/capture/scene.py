"""A process's code as the parser wants it to unwind stacks: executable ranges and the files behind them."""

from __future__ import annotations

import bisect
import os
import struct

from stallscope.capture.blocked import read_memory
from stallscope.capture.mapped import open_mapping
from stallscope.capture.procfs import Mapping, executable_mappings, vdso_of

__all__ = ["Scene"]

MAX_FILES, MAX_OPEN = 32, 64
MAX_VDSO = 64 << 10


class Scene:
    """What is the same for all threads of one process: executable ranges, files, hook addresses.

    Attributes:
        hooks: (hook id, address, size in bytes) each.
    """

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
    def of(cls, pid: int, hooks: list[tuple[int, int, int]]) -> Scene | None:
        """None when the process is gone, has ended, or may not be read."""
        try:
            mappings = executable_mappings(pid)
            place = vdso_of(pid)
        except OSError:
            return None
        if not mappings:
            return None
        # Threads that spin on the clock are mostly there.
        vdso = Mapping(*place, 0, (0, 0), 0, "[vdso]") if place and place[1] - place[0] <= MAX_VDSO else None
        mappings = sorted([*mappings, vdso] if vdso else mappings)
        return cls(pid, mappings, hooks, vdso)

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

    def path_of(self, address: int) -> str:
        """Path of the file that is mapped at an address, as the process's maps show it; "" where there is none."""
        index = self._index(address)
        return self._mappings[index].path if index is not None else ""

    def _index(self, address: int) -> int | None:
        index = bisect.bisect_right(self._starts, address) - 1
        return index if index >= 0 and address < self._mappings[index].end else None

    def _open(self, index: int) -> int | None:
        if index not in self._fds:
            if len(self._fds) >= MAX_OPEN:
                return None
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
        while self._fds:
            os.close(self._fds.popitem()[1])

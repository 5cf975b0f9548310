"""What a file defines: asked of the parser once a file, and once for all copies of a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from stallscope.capture.parser_client import ParserClient, ParserFailed
from stallscope.capture.target import Point, Resolved
from stallscope.wire.hook_table import BY_NAME, HOOKS

__all__ = ["RUNTIME_WORD", "Resolver", "is_whole"]

# What only an implementation has, not a library that stands before one and passes calls on.
SENTINELS = {
    "CUDART": ("cudaLaunchKernel", "cudaGetErrorName"),
    "NCCL": ("ncclAllReduce", "ncclGetErrorString"),
}
# The name of an error code in the data of a file without symbols: it carries a CUDA runtime.
RUNTIME_WORD = "cudaErrorInsufficientDriver"
# How functions of a statically linked runtime are called; the driver is called from those that are not the API.
RUNTIME_PREFIXES = ("libcudart_static_", "__cudart", "cuda", "__cuda")
ENDBR64 = b"\xf3\x0f\x1e\xfa"
GET_VERSION = "ncclGetVersion"
MAX_KNOWN, MAX_TRIES = 4096, 2
EVERY = frozenset(("CUDART", "CUDA", "NCCL"))


class Resolver:
    """Asks the parser and remembers.

    Args:
        parser: asked once a file.

    Attributes:
        parsed: how many times symbol tables were searched, for tests and for curiosity.
    """

    def __init__(self, parser: ParserClient) -> None:
        self._parser = parser
        self._files: dict[tuple[Any, ...], Resolved] = {}
        self._copies: dict[tuple[Any, ...], Resolved] = {}
        self._failed: dict[tuple[Any, ...], list[ParserFailed]] = {}
        self.parsed = 0

    def resolve(self, fd: int, libraries: frozenset[str], *, deadline_s: float | None = None) -> Resolved:
        """Which hooks of the libraries the file defines, and where. Raises ParserFailed, OSError."""
        info = os.fstat(fd)
        key = (info.st_dev, info.st_ino, info.st_mtime_ns, info.st_ctime_ns, info.st_size, libraries)
        if key not in self._files:
            if len(self._files) + len(self._failed) >= MAX_KNOWN:
                self._files.clear()
                self._copies.clear()
                self._failed.clear()
            self._files[key] = self._once(key, lambda: self._from_copy(fd, info.st_size, libraries, deadline_s))
        return self._files[key]

    def _once(self, key: tuple[Any, ...], ask: Callable[[], Resolved]) -> Resolved:
        """Not for each process anew about a file that the parser refuses or that holds it up for seconds."""
        failures = self._failed.setdefault(key, [])
        if failures and (not failures[-1].died or len(failures) >= MAX_TRIES):
            last = failures[-1]  # not raised itself: its traceback would grow each time
            raise ParserFailed(last.what, last.object, last.why, died=last.died)
        try:
            found = ask()
        except ParserFailed as failure:
            failures.append(failure)
            raise
        del self._failed[key]
        return found

    def _from_copy(self, fd: int, size: int, libraries: frozenset[str], deadline_s: float | None) -> Resolved:
        """The build id says which files may be copies of each other, the digest of the tables whether they are.

        Believing the id alone, a file made to bear another one's id would place breakpoints in the middle of the
        other's instructions.
        """
        head = self._parser.symbols(fd, [], deadline_s=deadline_s)
        key = (head.build_id, head.digest, size, libraries)
        known = self._copies.get(key) if head.build_id else None
        if known is None or not _same_starts(fd, known.points):
            known = self._copies[key] = self._ask(fd, libraries, deadline_s)
        return known

    def _ask(self, fd: int, libraries: frozenset[str], deadline_s: float | None) -> Resolved:
        self.parsed += 1
        names = {hook.name for hook in HOOKS if hook.mode != "SHIM" and hook.library in libraries}
        names |= {name for library in libraries for name in SENTINELS.get(library, ())}
        names |= {GET_VERSION} if "NCCL" in libraries else set()
        answer = self._parser.symbols(
            fd, sorted(names), words=[RUNTIME_WORD], prefixes=RUNTIME_PREFIXES, deadline_s=deadline_s
        )
        return Resolved(
            answer.build_id,
            _points(answer.symbols),
            sorted(name for name in answer.rejected if name in BY_NAME),
            answer.stripped,
            rejected=dict(answer.rejected),
            defined=frozenset(answer.symbols),
            has_runtime_words=bool(answer.words),
            hull=answer.hull,
            notes=answer.notes,
            nccl_version=answer.nccl_version,
        )


def is_whole(resolved: Resolved, library: str) -> bool:
    """Whether the file carries the library itself."""
    return resolved.defined.issuperset(SENTINELS[library])


def _points(symbols: dict[str, Any]) -> list[Point]:
    points: dict[int, Point] = {}
    for name in sorted((n for n in symbols if n in BY_NAME), key=lambda n: BY_NAME[n].id):
        s = symbols[name]
        # Aliases share an address; two probes on one address would fire twice.
        points.setdefault(s.probe_offset, Point(BY_NAME[name], s.probe_offset, s.symbol_offset, s.size))
    return list(points.values())


def _same_starts(fd: int, points: Sequence[Point]) -> bool:
    """Whether a probe stands behind an endbr64 in this file too: that part of the answer came from the code."""
    marked = ((p, os.pread(fd, 4, p.symbol_offset) == ENDBR64) for p in points)
    return all(is_marked == (p.probe_offset != p.symbol_offset) for p, is_marked in marked)

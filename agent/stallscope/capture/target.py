"""One traced process and what is linked in it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stallscope.capture.procfs import Facts
from stallscope.wire.hook_table import Hook

__all__ = ["InferredCall", "LinkedLibrary", "Point", "Resolved", "Target"]


class Point(NamedTuple):
    """One hook in one file: where the probe goes, where the symbol is (file offsets), its size in bytes."""

    hook: Hook
    probe_offset: int
    symbol_offset: int
    size: int


class Resolved(NamedTuple):
    """What the parser said about a file; `missing`: functions it defines where no probe can stand.

    `left_out` names the functions that the kernel leaves no room for.
    """

    build_id: str | None
    points: list[Point]
    missing: list[str]
    stripped: bool
    left_out: str | None = None


@dataclass
class LinkedLibrary:
    """One library file linked in one process.

    Attributes:
        shared: the file's unfiltered links do it, since `shared_since_ns`; there are none of this process alone.
        untimed: why returns are not probed, None where they are (capture/seccomp.py).
        text: where the runtime's code lies in the file (offsets), None for other libraries.
        fd: the file itself, so that a forked child can be linked without another look-up.
        hooks: hook id -> (absolute address of the function, its size in bytes), for the stack search.
        entries, returns: link objects, closed entries first.
    """

    library: str
    path: str
    hooks: dict[int, tuple[int, int]] = field(default_factory=dict)
    entries: list[Any] = field(default_factory=list)
    returns: list[Any] = field(default_factory=list)
    resolved: Resolved = field(default=Resolved(None, [], [], False))
    fd: int = -1
    at_ns: int = 0
    shared: bool = False
    shared_since_ns: int = 0
    text: tuple[int, int] | None = None
    untimed: str | None = None

    def close(self) -> None:
        """Let the file go; links are closed by who detaches them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass
class InferredCall:
    """A call under way since before the link, as found on the thread's stack.

    Attributes:
        seen: (sp, pc, checksum of the stack below the slot) when its frame was last found; None while the thread runs.
    """

    tid: int
    hook: int
    slot_addr: int
    return_addr: int
    since_ns: int
    seen: tuple[int, int, int] | None = None


@dataclass
class Target:
    """A process under observation; `proc` is its key in the report, `slot` its index in the BPF tables."""

    proc: int
    slot: int
    facts: Facts
    parent: int | None
    pidfd: int
    appeared_ns: int
    linked: dict[tuple[tuple[int, int], int], LinkedLibrary] = field(default_factory=dict)
    refused: set[tuple[tuple[int, int], int]] = field(default_factory=set)
    ranges: list[tuple[int, int]] = field(default_factory=list)
    inferred: list[InferredCall] = field(default_factory=list)
    late_notes: list[str] = field(default_factory=list)
    ended: bool = False

    @property
    def pid(self) -> int:
        """The host's pid."""
        return self.facts.pid

    def links(self) -> tuple[list[Any], list[Any]]:
        """(entry links, return links) of all libraries."""
        libraries = self.linked.values()
        return [x for lib in libraries for x in lib.entries], [x for lib in libraries for x in lib.returns]

    def close(self) -> None:
        """Let the descriptors go; links are closed by who detaches them."""
        for library in self.linked.values():
            library.close()
        if self.pidfd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.pidfd)
            self.pidfd = -1

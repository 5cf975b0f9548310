"""One traced process and what is linked in it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stallscope.capture.procfs import Facts, Mapping
from stallscope.wire.hook_table import Hook

__all__ = [
    "MAX_PID",
    "FileKey",
    "InferredCall",
    "LinkedLibrary",
    "Point",
    "Resolved",
    "Target",
    "Unasked",
    "inherited_facts",
]

MAX_PID = 1 << 22  # PID_MAX_LIMIT of the kernel
# (device, inode, "" or the library that it carries under another name)
FileKey = tuple[tuple[int, int], int, str]


class Point(NamedTuple):
    """One hook in one file: where the probe goes, where the symbol is (file offsets), its size in bytes."""

    hook: Hook
    probe_offset: int
    symbol_offset: int
    size: int


class Resolved(NamedTuple):
    """What the parser said about a file.

    Attributes:
        missing: hooks that it defines where no probe can stand.
        stripped: it has no .symtab.
        rejected: hook -> why no probe can stand there.
        defined: every name asked for that it defines.
        has_runtime_words: its data is that of a CUDA runtime, whatever its symbols say.
        hull: file offsets [from, to) of a runtime that was linked into it, its inner functions included.
        notes: what of the file could not be read.
        left_out: names the functions that the kernel leaves no room for.
        nccl_version: "2.27.5" where the file is an NCCL or has one inside.
    """

    build_id: str | None
    points: list[Point]
    missing: list[str]
    stripped: bool
    left_out: str | None = None
    rejected: dict[str, str] = {}  # noqa: RUF012 - never written to
    defined: frozenset[str] = frozenset()
    has_runtime_words: bool = False
    hull: tuple[int, int] | None = None
    notes: Sequence[str] = ()
    nccl_version: str | None = None


@dataclass
class LinkedLibrary:
    """One library file linked in one process.

    Attributes:
        shared: the file's unfiltered links do it, since `shared_since_ns`; there are none of this process alone.
        untimed: why returns are not probed, None where they are (capture/returns.py).
        text: where the runtime's code lies in the file (offsets), None for other libraries.
        fd: the file itself, so that a forked child can be linked without another look-up.
        places: (hook id, absolute address of the function, its size in bytes), for the stack search. A file that is
            mapped twice (dlmopen) has two of each.
        carried: its file bears another name: the library was linked into it.
        embedded: it shares the file's code with what is not the library: a program or a carrier.
        by_shim: how many of its functions the shim stands before; no probe is in it then.
        entries, returns: link objects, closed entries first.
    """

    library: str
    path: str
    places: set[tuple[int, int, int]] = field(default_factory=set)
    entries: list[Any] = field(default_factory=list)
    returns: list[Any] = field(default_factory=list)
    resolved: Resolved = field(default=Resolved(None, [], [], False))
    fd: int = -1
    at_ns: int = 0
    shared: bool = False
    shared_since_ns: int = 0
    text: tuple[int, int] | None = None
    untimed: str | None = None
    carried: bool = False
    embedded: bool = False
    by_shim: int = 0

    @property
    def known_as(self) -> str:
        """Which of the parts of its file this is, as in FileKey."""
        return self.library if self.carried else ""

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
class Unasked:
    """Mapped files that bear no name of ours and may carry a library all the same (capture/carriers.py).

    Attributes:
        waiting: file -> (its mapping, since when it is there unseen or None).
        asked: files that need not be looked at again.
        spent_ns: time that it took so far.
    """

    waiting: dict[FileKey, tuple[Mapping, int | None]] = field(default_factory=dict)
    asked: set[FileKey] = field(default_factory=set)
    spent_ns: int = 0
    stopped: bool = False


@dataclass
class Target:
    """A process under observation; `proc` is its key in the report, `slot` its index in the BPF tables.

    `silent`: path of each file with a runtime that has no symbols, until it was told. `twins`: files that are
    linked already under another key. `counted_ns`: when its counters were last seen to have changed, polling for
    events left out. `used_nccl`: whether it called NCCL while it was traced. `preloaded`: its image has the shim
    loaded. `rank_words`: what its environment said of its rank, None until that was read.
    """

    proc: int
    slot: int
    facts: Facts
    parent: int | None
    pidfd: int
    appeared_ns: int
    linked: dict[FileKey, LinkedLibrary] = field(default_factory=dict)
    refused: set[FileKey] = field(default_factory=set)
    unasked: Unasked = field(default_factory=Unasked)
    silent: dict[FileKey, str] = field(default_factory=dict)
    twins: dict[FileKey, FileKey] = field(default_factory=dict)
    ranges: list[tuple[int, int]] = field(default_factory=list)
    inferred: list[InferredCall] = field(default_factory=list)
    late_notes: list[str] = field(default_factory=list)
    preloaded: bool = False
    counted_ns: int = 0
    used_nccl: bool = False
    rank_words: dict[str, str] | None = None
    ended: bool = False

    @property
    def pid(self) -> int:
        """As this pid namespace numbers it; one that is not visible here has a number that no process can have."""
        return self.facts.pid

    @property
    def shown_pid(self) -> int:
        """What people are told: of one that is not visible here, the pid that it has in its own namespace."""
        return self.facts.pid if self.facts.pid <= MAX_PID else self.facts.ns_pid or 0

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


def inherited_facts(pid: int, ppid: int, parent: Target | None, start_ns: int) -> Facts:
    """What a forked child is before it could be looked at: its parent's image."""
    if parent is None:
        return Facts(pid, None, ppid, "?", [], None, start_ns, 0)
    facts = parent.facts
    return Facts(pid, None, ppid, facts.name, facts.cmdline, facts.container_id, start_ns, facts.uid)

"""How a file is probed: by one link a process and program, or, when many processes map it, by unfiltered links.

Filtered links leave other processes alone, but every link on an address costs every hit of it (about 40 ns). So beyond
LINKS_PER_FILE processes one unfiltered set takes over, and the table of traced processes filters in BPF.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stallscope.capture.procfs import is_leaderless
from stallscope.capture.target import LinkedLibrary, Point, Target
from stallscope.capture.ways import NO_LIMIT, Way
from stallscope.wire.hook_table import Hook

__all__ = ["LINKS_PER_FILE", "NO_FILE", "Sharing", "program_of"]

LINKS_PER_FILE = 8
A_SECOND, SECOND_NS = 16, 1_000_000_000  # so many processes that begin to use a file make it crowded, too
IDLE_NS = 5_000_000_000
NO_FILE = 31
_SHARED_FLAG = 64 << 32
RealFile = tuple[int, int, str | None, str]


def program_of(hook: Hook) -> str:
    """Name of the BPF program for the hook's entry."""
    return "launch" if hook.mode == "ENTRY" else "enter"


def entry_only(points: list[Point]) -> list[Point]:
    """Points as they are counted without return probes."""
    # ncclBcast calls ncclBroadcast: with nothing known about returns, each call would count twice.
    return [p._replace(hook=p.hook._replace(mode="ENTRY")) for p in points if p.hook.name != "ncclBcast"]


@dataclass
class _File:
    """One real file: its number in cookies, who is linked by links of his own, the unfiltered links once there are, and
    who is seen by these; since when there has been nobody."""

    number: int
    users: list[LinkedLibrary] = field(default_factory=list)
    shared: LinkedLibrary | None = None
    sharers: list[LinkedLibrary] = field(default_factory=list)
    idle_ns: int = 0
    newest_ns: deque[int] = field(default_factory=lambda: deque(maxlen=A_SECOND))

    def is_stormy(self, now: int) -> bool:
        """Whether one more process makes too many in a second: each pays 0.5 ms for links and most never call."""
        self.newest_ns.append(now)
        return len(self.newest_ns) == A_SECOND and now - self.newest_ns[0] < SECOND_NS


class Sharing:
    """Makes the links.

    Args:
        way: what kind of links.
        set_shared: tells BPF whether the unfiltered links of a file number count from now on.
        set_span: (file number, hook, bytes before, bytes after) tells BPF how far the runtime reaches.
        clock: CLOCK_MONOTONIC in ns.
        close_later: takes (entry links, return links) that are no longer needed.
        limit: filtered links a file before the unfiltered ones take over.
        returns_anywhere: unfiltered links may have return probes (capture/seccomp.py).
    """

    def __init__(
        self,
        way: Way,
        set_shared: Callable[[int, bool], None],
        close_later: Callable[[list[Any], list[Any]], None],
        set_span: Callable[[int, int, int, int], None],
        clock: Callable[[], int],
        limit: int = LINKS_PER_FILE,
        *,
        returns_anywhere: bool = True,
    ) -> None:
        self._clock = clock
        self._set_span = set_span
        self._way = way
        self._returns_anywhere = returns_anywhere
        self._set_shared = set_shared
        self._close_later = close_later
        self._limit = min(limit, way.max_filtered)
        self.method = way.method
        self.choose = way.choose
        self._files: dict[RealFile, _File] = {}

    def link(self, target: Target, linked: LinkedLibrary) -> None:
        """Probe the library in the process. Raises StallscopeError; then nothing of it is linked.

        Afterwards `linked.shared` says whether the unfiltered links do it: then every call of the process is seen from
        its first on.
        """
        file = self._file(linked)
        if file.shared is None and file.number != NO_FILE and (why := self._why_unfiltered(target, file)):
            self._take_over(target, file, linked, why)
        if file.shared is not None:
            linked.shared, linked.shared_since_ns = True, file.shared.at_ns
            file.sharers.append(linked)
            if linked.untimed and not file.shared.untimed:
                target.late_notes.append(f"{linked.path}: returns are probed, because they are in all processes")
            linked.untimed = file.shared.untimed
            return
        self._attach(linked, linked.resolved.points, target.pid, file.number << 56)
        file.users.append(linked)
        target.late_notes += [note for link in linked.entries + linked.returns for note in link.notes]

    def forget(self, linked: LinkedLibrary) -> None:
        """The process has ended; its own links are closed by the caller."""
        for file in self._files.values():
            file.users = [user for user in file.users if user is not linked]
            if any(user is linked for user in file.sharers):
                file.sharers = [user for user in file.sharers if user is not linked]
                file.idle_ns = self._clock()

    def let_go_of_idle(self) -> None:
        """Forget files that no traced process has needed for a while, and close their unfiltered links: strangers pay.

        Only then is a number free: threads remember which files' unfiltered links count for them, and all that used the
        file have ended.
        """
        now = self._clock()
        for key, file in list(self._files.items()):
            if file.sharers or file.users or now - file.idle_ns <= IDLE_NS:
                continue
            if file.shared is not None:
                self._set_shared(file.number, False)
                self._close_later(file.shared.entries, file.shared.returns)
            del self._files[key]

    def links(self) -> tuple[list[Any], list[Any]]:
        """(entry, return) unfiltered links."""
        shared = [file.shared for file in self._files.values() if file.shared is not None]
        return [x for s in shared for x in s.entries], [x for s in shared for x in s.returns]

    def _file(self, linked: LinkedLibrary) -> _File:
        # Not the device: an overlay shows its own, while probes go to the one inode below it.
        info = os.fstat(linked.fd)
        key = (info.st_ino, info.st_size, linked.resolved.build_id, linked.known_as)
        if key not in self._files:
            # A number is not used twice: threads remember which files' unfiltered links count for them.
            used = {file.number for file in self._files.values()}
            self._files[key] = _File(min(set(range(NO_FILE)) - used, default=NO_FILE))
            self._tell_spans(self._files[key].number, linked)
        return self._files[key]

    def _tell_spans(self, number: int, linked: LinkedLibrary) -> None:
        if linked.text is None or number == NO_FILE:
            return
        start, end = linked.text
        for p in linked.resolved.points:
            if p.hook.library == "CUDART":
                self._set_span(number, p.hook.id, p.probe_offset - start, end - p.probe_offset)

    def _take_over(self, target: Target, file: _File, linked: LinkedLibrary, why: str) -> None:
        """Unfiltered links first, then the switch, then the filtered ones go: no hit is lost or counted twice."""
        shared = LinkedLibrary(linked.library, linked.path, resolved=linked.resolved, fd=linked.fd)
        # One process that may have no return probes is enough.
        shared.untimed = next((lib.untimed for lib in (linked, *file.users) if lib.untimed), None)
        if not self._returns_anywhere:
            shared.untimed = "calls are counted, not timed: other processes that use the file may have a seccomp filter"
        self._attach(shared, linked.resolved.points, 0, file.number << 56 | _SHARED_FLAG)
        file.shared = shared
        self._set_shared(file.number, True)
        shared.at_ns = self._clock()
        for user in file.users:
            self._close_later(user.entries, user.returns)
            user.entries, user.returns, user.shared = [], [], True
            file.sharers.append(user)
        target.late_notes.append(
            f"{linked.path}: {why}, so its probes are no longer limited to the traced "
            "processes: another process that uses the same file pays about a microsecond a call"
        )
        target.late_notes += [note for link in shared.entries + shared.returns for note in link.notes]
        file.users = []

    def _why_unfiltered(self, target: Target, file: _File) -> str | None:
        """Why links of the process's own will not do; None where they do."""
        is_stormy = file.is_stormy(self._clock())
        if not self._limit:
            return "this kernel has no link cookies"
        if is_leaderless(target.pid):
            return "the main thread has ended"
        if len(file.users) >= self._limit:
            return f"more than {self._limit} processes use it"
        return f"{A_SECOND} processes began to use it within a second" if is_stormy and self._limit < NO_LIMIT else None

    def _attach(self, linked: LinkedLibrary, points: list[Point], pid: int, bits: int) -> None:
        if linked.untimed:
            points = entry_only(points)
        # Returns first: a call whose entry is seen must not lose its return.
        pairs = [p for p in points if p.hook.mode == "PAIR"]
        try:
            if pairs:
                linked.returns.append(self._way.attach("pair_return", linked.fd, pairs, pid, bits))
                returning = set(linked.returns[0].offsets)
                points = [p for p in points if p.hook.mode != "PAIR" or p.probe_offset in returning]
            for name in ("launch", "enter"):
                chosen = [p for p in points if program_of(p.hook) == name]
                if chosen:
                    linked.entries.append(self._way.attach(name, linked.fd, chosen, pid, bits))
        except BaseException:
            for link in linked.entries + linked.returns:
                link.close()
            linked.entries, linked.returns = [], []
            raise

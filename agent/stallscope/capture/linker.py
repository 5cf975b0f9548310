"""From a mapped file to linked probes: which file, which symbols, which offsets."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Any

from stallscope.capture.libmatch import match
from stallscope.capture.parser_client import ParserClient, ParserFailed
from stallscope.capture.procfs import Mapping, clean, executable_mappings, live_path
from stallscope.capture.seccomp import ReturnRule
from stallscope.capture.sharing import Sharing
from stallscope.capture.target import LinkedLibrary, Point, Resolved, Target
from stallscope.errors import StallscopeError, TargetProblem
from stallscope.wire.frames import Kind
from stallscope.wire.hook_table import BY_NAME, HOOKS, Hook

__all__ = ["Linker", "open_mapping"]

MAX_RANGES = 4
MAX_TRIES = 2
FileKey = tuple[tuple[int, int], int]


def wanted(library: str | None) -> list[Hook]:
    """Hooks to look for in a library of that kind; None = a program that may hold a static runtime."""
    return [hook for hook in HOOKS if hook.mode != "SHIM" and library in (None, hook.library)]


class Linker:
    """Links hooks of mapped files into one process at a time.

    Args:
        sharing: makes the links.
        set_ranges: (slot, [(start, end)]) writes the runtime address ranges that mark driver calls as nested.
        send: takes frames.
        clock: CLOCK_MONOTONIC in ns.
        rule: which processes get no return probes.

    Attributes:
        before_link: sends the counters as they are, so that a reader can tell calls before a link from those after it.
    """

    def __init__(
        self,
        sharing: Sharing,
        parser: ParserClient,
        set_ranges: Callable[[int, list[tuple[int, int]]], None],
        send: Callable[[Kind, dict[str, Any]], None],
        clock: Callable[[], int],
        rule: ReturnRule | None = None,
    ) -> None:
        self._rule = rule or ReturnRule()
        self._sharing = sharing
        self._parser = parser
        self._set_ranges = set_ranges
        self._send = send
        self._clock = clock
        self._known: dict[tuple[int, int, int, int], Resolved] = {}
        self._failed: dict[tuple[int, int, int, int], list[ParserFailed]] = {}
        self.before_link: Callable[[Target, int], None] | None = None

    def link_process(self, target: Target, appeared_ns: int | None) -> int:
        """Link all that is mapped now; the number of newly linked files. A process that is gone links nothing.

        Args:
            appeared_ns: since when it could make calls unseen; None for what ran before the capture did: its
                observation simply begins now.
        """
        try:
            mappings = executable_mappings(target.pid)
            program = os.stat(f"{live_path(target.pid)}/exe").st_ino
        except OSError:
            return 0
        return sum(self.link_mapping(target, m, appeared_ns, m.inode == program) for m in mappings)

    def link_forked(self, target: Target, parent: Target) -> None:
        """Link in a forked child what is linked in its parent, without looking at anything or telling anybody first.

        The child runs already and each hundred microseconds may be a call unseen: its mappings are its parent's.
        `announce` tells it afterwards.
        """
        for key, theirs in parent.linked.items():
            linked = LinkedLibrary(
                theirs.library, theirs.path, dict(theirs.hooks), resolved=theirs.resolved, text=theirs.text
            )
            try:
                linked.fd, linked.untimed = os.dup(theirs.fd), self._rule.why_not(target.pid)
                self._sharing.link(target, linked)
            except (OSError, StallscopeError) as error:
                linked.close()
                if not isinstance(error, TargetProblem):
                    target.late_notes.append(f"{linked.path} is not linked: {error}")
                continue
            linked.at_ns = self._clock()
            target.linked[key] = linked
        target.ranges = list(parent.ranges)
        self._set_ranges(target.slot, target.ranges)

    def announce(self, target: Target, appeared_ns: int) -> None:
        """Tell of everything `link_forked` linked."""
        for linked in target.linked.values():
            self._announce(target, linked, appeared_ns)
        self._tell_notes(target)

    def _tell_notes(self, target: Target) -> None:
        for note in target.late_notes:
            self._note(target, note)
        target.late_notes.clear()

    def link_mapping(self, target: Target, mapping: Mapping, appeared_ns: int | None, is_program: bool = False) -> bool:
        """Link one executable mapping if it holds hooks; True when something new was linked."""
        library = match(mapping.path)
        if library is None and not is_program:
            return False
        key = (mapping.device, mapping.inode)
        if key in target.refused:
            return False
        if key in target.linked:
            self._moved(target, target.linked[key], mapping, static=library is None)
            return False
        try:
            return self._link_file(target, mapping, library, key, appeared_ns)
        except (ProcessLookupError, TargetProblem):
            return False  # it has ended
        except (OSError, StallscopeError, ParserFailed) as error:
            target.refused.add(key)
            self._note(target, f"{clean(mapping.path)} is not linked: {error}")
            if library is not None:  # its calls are unseen from here on, and no number may look as if they were not
                now = self._clock()
                self._gap(target, appeared_ns or now, now, f"{library} could not be linked")
            return False

    def _link_file(
        self, target: Target, mapping: Mapping, library: str | None, key: FileKey, appeared_ns: int | None
    ) -> bool:
        fd = open_mapping(target.pid, mapping)
        try:
            resolved = self._resolve(target, fd, library, clean(mapping.path))
            if not resolved.points:
                target.refused.add(key)
                if resolved.left_out:
                    self._note(target, resolved.left_out)
                elif library is not None:
                    self._note(target, f"{clean(mapping.path)} looks like {library} and defines none of its functions")
                os.close(fd)
                return False
            name = library or resolved.points[0].hook.library
            linked = LinkedLibrary(name, clean(mapping.path), resolved=resolved, fd=fd)
            linked.untimed = self._rule.why_not(target.pid)
            self._add_ranges(target, linked, mapping, resolved.points, static=library is None)
            self._sharing.link(target, linked)
        except BaseException:
            os.close(fd)
            raise
        self._place(linked, mapping, resolved.points)
        linked.at_ns = self._clock()
        target.linked[key] = linked
        self._announce(target, linked, appeared_ns)
        self._tell_notes(target)
        return True

    def _announce(self, target: Target, linked: LinkedLibrary, appeared_ns: int | None) -> None:
        now, resolved = linked.at_ns, linked.resolved
        if linked.shared and appeared_ns is not None:
            # The unfiltered links may have come after the library.
            now = max(appeared_ns, min(now, linked.shared_since_ns))
        if self.before_link is not None:
            self.before_link(target, now)
        self._send(
            Kind.LINK,
            {"proc": target.proc, "library": linked.library, "path": linked.path, "build_id": resolved.build_id,
             "hooks": sorted(p.hook.id for p in resolved.points), "at_ns": now,
             "appeared_ns": now if appeared_ns is None else appeared_ns,
             "method": self._sharing.method, "missing": resolved.missing, "untimed": bool(linked.untimed)},
        )  # fmt: skip
        if linked.untimed:
            self._note(target, f"{linked.path}: {linked.untimed}")
        if appeared_ns is None or appeared_ns == now:
            return
        self._gap(target, appeared_ns, now, f"{linked.library} not linked yet")

    def _gap(self, target: Target, from_ns: int, to_ns: int, reason: str) -> None:
        body = {"source": "link", "proc": target.proc, "count": None, "from_ns": from_ns, "to_ns": to_ns}
        self._send(Kind.GAP, {**body, "reason": reason})

    def _resolve(self, target: Target, fd: int, library: str | None, path: str) -> Resolved:
        info = os.fstat(fd)
        key = (info.st_dev, info.st_ino, info.st_mtime_ns, info.st_size)
        if key not in self._known:
            for table in (self._known, self._failed):
                if len(table) >= 1024:
                    table.clear()
            found = self._ask(key, fd, library)
            points, left_out = self._sharing.choose(path, found.points)
            if left_out and points:
                target.late_notes.append(left_out)
            self._known[key] = found._replace(points=points, left_out=left_out)
        return self._known[key]

    def _ask(self, key: tuple[int, int, int, int], fd: int, library: str | None) -> Resolved:
        """Ask the parser, but not for each process about a file that it refuses or that holds it up for seconds."""
        failures = self._failed.setdefault(key, [])
        if failures and (not failures[-1].died or len(failures) >= MAX_TRIES):
            last = failures[-1]  # not raised itself: its traceback would grow each time
            raise ParserFailed(last.what, last.object, last.why, died=last.died)
        try:
            answer = self._parser.symbols(fd, [hook.name for hook in wanted(library)])
        except ParserFailed as failure:
            failures.append(failure)
            raise
        del self._failed[key]
        return Resolved(answer.build_id, _points(answer.symbols), sorted(answer.rejected), answer.stripped)

    def _add_ranges(
        self, target: Target, linked: LinkedLibrary, mapping: Mapping, points: list[Point], *, static: bool
    ) -> None:
        if linked.library != "CUDART":
            return
        start, end = mapping.start, mapping.end
        if static:
            # A static runtime shares the program's text: only the hull of its functions is the runtime, or the
            # program's own driver calls would count as the runtime's.
            places = [p.symbol_offset for p in points if p.hook.library == "CUDART"]
            ends = [p.symbol_offset + p.size for p in points if p.hook.library == "CUDART"]
            start, end = (mapping.start - mapping.offset + x for x in (min(places), max(ends)))
        linked.text = (start - mapping.start + mapping.offset, end - mapping.start + mapping.offset)
        if len(target.ranges) >= MAX_RANGES:
            self._note(
                target, f"more than {MAX_RANGES} runtimes: driver calls from {linked.path} count as calls of their own"
            )
            return
        target.ranges.append((start, end))
        self._set_ranges(target.slot, target.ranges)

    def _place(self, linked: LinkedLibrary, mapping: Mapping, points: list[Point]) -> None:
        for p in points:
            address = mapping.start + p.symbol_offset - mapping.offset
            if mapping.start <= address < mapping.end:
                linked.hooks[p.hook.id] = (address, p.size)

    def _moved(self, target: Target, linked: LinkedLibrary, mapping: Mapping, *, static: bool) -> None:
        """A linked file mapped again (after exec, or twice): its links hold, its addresses are new."""
        points = linked.resolved.points
        if not any(mapping.start <= address < mapping.end for address, _ in linked.hooks.values()):
            self._add_ranges(target, linked, mapping, points, static=static)
            self._place(linked, mapping, points)

    def _note(self, target: Target, text: str) -> None:
        self._send(Kind.NOTE, {"at_ns": self._clock(), "proc": target.proc, "text": text})


def _points(symbols: dict[str, Any]) -> list[Point]:
    points: dict[int, Point] = {}
    for name in sorted(symbols, key=lambda n: BY_NAME[n].id):
        s = symbols[name]
        # Aliases share an address; two probes on one address would fire twice.
        points.setdefault(s.probe_offset, Point(BY_NAME[name], s.probe_offset, s.symbol_offset, s.size))
    return list(points.values())


def open_mapping(pid: int, mapping: Mapping) -> int:
    """Descriptor of the mapped file itself, also when it was deleted or lives in another mount namespace.

    The path comes from the target: whatever it leads to is taken only if it is the regular file that is mapped.
    Raises OSError.
    """
    path = mapping.path.removesuffix(" (deleted)")
    last: OSError | None = None
    # The mapping itself first; it needs CAP_CHECKPOINT_RESTORE or more, the path does not.
    for candidate in (f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}", f"{live_path(pid)}/root{path}"):
        try:
            # O_PATH first: opening what the target put there (a pipe, a device) could block or act.
            handle = os.open(candidate, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            last = error
            continue
        try:
            info = os.fstat(handle)
            if info.st_ino == mapping.inode and stat.S_ISREG(info.st_mode):
                return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(handle)
    raise last or FileNotFoundError(f"{clean(path)} is no longer the file that is mapped")

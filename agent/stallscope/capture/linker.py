"""From a mapped file to linked probes: which file, which symbols, which offsets."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from stallscope.capture.exits import has_ended
from stallscope.capture.libmatch import is_shim, match
from stallscope.capture.mapped import has_breakpoint, open_mapping
from stallscope.capture.parser_client import ParserClient, ParserFailed
from stallscope.capture.procfs import Mapping, clean, executable_mappings, live_path
from stallscope.capture.ranges import place, runtime_ranges, runtime_text
from stallscope.capture.resolver import EVERY, Resolver, is_whole
from stallscope.capture.returns import Returns
from stallscope.capture.sharing import Sharing
from stallscope.capture.target import FileKey, LinkedLibrary, Resolved, Target
from stallscope.errors import StallscopeError, TargetProblem
from stallscope.wire.frames import Kind

__all__ = ["Linker"]

MAX_RANGES, MAX_FITTED = 4, 4096


class Linker:
    """Links hooks of mapped files into one process at a time.

    Args:
        sharing: makes the links.
        set_ranges: (slot, [(start, end)]) writes the runtime address ranges that mark driver calls as nested.
        send: takes frames.
        clock: CLOCK_MONOTONIC in ns.
        returns: which processes get no return probes.

    Attributes:
        before_link: sends the counters as they are, so that a reader can tell the runtime's calls before the driver's
            link from those after it.
        on_preloaded: called when a process turns out to have the shim loaded; nothing is linked in it.
    """

    def __init__(
        self,
        sharing: Sharing,
        parser: ParserClient,
        set_ranges: Callable[[int, list[tuple[int, int]]], None],
        send: Callable[[Kind, dict[str, Any]], None],
        clock: Callable[[], int],
        returns: Returns,
    ) -> None:
        self._returns = returns
        self._sharing = sharing
        self._resolver = Resolver(parser)
        self._fitted: dict[tuple[int, int, int, int, str], Resolved] = {}
        self._set_ranges = set_ranges
        self._send = send
        self._clock = clock
        self.before_link: Callable[[Target, int], None] | None = None
        self.on_preloaded: Callable[[Target], None] | None = None

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
        if self._is_preloaded(target, mappings):
            return 0
        before = set(target.linked)
        found = sum(self._one(target, m, appeared_ns, m.inode == program) for m in mappings)
        if before.intersection((m.device, m.inode, "") for m in mappings):
            self._refresh(target, mappings)
        return found

    def _is_preloaded(self, target: Target, mappings: list[Mapping]) -> bool:
        """Whether the shim watches the process: then nothing is linked in it, or its calls would count twice.

        ld.so maps preloaded libraries before the program's own, so no CUDA library is ever met before the shim.
        """
        if not target.preloaded and any(is_shim(mapping.path) for mapping in mappings):
            target.preloaded = True
            if self.on_preloaded is not None:
                self.on_preloaded(target)
        return target.preloaded

    def link_forked(self, target: Target, parent: Target) -> None:
        """Link in a forked child what is linked in its parent, without looking at anything or telling anybody first.

        The child runs already and each hundred microseconds may be a call unseen: its mappings are its parent's.
        `announce` tells it afterwards.
        """
        if parent.preloaded:  # it makes a segment of its own
            target.preloaded = True
            return
        for key, theirs in parent.linked.items():
            linked = LinkedLibrary(
                theirs.library, theirs.path, set(theirs.places), resolved=theirs.resolved, text=theirs.text,
                carried=theirs.carried, embedded=theirs.embedded,
            )  # fmt: skip
            try:
                linked.fd = os.dup(theirs.fd)
                linked.untimed = self._returns.why_not_forked(target.pid, theirs.untimed)
                self._sharing.link(target, linked)
            except (OSError, StallscopeError) as error:
                linked.close()
                if not isinstance(error, TargetProblem):
                    target.late_notes.append(f"{linked.path} is not linked: {error}")
                continue
            linked.at_ns = self._clock()
            target.linked[key] = linked
        target.refused = set(parent.refused)
        target.twins = dict(parent.twins)
        target.unasked.asked = set(parent.unasked.asked)
        target.unasked.waiting = dict(parent.unasked.waiting)
        target.ranges = list(parent.ranges)
        self._set_ranges(target.slot, target.ranges)

    def let_go_of_idle(self) -> None:
        """Unfiltered links that nobody needs any more."""
        self._sharing.let_go_of_idle()

    def shared_links(self) -> int:
        """How many unfiltered links there are."""
        return sum(map(len, self._sharing.links()))

    def must_untime(self, target: Target) -> bool:
        """Whether return probes of this process's own stand in an image that may have none."""
        timed = any(linked.returns for linked in target.linked.values())
        return timed and self._returns.why_not(target.pid) is not None

    def announce(self, target: Target, appeared_ns: int) -> None:
        """Tell of everything `link_forked` linked."""
        for linked in target.linked.values():
            self._announce(target, linked, appeared_ns)
        self._tell_notes(target)

    def _tell_notes(self, target: Target) -> None:
        for note in target.late_notes:
            self.note(target, note)
        target.late_notes.clear()

    def link_mapping(self, target: Target, mapping: Mapping, appeared_ns: int | None, is_program: bool = False) -> bool:
        """Link one executable mapping if it holds hooks; True when something new was linked."""
        if self._is_preloaded(target, [mapping]):
            return False
        key = (mapping.device, mapping.inode, "")
        if key in target.linked or key in target.twins:
            # Mapped again: after exec, twice (dlmopen), or closed and opened anew. The links hold, the addresses don't.
            with contextlib.suppress(OSError):
                self._refresh(target, executable_mappings(target.pid))
            return False
        return self._one(target, mapping, appeared_ns, is_program)

    def _one(self, target: Target, mapping: Mapping, appeared_ns: int | None, is_program: bool) -> bool:
        library = match(mapping.path)
        key = (mapping.device, mapping.inode, "")
        if library in (None, "NCCL") and not is_program and key not in target.unasked.asked:
            target.unasked.waiting.setdefault(key, (mapping, appeared_ns))
        if (library is None and not is_program) or key in target.refused or key in target.linked or key in target.twins:
            return False
        return self._guarded(target, mapping, library, key, appeared_ns)

    def _guarded(
        self, target: Target, mapping: Mapping, library: str | None, key: FileKey, appeared_ns: int | None
    ) -> bool:
        """One file that can't be linked is a note and no reason to leave the others."""
        try:
            return self._link_file(target, mapping, library, key, appeared_ns)
        except (ProcessLookupError, TargetProblem):
            return False  # it has ended
        except (OSError, StallscopeError, ParserFailed) as error:
            if target.pidfd >= 0 and has_ended(target.pidfd):
                return False
            target.refused.add(key)
            self.note(target, f"{clean(mapping.path)} is not linked: {error}")
            if library is not None:
                # Its calls are unseen from here on, and no number may look as if they were not.
                now = self._clock()
                self._gap(target, appeared_ns or now, now, f"{library} could not be linked")
            return False

    def _link_file(
        self, target: Target, mapping: Mapping, library: str | None, key: FileKey, appeared_ns: int | None
    ) -> bool:
        fd = open_mapping(target.pid, mapping)
        try:
            found = self._resolver.resolve(fd, frozenset((library,)) if library else EVERY)
            resolved = self._fitting(target, fd, library or "", clean(mapping.path), found)
            if not resolved.points:
                target.refused.add(key)
                self._nothing_in(target, mapping, library, key, resolved)
                os.close(fd)
                return False
            name = library or resolved.points[0].hook.library
            linked = LinkedLibrary(name, clean(mapping.path), resolved=resolved, fd=fd)
            linked.untimed = self._returns.why_not(target.pid)
            return self._link(target, mapping, key, linked, appeared_ns, in_program=library is None)
        except BaseException:
            os.close(fd)
            raise

    def _nothing_in(
        self, target: Target, mapping: Mapping, library: str | None, key: FileKey, resolved: Resolved
    ) -> None:
        if resolved.left_out:
            self.note(target, resolved.left_out)
        elif library is not None:
            self.note(target, f"{clean(mapping.path)} looks like {library} and defines none of its functions")
        elif resolved.stripped and resolved.has_runtime_words:
            target.silent[key] = clean(mapping.path)

    def link_carried(
        self, target: Target, mapping: Mapping, libraries: frozenset[str], appeared_ns: int | None, deadline_s: float
    ) -> None:
        """Link libraries that a file of another name has inside. Raises OSError, ParserFailed, StallscopeError."""
        fd = open_mapping(target.pid, mapping)
        try:
            resolved = self._resolver.resolve(fd, libraries, deadline_s=deadline_s)
            for library in sorted(lib for lib in libraries if is_whole(resolved, lib)):
                points = [p for p in resolved.points if p.hook.library == library]
                own = resolved._replace(points=points, missing=[], hull=resolved.hull if library == "CUDART" else None)
                own = self._fitting(target, fd, f"inner {library}", clean(mapping.path), own)
                if not own.points:
                    self._nothing_in(target, mapping, library, (mapping.device, mapping.inode, library), own)
                    continue
                linked = LinkedLibrary(library, clean(mapping.path), resolved=own, fd=os.dup(fd), carried=True)
                linked.untimed = self._returns.why_not(target.pid)
                self._link_one_carried(target, mapping, linked, appeared_ns)
            if "CUDART" in libraries and not is_whole(resolved, "CUDART") and resolved.stripped:
                self._nothing_in(target, mapping, None, (mapping.device, mapping.inode, "CUDART"), resolved)
        finally:
            os.close(fd)

    def _link_one_carried(
        self, target: Target, mapping: Mapping, linked: LinkedLibrary, appeared_ns: int | None
    ) -> None:
        key = (mapping.device, mapping.inode, linked.known_as)
        try:
            is_new = self._link(target, mapping, key, linked, appeared_ns, in_program=True)
        except BaseException:
            linked.close()
            raise
        if is_new:
            self.note(target, f"{linked.path} has {linked.library} inside, under another name: probed there")

    def _link(
        self, target: Target, mapping: Mapping, key: FileKey, linked: LinkedLibrary, appeared_ns: int | None,
        *, in_program: bool,
    ) -> bool:  # fmt: skip
        linked.embedded = in_program
        linked.text = runtime_text(linked, mapping)
        if twin := self._twin_of(target, mapping, linked):
            target.twins[key] = twin
            linked.close()
            with contextlib.suppress(OSError):
                self._refresh(target, executable_mappings(target.pid))
            return False
        # Ranges first: the driver calls of the very first runtime call must find them.
        self._set_all_ranges(target, linked, target.ranges + runtime_ranges(linked, mapping))
        self._sharing.link(target, linked)
        linked.places = place(linked, mapping)
        linked.at_ns = self._clock()
        target.linked[key] = linked
        self._announce(target, linked, appeared_ns)
        self._tell_rejected(target, linked)
        self._tell_notes(target)
        return True

    def _twin_of(self, target: Target, mapping: Mapping, linked: LinkedLibrary) -> FileKey | None:
        """The same file, linked already by another way to it: an overlay and what lies below it are one inode, and
        a second link would count each call twice. The breakpoint that stands there already is the proof."""
        info, points = os.fstat(linked.fd), linked.resolved.points
        for key, other in target.linked.items():
            theirs = os.fstat(other.fd)
            alike = (theirs.st_ino, theirs.st_size, other.library) == (info.st_ino, info.st_size, linked.library)
            if alike and has_breakpoint(target.pid, mapping, linked.fd, points[0].probe_offset):
                return key
        return None

    def _tell_rejected(self, target: Target, linked: LinkedLibrary) -> None:
        for why in sorted(set(linked.resolved.rejected.values())):
            names = sorted(name for name, given in linked.resolved.rejected.items() if given == why)
            reason = "they are resolvers (ifunc)" if why == "ifunc" else "they lie outside the file's code"
            self.note(target, f"{linked.path}: {', '.join(names)} not probed: {reason}")

    def _announce(self, target: Target, linked: LinkedLibrary, appeared_ns: int | None) -> None:
        now, resolved = linked.at_ns, linked.resolved
        if linked.shared and appeared_ns is not None:
            # The unfiltered links may have come after the library.
            now = max(appeared_ns, min(now, linked.shared_since_ns))
        # Asked for with a driver only; 0.1 ms of work, so not where unfiltered links were there before the process.
        was_there = linked.shared and appeared_ns is not None and linked.shared_since_ns <= appeared_ns
        if self.before_link is not None and linked.library == "CUDA" and not was_there:
            self.before_link(target, now)
        self._send(
            Kind.LINK,
            {"proc": target.proc, "library": linked.library, "path": linked.path, "build_id": resolved.build_id,
             "hooks": sorted(p.hook.id for p in resolved.points), "at_ns": now,
             "appeared_ns": now if appeared_ns is None else appeared_ns,
             "method": self._sharing.method, "missing": resolved.missing, "untimed": bool(linked.untimed),
             "version": resolved.nccl_version if linked.library == "NCCL" else None},
        )  # fmt: skip
        if linked.untimed:
            self.note(target, f"{linked.path}: {linked.untimed}")
        if appeared_ns is None or appeared_ns == now:
            return
        self._gap(target, appeared_ns, now, f"{linked.library} not linked yet")

    def _gap(self, target: Target, from_ns: int, to_ns: int, reason: str) -> None:
        body = {"source": "link", "proc": target.proc, "count": None, "from_ns": from_ns, "to_ns": to_ns}
        self._send(Kind.GAP, {**body, "reason": reason})

    def _fitting(self, target: Target, fd: int, part: str, path: str, found: Resolved) -> Resolved:
        """With those of the file's functions that the kernel has room for; asked once for each file."""
        info = os.fstat(fd)
        key = (info.st_dev, info.st_ino, info.st_mtime_ns, info.st_size, part)
        if key not in self._fitted:
            if len(self._fitted) >= MAX_FITTED:
                self._fitted.clear()
            points, left_out = self._sharing.choose(path, found.points)
            if left_out and points:
                target.late_notes.append(left_out)
            self._fitted[key] = found._replace(points=points, left_out=left_out)
        return self._fitted[key]

    def _refresh(self, target: Target, mappings: list[Mapping]) -> None:
        """Where everything linked stands now."""
        for linked in target.linked.values():
            linked.places = set()
        ranges: list[tuple[int, int]] = []
        for mapping in mappings:
            for part in ("", "CUDART", "NCCL"):
                key = (mapping.device, mapping.inode, part)
                found = target.linked.get(target.twins.get(key, key))
                if found is not None:
                    found.places |= place(found, mapping)
                    ranges += runtime_ranges(found, mapping)
        self._set_all_ranges(target, None, ranges)

    def _set_all_ranges(self, target: Target, added: LinkedLibrary | None, ranges: list[tuple[int, int]]) -> None:
        if len(ranges) > MAX_RANGES and added is not None:
            # Some may be of runtimes that were closed since.
            with contextlib.suppress(OSError):
                self._refresh(target, executable_mappings(target.pid))
            ranges = target.ranges + ranges[-1:]
        if len(ranges) > MAX_RANGES:
            where = f" from {added.path}" if added else ""
            self.note(target, f"more than {MAX_RANGES} runtimes: driver calls{where} count as calls of their own")
        if ranges[:MAX_RANGES] != target.ranges:
            target.ranges = ranges[:MAX_RANGES]
            self._set_ranges(target.slot, target.ranges)

    def tell_silent(self, target: Target, *, final: bool = False) -> None:
        """Say which files have a runtime that can't be seen by name, once it is known what of it is seen."""
        has_driver = any(p.hook.library == "CUDA" for lib in target.linked.values() for p in lib.resolved.points)
        if not target.silent or not (has_driver or final):
            return
        for path in target.silent.values():
            rest = "only driver calls seen" if has_driver else "no libcuda was loaded, so none of its calls are seen"
            self.note(target, f"stripped static runtime in {path}: {rest}")
        target.silent.clear()

    def note(self, target: Target, text: str) -> None:
        """Tell the report something about one process."""
        self._send(Kind.NOTE, {"at_ns": self._clock(), "proc": target.proc, "text": text})

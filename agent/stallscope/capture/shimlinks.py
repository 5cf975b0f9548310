"""LINK frames of processes with the shim: which libraries it stands before, and which of their functions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any

from stallscope.capture.libmatch import SHIM, match
from stallscope.capture.mapped import open_mapping
from stallscope.capture.parser_client import ParserClient, ParserFailed
from stallscope.capture.procfs import Mapping, clean, executable_mappings
from stallscope.capture.resolver import Resolver
from stallscope.capture.target import LinkedLibrary, Resolved, Target
from stallscope.wire.frames import Kind
from stallscope.wire.hook_table import BY_ID, HOOKS

__all__ = ["METHOD", "ShimLinks"]

METHOD = "shim"
NOTHING = Resolved(None, [], [], False)


class ShimLinks:
    """Tells of each library once, when the first of its functions was called.

    Args:
        parser: says which functions a file has, and which NCCL it is.
        send: takes frames.
        clock: CLOCK_MONOTONIC in ns.
    """

    def __init__(
        self, parser: ParserClient, send: Callable[[Kind, dict[str, Any]], None], clock: Callable[[], int]
    ) -> None:
        self._resolver, self._send, self._clock = Resolver(parser), send, clock

    def tell(self, target: Target, hooks: Iterable[int], since_ns: int) -> None:
        """`hooks`: ids of functions that the shim has met. Looks at the maps only when a library is new."""
        known = {linked.library for linked in target.linked.values() if linked.by_shim}
        fresh = {BY_ID[hook].library for hook in hooks if hook in BY_ID} - known
        if not fresh:
            return
        found = self._files(target, fresh)
        for library in sorted(fresh):
            files = [mapping for name, mapping in found if name == library]
            for mapping in files:
                self._add(target, library, mapping, since_ns)
            if not files:  # the process is gone, or has the library inside another file
                self._enter(target, LinkedLibrary(library, SHIM), (library,), since_ns)

    def tell_mapped(self, target: Target, since_ns: int) -> None:
        """All of CUDA's libraries that the process has by their names: where the shim came later than they did."""
        with contextlib.suppress(OSError):
            here = {match(mapping.path) for mapping in executable_mappings(target.pid)}
            self.tell(target, [hook.id for hook in HOOKS if hook.library in here], since_ns)

    def _files(self, target: Target, libraries: set[str]) -> list[tuple[str, Mapping]]:
        try:
            mappings = executable_mappings(target.pid)
        except OSError:
            return []
        files = {(m.device, m.inode): m for m in reversed(mappings)}
        return [(name, m) for m in files.values() if (name := match(m.path)) in libraries and name]

    def _add(self, target: Target, library: str, mapping: Mapping, since_ns: int) -> None:
        linked = LinkedLibrary(library, clean(mapping.path))
        with contextlib.suppress(OSError):
            linked.fd = open_mapping(target.pid, mapping)
        if linked.fd >= 0:
            linked.resolved = self._resolved(linked.fd, library)
        self._enter(target, linked, (library, mapping.device, mapping.inode), since_ns)

    def _resolved(self, fd: int, library: str) -> Resolved:
        try:
            return self._resolver.resolve(fd, frozenset((library,)))
        except (OSError, ParserFailed):
            return NOTHING

    def _enter(self, target: Target, linked: LinkedLibrary, key: tuple[Any, ...], since_ns: int) -> None:
        resolved = linked.resolved
        defined = resolved.defined | {point.hook.name for point in resolved.points}
        hooks = [h.id for h in HOOKS if h.library == linked.library and (h.name in defined or not defined)]
        linked.by_shim, linked.at_ns = len(hooks), since_ns
        # No probe stands in it: whoever looks for places finds none.
        linked.resolved = NOTHING._replace(build_id=resolved.build_id, nccl_version=resolved.nccl_version)
        target.linked[_key(key)] = linked
        self._send(
            Kind.LINK,
            {"proc": target.proc, "library": linked.library, "path": linked.path, "build_id": resolved.build_id,
             "hooks": hooks, "at_ns": since_ns, "appeared_ns": since_ns, "method": METHOD, "missing": [],
             "untimed": False, "version": resolved.nccl_version if linked.library == "NCCL" else None},
        )  # fmt: skip

    def forget(self, target: Target) -> None:
        """The program that had them is over."""
        for key in [key for key, linked in target.linked.items() if linked.by_shim]:
            library = target.linked.pop(key)
            if library.fd >= 0:
                os.close(library.fd)
                library.fd = -1


def _key(parts: tuple[Any, ...]) -> tuple[tuple[int, int], int, str]:
    """A FileKey that no probed file has."""
    library, device, inode = (*parts, (0, 0), 0)[:3]
    return device, inode, f"{library} by shim"

"""All processes of a capture that the library was put into: in, alive, out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from stallscope.capture.injectable import require_injectable
from stallscope.capture.injection import Injection, inject
from stallscope.capture.libmatch import is_shim, match
from stallscope.capture.parser_client import ParserClient
from stallscope.capture.procfs import executable_mappings
from stallscope.capture.target import Target
from stallscope.errors import StallscopeError
from stallscope.wire.frames import Kind

__all__ = ["Injections", "has_shim", "libraries_of"]

_UNSEEN = (
    "the library was put into the running process: calls through addresses that the program had fetched before "
    "(ctypes, Triton, what a statically linked runtime keeps) go past it"
)
_FLYING = "calls under way when the library came are not seen until they end"


class Injections:
    """What an attach without BPF puts into processes.

    Args:
        wanted: pids that must work; what else of the job has a CUDA library is tried.
        send: takes frames.
        clock: CLOCK_MONOTONIC in ns.
    """

    def __init__(
        self, wanted: Sequence[int], parser: ParserClient, send: Callable[[Kind, dict[str, Any]], None],
        clock: Callable[[], int],
    ) -> None:  # fmt: skip
        self._wanted, self._parser, self._send, self._clock = frozenset(wanted), parser, send, clock
        self._held: dict[int, tuple[Target, Injection]] = {}

    def put_into(self, targets: Sequence[Target]) -> None:
        """Those that were asked for first. Raises StallscopeError where one of them can't be."""
        for target in sorted(targets, key=lambda target: target.pid not in self._wanted):
            if has_shim(target.pid):
                continue
            if target.pid in self._wanted:
                self._put(target)
            elif libraries_of(target.pid):
                self._try(target)
            self.beat()  # the first ones must not wait for the last

    def _try(self, target: Target) -> None:
        try:
            require_injectable(target.pid)
            self._put(target)
        except StallscopeError as problem:
            self._note(target, f"not traced: {problem.what}: {problem.why}")

    def _put(self, target: Target) -> None:
        since = self._clock()
        self._held[target.proc] = target, inject(target.pid, self._parser)
        self._note(target, _UNSEEN)
        self._gap(target, since, _FLYING)

    def beat(self) -> None:
        """Once a second: the libraries are told that we live; they let go of their process if we don't."""
        for target, injection in list(self._held.values()):
            if not injection.beat() and not target.ended:
                del self._held[target.proc]
                injection.close()
                why = "the library let go of the process: it execed, or this capture stood still for five seconds"
                self._note(target, why)
                self._gap(target, self._clock(), why)

    def release(self) -> None:
        """Every process as it was before; its memory still has the library, which nothing leads to."""
        for target, injection in self._held.values():
            away, found = injection.turned_away(), injection.release()
            injection.close()
            if away:
                self._note(target, f"{away} places that call CUDA were left as they are: the table of them was full")
            if found is None and not target.ended:
                self._note(target, "the library did not answer at the detach; it lets go by itself within five seconds")
            if found is not None and found[1]:
                self._note(target, f"{found[1]} places that call CUDA held something else by then and were left so")
        self._held.clear()

    def tell_children(self, live: Sequence[Target], has: Callable[[Target], bool]) -> None:
        """At the end: forked meanwhile they have it and keep it, started by exec they never had it."""
        others = [target for target in live if target.proc not in self._held]
        kept = [target for target in others if has(target) and not has_shim(target.pid)]
        without = [target for target in others if not has(target) and libraries_of(target.pid)]
        if kept:
            self._note(None, f"{len(kept)} children, forked meanwhile, keep the library until they exec or end")
        for target in without:
            self._note(target, "its calls were not seen: it runs a program that began without the library")

    def _note(self, target: Target | None, text: str) -> None:
        proc = target.proc if target else None
        self._send(Kind.NOTE, {"at_ns": self._clock(), "proc": proc, "text": text})

    def _gap(self, target: Target, since_ns: int, reason: str) -> None:
        span = {"from_ns": since_ns, "to_ns": self._clock()}
        self._send(Kind.GAP, {"source": "shim", "proc": target.proc, "count": None, **span, "reason": reason})

    def close(self) -> None:
        """Release what nobody released."""
        self.release()


def has_shim(pid: int) -> bool:
    """Whether the process was started with the library."""
    return any(is_shim(path) for path in _paths(pid))


def libraries_of(pid: int) -> set[str]:
    """CUDA's libraries in the process, by their names."""
    return {library for path in _paths(pid) if (library := match(path))}


def _paths(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return [mapping.path for mapping in executable_mappings(pid)]
    return []

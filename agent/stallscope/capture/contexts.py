"""What the environment of each process says of the job it belongs to: CONTEXT frames.

Read when a program begins, since it may end soon; then again, ever more seldom, since a process may take it away, or
write over the block that the kernel shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from stallscope.capture.environ import Environs
from stallscope.capture.exits import has_ended
from stallscope.capture.parser_client import ParserClient
from stallscope.capture.procfs import Block, environment_of
from stallscope.capture.target import Target
from stallscope.wire.environment import wanted
from stallscope.wire.frames import Kind

__all__ = ["Contexts"]

Send = Callable[[Kind, dict[str, Any]], None]

A_LOOK = 64
PAUSES_NS = (250_000_000, 1_000_000_000, 3_000_000_000, 10_000_000_000, 30_000_000_000)
AT_THE_END = 1024


@dataclass
class _Entry:
    """One process: its wanted variables at the exec (None: unreadable), what was told of them, when to look again.

    `mark`: addresses and hash of the block; equal ones are a parent's and its forked child's.
    """

    env: dict[str, str] | None
    mark: tuple[int, int, int] | None
    told: dict[str, Any]
    due_ns: int
    looks: int = 0


class Contexts:
    """Sends what is new.

    Args:
        parser: asked where libc's `environ` is, once a file.
        send: takes frames.
    """

    def __init__(self, parser: ParserClient, send: Send, clock: Callable[[], int]) -> None:
        self._send, self._clock = send, clock
        self._environs = Environs(parser)
        self._entries: dict[int, _Entry] = {}

    def began(self, target: Target) -> None:
        """The process runs another program now: what it was started with."""
        now, block = self._clock(), environment_of(target.pid)
        mark = None if block is None else _mark(block)
        parent = self._entries.get(target.parent) if target.parent is not None else None
        is_forked = mark is not None and parent is not None and parent.mark == mark
        env = parent.env if is_forked and parent else None if block is None else wanted(block.words)
        entry = self._entries[target.proc] = _Entry(env, mark, {}, now + PAUSES_NS[0])
        self._tell(target, entry, now, self._body(target, entry, block, None))

    def look(self, targets: Iterable[Target], now: int) -> None:
        """Those that are due, a few at a time; the longest overdue first."""
        live = {target.proc: target for target in targets if not target.ended}
        for proc in self._entries.keys() - live.keys():
            del self._entries[proc]
            self._environs.forget(proc)
        due = sorted((entry.due_ns, proc) for proc, entry in self._entries.items() if entry.due_ns <= now)
        for _, proc in due[:A_LOOK]:
            self._look_at(live[proc], now)

    def finish(self, targets: Iterable[Target], now: int) -> None:
        """A last look at those that live on."""
        for target in list(targets)[:AT_THE_END]:
            if target.proc in self._entries:
                self._look_at(target, now)

    def _look_at(self, target: Target, now: int) -> None:
        entry = self._entries[target.proc]
        entry.due_ns = now + PAUSES_NS[min(entry.looks, len(PAUSES_NS) - 1)]
        entry.looks += 1
        block = environment_of(target.pid)
        words = None if block is None else self._environs.words(target.proc, target.parent, target.pid, block)
        if block is None or target.pidfd < 0 or has_ended(target.pidfd):
            return  # its number may be another's by now
        if entry.mark is None or entry.mark[:2] != (block.start, block.end):
            entry.env, entry.mark = wanted(block.words), _mark(block)  # an exec that nobody told of
        live = None if words is None else wanted(words)
        self._tell(target, entry, now, self._body(target, entry, block, live))

    def _body(self, target: Target, entry: _Entry, block: Block | None, live: dict[str, str] | None) -> dict[str, Any]:
        env, parent = entry.env, self._entries.get(target.parent) if target.parent is not None else None
        is_like = bool(env) and parent is not None and parent.env == env
        known = env or {}
        return {
            "env": None if is_like else env,
            "like": target.parent if is_like else None,
            "overwritten": block is not None and block.is_overwritten,
            "seen": live is not None,
            "gone": [] if live is None else sorted(known.keys() - live.keys()),
            "own": {} if live is None else {name: value for name, value in live.items() if known.get(name) != value},
        }

    def _tell(self, target: Target, entry: _Entry, now: int, body: dict[str, Any]) -> None:
        if body != entry.told:
            entry.told = body
            self._send(Kind.CONTEXT, {"at_ns": now, "proc": target.proc, **body})


def _mark(block: Block) -> tuple[int, int, int]:
    return block.start, block.end, hash(block.data)

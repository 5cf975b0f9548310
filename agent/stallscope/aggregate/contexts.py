"""What is known of each process's environment: CONTEXT frames."""

from __future__ import annotations

from typing import NamedTuple

from stallscope.aggregate.checks import BadField, integer, mapping, maybe_integer, texts
from stallscope.aggregate.limits import Overflow
from stallscope.wire.environment import MAX_NAMES, is_wanted, shown
from stallscope.wire.frames import Body

__all__ = ["Context", "Contexts"]


class Context(NamedTuple):
    """The wanted variables of one process.

    Attributes:
        env: as they were at its exec; None where that could not be read.
        overwritten: the process wrote something else over that block.
        seen: whether libc's own environment could be read, and then
        gone: what was no longer there of `env`,
        own: what was there besides, or with another value.
    """

    env: dict[str, str] | None
    overwritten: bool
    seen: bool
    gone: frozenset[str]
    own: dict[str, str]


class Contexts:
    """By process; the newest frame counts. Names and values are held against the same list as capture's."""

    def __init__(self, overflow: Overflow) -> None:
        self.table: dict[int, Context] = {}
        self._overflow = overflow
        self._characters = 0

    def add(self, body: Body, *, known: bool) -> None:
        """A CONTEXT frame; `known`: its process is in the table."""
        proc, like = integer(body, "proc"), maybe_integer(body, "like", 0)
        env = None if body.get("env") is None else _values(body, "env")
        own, gone = _values(body, "own"), frozenset(texts(body, "gone", MAX_NAMES))
        if not known:
            return
        other = self.table.get(like) if like is not None else None
        if like is not None:
            env = other.env if other else None
        size = sum(len(name) + len(value) for name, value in own.items())
        size += 0 if like is not None or env is None else sum(len(name) + len(value) for name, value in env.items())
        # What is replaced was counted, too: a frame that comes again and again is cut off, not the table outgrown.
        if self._overflow.full("characters of environments", self._characters):
            return
        self._characters += size
        flags = body.get("overwritten") is True, body.get("seen") is True
        self.table[proc] = Context(env, *flags, gone & frozenset(env or {}), own)


def _values(body: Body, key: str) -> dict[str, str]:
    found = mapping(body, key, MAX_NAMES)
    if not all(isinstance(value, str) for value in found.values()):
        raise BadField(f"{key} holds something else than strings")
    return {name: shown(value) for name, value in found.items() if is_wanted(name)}

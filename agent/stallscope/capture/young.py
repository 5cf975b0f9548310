"""Processes that have just begun are looked at a little later: most commands of a script have ended by then.

Until then their links are their parent's, and the kernel's news of mappings tell of a library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stallscope.capture.target import Target

__all__ = ["YOUNG_NS", "Young"]

YOUNG_NS = 30_000_000


class Young:
    """In the order in which they began their present programs."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._waiting: dict[int, tuple[int, Target, int]] = {}

    def add(self, target: Target, since_ns: int) -> None:
        """It runs another program since then, or is new."""
        self.drop(target)
        self._waiting[target.proc] = (self._clock() + YOUNG_NS, target, since_ns)

    def drop(self, target: Target) -> None:
        """It has ended."""
        self._waiting.pop(target.proc, None)

    def grown(self, *, final: bool) -> Iterator[tuple[Target, int]]:
        """Those that live on, each once, and since when; `final`: all of them."""
        now = self._clock()
        while self._waiting:
            proc, (due_ns, target, since_ns) = next(iter(self._waiting.items()))
            if due_ns > now and not final:
                return
            del self._waiting[proc]
            yield target, since_ns

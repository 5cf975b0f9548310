"""Libraries inside files of other names: a framework with NCCL linked in, NCCL with a CUDA runtime linked in.

Any mapped file may be one, and asking each costs time in the capture loop. So a file is asked only for what the process
has not mapped by its name, likely ones first, one a look, and only so many and so long a process.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from stallscope.capture.libmatch import match
from stallscope.capture.linker import Linker
from stallscope.capture.parser_client import ParserFailed
from stallscope.capture.procfs import Mapping, clean
from stallscope.capture.target import FileKey, Target
from stallscope.errors import StallscopeError

__all__ = ["BUDGET_NS", "DEADLINE_S", "LIBRARIES", "MAX_FILES", "Carriers", "likely_first"]

MAX_FILES = 256
BUDGET_NS = 500_000_000
RUSH_NS = 150_000_000
DEADLINE_S = 0.5
LIBRARIES = frozenset(("CUDART", "NCCL"))
_LIKELY = re.compile(r"cu|nccl|torch|tensor|xla|jax|triton|paddle|mxnet", re.IGNORECASE)


def likely_first(mapping: Mapping) -> tuple[bool, str]:
    """In which order files are asked: time may run out."""
    return not _LIKELY.search(mapping.path), mapping.path


class Carriers:
    """Asks files that wait in `Target.unasked`.

    Args:
        linker: links what is found.
        clock: CLOCK_MONOTONIC in ns.
    """

    def __init__(self, linker: Linker, clock: Callable[[], int]) -> None:
        self._linker = linker
        self._clock = clock

    def rush(self, targets: list[Target]) -> None:
        """Ask as many as 150 ms permit, so that a small process is complete before anybody is told it is attached."""
        end_ns = self._clock() + RUSH_NS
        while self._clock() < end_ns and self.step(targets):
            pass

    def step(self, targets: list[Target]) -> bool:
        """Ask one file of one process; False when nothing waits."""
        for target in targets:
            self._linker.tell_silent(target)
            if target.unasked.waiting:
                self._next(target)
                return True
        return False

    def _next(self, target: Target) -> None:
        unasked = target.unasked
        libraries = LIBRARIES - {lib.library for lib in target.linked.values() if match(lib.path) == lib.library}
        if not libraries or self._spent(target):
            unasked.asked |= unasked.waiting.keys()
            unasked.waiting.clear()
            return
        key = min(unasked.waiting, key=lambda k: likely_first(unasked.waiting[k][0]))
        begin_ns = self._clock()
        self._ask(target, key, libraries)
        unasked.spent_ns += self._clock() - begin_ns

    def _spent(self, target: Target) -> bool:
        unasked = target.unasked
        if unasked.spent_ns < BUDGET_NS and len(unasked.asked) < MAX_FILES:
            return False
        if not unasked.stopped:
            self._linker.note(
                target,
                f"{len(unasked.waiting)} mapped files, and those loaded later, are not searched for a CUDA runtime or "
                f"NCCL inside them: {len(unasked.asked)} were, in {unasked.spent_ns / 1e6:.0f} ms",
            )
        unasked.stopped = True
        return True

    def _ask(self, target: Target, key: FileKey, libraries: frozenset[str]) -> None:
        mapping, appeared_ns = target.unasked.waiting.pop(key)
        target.unasked.asked.add(key)
        libraries -= {match(mapping.path) or ""}
        if not libraries:
            return
        try:
            self._linker.link_carried(target, mapping, libraries, appeared_ns, DEADLINE_S)
        except ParserFailed as error:
            if error.died:  # else it is no file that could be one
                self._linker.note(target, f"{clean(mapping.path)} is not searched for a library inside it: {error}")
        except StallscopeError as error:
            self._linker.note(target, f"the library inside {clean(mapping.path)} is not linked: {error}")
        except OSError:
            return

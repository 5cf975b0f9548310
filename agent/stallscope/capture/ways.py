"""Two ways from a set of functions to links: uprobe_multi, or perf events where the kernel has nothing better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stallscope.capture.links import UprobeLink, distinct
from stallscope.capture.linkstyle import Style
from stallscope.capture.loader import Loaded
from stallscope.capture.perf_links import PerfLink
from stallscope.capture.target import Point
from stallscope.errors import CaptureProblem
from stallscope.wire.hook_table import BY_ID, FEW, MAX_PERF_PROBES, Hook

__all__ = ["Link", "MultiWay", "PerfWay", "Way", "way_of"]

NO_LIMIT = 1 << 30


class Link(Protocol):
    """Probes that can be taken away."""

    offsets: list[int]
    notes: list[str]

    def take(self) -> list[int]:
        """The descriptors, for the caller to close."""

    def close(self) -> None:
        """Take the probes away."""


class Way(Protocol):
    """How functions get their probes.

    Attributes:
        method: its name in the recording.
        max_filtered: processes a file that may have links of their own.
    """

    method: str
    max_filtered: int

    def choose(self, path: str, points: list[Point]) -> tuple[list[Point], str | None]:
        """Those of a file's functions that can be probed, and what to say of the others. Once for each file."""

    def attach(self, program: str, fd: int, points: list[Point], pid: int, bits: int) -> Link:
        """Probe entries (returns for the program pair_return). Raises StallscopeError.

        Args:
            program: of the families in probes/stallscope.bpf.c.
            fd: the file.
            pid: 0 = all processes.
            bits: go into every cookie.
        """


class MultiWay:
    """One link holds all functions of a file that share a program."""

    method = "uprobe_multi"
    max_filtered = NO_LIMIT

    def __init__(self, programs: dict[str, int]) -> None:
        self._programs = programs

    def choose(self, path: str, points: list[Point]) -> tuple[list[Point], str | None]:
        """All of them."""
        return points, None

    def attach(self, program: str, fd: int, points: list[Point], pid: int, bits: int) -> Link:
        """See Way."""
        offsets, cookies = [p.probe_offset for p in points], [p.hook.cookie | bits for p in points]
        return UprobeLink.attach(self._programs[program], fd, offsets, cookies, pid, program == "pair_return")


class PerfWay:
    """A perf event for each function and direction: at most MAX_PERF_PROBES, over all files together.

    The second process of a file makes its links unfiltered: events of its own would double the time that detaching
    takes. Without cookies all are unfiltered from the start, as the programs' constants say (probes/per_hook.h).
    """

    method = "perf_uprobe"

    def __init__(self, programs: dict[str, int], *, cookies: bool) -> None:
        self._programs = programs
        self._cookies = cookies
        self._used = 0
        self.max_filtered = 1 if cookies else 0

    def choose(self, path: str, points: list[Point]) -> tuple[list[Point], str | None]:
        """The most important ones that there is room for."""
        by_id = {p.hook.id: p for p in points}
        chosen = []
        for point in (by_id[number] for number in FEW if number in by_id):
            cost = _cost(point.hook)
            if self._used + cost <= MAX_PERF_PROBES:
                self._used += cost
                chosen.append(point)
        left = sorted(by_id[number].hook.name for number in by_id.keys() - {p.hook.id for p in chosen})
        return chosen, _left_out(path, chosen, left) if left else None

    def attach(self, program: str, fd: int, points: list[Point], pid: int, bits: int) -> Link:
        """See Way."""
        spots = distinct([p.probe_offset for p in points], [p.hook.cookie | bits for p in points])
        programs = [self._program(program, p.hook) for p in points]
        is_return = program == "pair_return"
        return PerfLink.attach(fd, spots, programs, pid, is_return=is_return, cookies=self._cookies)

    def _program(self, family: str, hook: Hook) -> int:
        half = "return" if family == "pair_return" else "enter"
        if family == "launch" and BY_ID[hook.id].mode == "PAIR":
            half = "count"  # this one's return is not probed
        name = family if self._cookies else f"{half}_{hook.id}"
        if name not in self._programs:
            raise CaptureProblem(
                f"cannot probe {hook.name}", why="there is no program for it without cookies", hint="--links perf"
            )
        return self._programs[name]


def _cost(hook: Hook) -> int:
    return 2 if hook.mode == "PAIR" else 1


def _left_out(path: str, chosen: Sequence[Point], left: list[str]) -> str:
    return (
        f"{path}: only {len(chosen)} of its functions are probed, because this kernel has no uprobe_multi (6.6) and "
        f"taking many probes away one by one would last too long; {len(left)} are not: {', '.join(left)}"
    )


def way_of(loaded: Loaded) -> Way:
    """The way that the programs were loaded for."""
    if loaded.style is Style.MULTI:
        return MultiWay(loaded.programs)
    return PerfWay(loaded.programs, cookies=loaded.style is Style.PERF)

"""Where the main thread of a process was, from one look to the next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from stallscope.aggregate.hosts import Task
from stallscope.aggregate.state import State
from stallscope.diagnose.spans import Span, covered

__all__ = ["Wait", "Waits", "is_for_child", "is_of_its_own", "is_pipe"]

FOR_CHILD = frozenset(("wait4", "waitid", "rt_sigsuspend", "rt_sigtimedwait"))
SOON_NS = 1_500_000_000
OPENS, LOCKS = frozenset(("open", "openat", "openat2")), frozenset(("flock", "fcntl"))
READS = frozenset(("read", "readv", "poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait", "epoll_pwait2"))


class Wait(NamedTuple):
    """One stay in one place; `ns`: how much of it counts; `is_least`: it may have begun long before it was seen."""

    span: Span
    task: Task
    ns: int
    is_least: bool = False

    def within(self, spans: Iterable[Span]) -> Wait:
        """What of it lies in some disjoint spans."""
        return self._replace(ns=covered(self.span.common(spans)))


def is_for_child(task: Task) -> bool:
    """Whether it waits for a child's end."""
    return task.syscall in FOR_CHILD


def is_pipe(task: Task) -> bool:
    """Whether it waits for what others write: into a pipe, or into one of several descriptors."""
    if task.syscall not in READS:
        return False
    return task.file is None or task.file.startswith("pipe:")


def is_of_its_own(task: Task) -> bool:
    """Whether it waits for a file by name, or a lock on one: nobody looks after children in that way."""
    return task.syscall in OPENS | LOCKS or (task.syscall == "read" and (task.file or "").startswith("/"))


class Waits:
    """By process. A stay begins between two looks and ends between two looks: the middle is taken of both."""

    def __init__(self, state: State) -> None:
        self._places, self._programs = state.beginnings.places, state.beginnings.programs
        self._known: dict[tuple[int, int], list[Wait]] = {}

    def of(self, proc: int, until_ns: int) -> list[Wait]:
        """In the order of time, up to that instant; the last one is taken to last as long."""
        if (proc, until_ns) not in self._known:
            self._known[proc, until_ns] = self._of(proc, until_ns)
        return self._known[proc, until_ns]

    def _of(self, proc: int, until_ns: int) -> list[Wait]:
        places = [one for one in self._places.get(proc, []) if one.at_ns < until_ns]
        begins = [self._begin(proc, one.at_ns, one.last_ns) for one in places]
        ends = [*begins[1:], *[until_ns] * bool(begins)]
        found = []
        for begin, end, one in zip(begins, ends, places, strict=True):
            span = Span(begin, max(begin, end))
            found.append(Wait(span, one.task, span.to_ns - begin, one.last_ns is None and begin == one.at_ns))
        return found

    def _begin(self, proc: int, at_ns: int, last_ns: int | None) -> int:
        """Of the first stay of a program: the program's begin, if it was looked at soon after that."""
        if last_ns is not None:
            return (at_ns + last_ns) // 2
        begins = [one.at_ns for one in self._programs.get(proc, []) if at_ns - SOON_NS <= one.at_ns <= at_ns]
        return begins[-1] if begins else at_ns

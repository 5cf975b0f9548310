"""What each thread of a process did, and where a main thread waited that makes no call: THREADS and PIPELINE frames."""

from __future__ import annotations

from typing import Any, NamedTuple

from stallscope.aggregate.checks import MAX_NS, BadField, integer, items
from stallscope.aggregate.hosts import stack_frame
from stallscope.aggregate.limits import Overflow
from stallscope.wire.frames import Body

__all__ = ["Pipeline", "PipelineWait", "Thread", "Threads"]

DEEDS = 8
MAX_ROWS, MAX_STACKS, MAX_FRAMES, MAX_NAME = 512, 32, 32, 64


class Thread(NamedTuple):
    """One thread: outermost calls, by enum wire_deed. `is_python` None: not known; `last_ns`: when it was last told."""

    proc: int
    tid: int
    name: str
    is_python: bool | None
    since_ns: int
    last_ns: int
    wait_ns: int
    deeds: tuple[int, ...]


class PipelineWait(NamedTuple):
    """A Python stack that waited for another thread, as far as looks tell. Frames innermost first."""

    frames: list[dict[str, Any]]
    total_ns: int
    waits: int
    longest_ns: int


class Pipeline(NamedTuple):
    """All of them of one process, and how long it was looked at."""

    looks: int
    watched_ns: int
    waits: list[PipelineWait]


class Threads:
    """The newest row of each thread counts.

    Attributes:
        table: by (proc, tid); `pipelines`: by proc.
    """

    def __init__(self, overflow: Overflow) -> None:
        self.table: dict[tuple[int, int], Thread] = {}
        self.pipelines: dict[int, Pipeline] = {}
        self._overflow = overflow

    def tell(self, body: Body) -> None:
        """A THREADS frame."""
        proc, at_ns = integer(body, "proc"), integer(body, "at_ns")
        for row in items(body, "rows", MAX_ROWS):
            thread = _thread(row, proc, at_ns)
            key = proc, thread.tid
            if key in self.table or not self._overflow.full("threads", len(self.table)):
                self.table[key] = thread

    def wait(self, body: Body) -> None:
        """A PIPELINE frame."""
        proc, looks, watched_ns = integer(body, "proc"), integer(body, "looks"), integer(body, "watched_ns")
        waits = [_wait(row) for row in items(body, "rows", MAX_STACKS)]
        if proc in self.pipelines or not self._overflow.full("processes with a pipeline", len(self.pipelines)):
            self.pipelines[proc] = Pipeline(looks, watched_ns, waits)


def _numbers(values: list[Any]) -> bool:
    return all(type(n) is int and 0 <= n < MAX_NS for n in values)


def _thread(row: Any, proc: int, at_ns: int) -> Thread:
    if not isinstance(row, list) or len(row) != 6 or not isinstance(row[5], list) or len(row[5]) != DEEDS:
        raise BadField("rows holds no thread")
    tid, name, is_python, since_ns, wait_ns, deeds = row
    if not isinstance(name, str) or not (is_python is None or isinstance(is_python, bool)):
        raise BadField("rows holds a thread of no name")
    if not _numbers([tid, since_ns, wait_ns, *deeds]):
        raise BadField("rows holds a thread of impossible numbers")
    return Thread(proc, tid, name[:MAX_NAME], is_python, since_ns, at_ns, wait_ns, tuple(deeds))


def _wait(row: Any) -> PipelineWait:
    if not isinstance(row, list) or len(row) != 4 or not isinstance(row[0], list) or len(row[0]) > MAX_FRAMES:
        raise BadField("rows holds no wait")
    if not _numbers(row[1:]):
        raise BadField("rows holds a wait of impossible numbers")
    return PipelineWait([stack_frame(frame) for frame in row[0]], *row[1:])

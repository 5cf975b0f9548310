"""What looks at trainers and their workers added up to."""

from __future__ import annotations

from typing import Any, NamedTuple

from stallscope.aggregate.checks import MAX_NS, BadField, items
from stallscope.aggregate.limits import Overflow
from stallscope.wire.frames import Body

__all__ = ["BUSY", "IDLE", "CrewWorker", "Crews", "Starving"]

BUSY, IDLE, BLOCKED = "busy", "idle", "blocked"
STATES = (BUSY, IDLE, BLOCKED)
MAX_ROWS, MAX_PROCS, MAX_TEXT = 1024, 4096, 512


class Starving(NamedTuple):
    """A trainer: how long it was watched, and waited for data meanwhile, as far as looks tell.

    `wait_ns`: since when it waits now, None: it does not; `waits_for`: workers that held the pipe that it waits in;
    `by_thread`: another thread than the main one is in it. `syscall`, `file`: where it waited most.
    """

    proc: int
    looks: int
    watched_ns: int
    starved_ns: int
    waits: int
    longest_ns: int
    wait_ns: int | None
    waits_for: tuple[int, ...]
    by_thread: bool
    syscall: str | None
    file: str | None


class CrewWorker(NamedTuple):
    """A worker. `charged_ns`: it was not idle while its trainer waited; `syscall`, `file`: where it was then."""

    proc: int
    trainer: int
    looks: int
    busy_ns: int
    idle_ns: int
    blocked_ns: int
    charged_ns: int
    state: str
    since_ns: int
    syscall: str | None
    file: str | None


class Crews:
    """CREW frames: the newest row of each process counts. `at_ns`: of the newest frame."""

    def __init__(self, overflow: Overflow) -> None:
        self.trainers: dict[int, Starving] = {}
        self.workers: dict[int, CrewWorker] = {}
        self._overflow = overflow

    def look(self, body: Body) -> None:
        """A CREW frame."""
        for row in items(body, "trainers", MAX_ROWS):
            trainer = _trainer(row)
            if trainer.proc in self.trainers or not self._overflow.full("trainers with workers", len(self.trainers)):
                self.trainers[trainer.proc] = trainer
        for row in items(body, "workers", MAX_ROWS):
            worker = _worker(row)
            if worker.proc in self.workers or not self._overflow.full("workers", len(self.workers)):
                self.workers[worker.proc] = worker


def _fields(row: Any, length: int, numbers: tuple[int, ...], name: str) -> list[Any]:
    if not isinstance(row, list) or len(row) != length:
        raise BadField(f"{name} holds no row of {length}")
    if not all(type(row[i]) is int and 0 <= row[i] < MAX_NS for i in numbers):
        raise BadField(f"{name} holds something else than numbers")
    return row


def _word(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise BadField("a place is no text")
    return value[:MAX_TEXT] if value is not None else None


def _trainer(row: Any) -> Starving:
    fields = _fields(row, 11, (0, 1, 2, 3, 4, 5, *((6,) if isinstance(row, list) and row[6:7] != [None] else ())),
                     "trainers")  # fmt: skip
    procs, by_thread = fields[7], fields[8]
    if not isinstance(procs, list) or len(procs) > MAX_PROCS or not all(type(p) is int for p in procs):
        raise BadField("trainers waits for no processes")
    if not isinstance(by_thread, bool):
        raise BadField("trainers by_thread is no boolean")
    return Starving._make([*fields[:7], tuple(procs), by_thread, _word(fields[9]), _word(fields[10])])


def _worker(row: Any) -> CrewWorker:
    fields = _fields(row, 11, (0, 1, 2, 3, 4, 5, 6, 8), "workers")
    if fields[7] not in STATES:
        raise BadField("workers is in no state")
    return CrewWorker._make([*fields[:9], _word(fields[9]), _word(fields[10])])

"""How processes came to be what they are: the programs that each ran, and where it waited while it had just begun."""

from __future__ import annotations

from typing import NamedTuple

from stallscope.aggregate.checks import BadField, integer, maybe_integer, text, texts
from stallscope.aggregate.hosts import Task, task
from stallscope.aggregate.limits import LIMITS, Overflow
from stallscope.wire.frames import Body

__all__ = ["Beginnings", "Place", "Program"]

TICK_NS = 20_000_000  # two of the ticks in which /proc gives the time of a start


class Program(NamedTuple):
    """What a process ran from then on. Of `at_ns` of the first one see `Beginnings.begin`."""

    at_ns: int
    name: str
    cmdline: list[str]


class Place(NamedTuple):
    """Where its main thread was at a look, and when the look before had been, which found it in another place."""

    at_ns: int
    last_ns: int | None
    task: Task


class Beginnings:
    """PROCESS, IMAGE and PLACE frames, by process."""

    def __init__(self, overflow: Overflow) -> None:
        self.programs: dict[int, list[Program]] = {}
        self.places: dict[int, list[Place]] = {}
        self._overflow = overflow
        self._many = 0

    def begin(self, body: Body) -> None:
        """A PROCESS frame of a process that is in the table.

        It began when its fork was seen (`at_ns`), which is exact; where it was met later, /proc knows the tick.
        """
        proc, at_ns, start_ns = integer(body, "proc"), maybe_integer(body, "at_ns", 0), integer(body, "start_ns")
        if proc not in self.programs:
            began = at_ns if at_ns is not None and abs(at_ns - start_ns) <= TICK_NS else start_ns
            self.programs[proc] = [Program(began, text(body, "name"), texts(body, "cmdline"))]

    def image(self, body: Body) -> None:
        """An IMAGE frame of a process that is in the table; beyond the limit the newest program counts."""
        programs = self.programs[integer(body, "proc")]
        at_ns = maybe_integer(body, "at_ns", 0)
        at_ns = programs[-1].at_ns if at_ns is None else at_ns
        program = Program(at_ns, text(body, "name"), texts(body, "cmdline"))
        if self._overflow.full("programs of a process", len(programs)):
            programs[-1] = program
        else:
            programs.append(program)

    def place(self, body: Body, *, known: bool) -> None:
        """A PLACE frame; `known`: its process is in the table."""
        row = Place(integer(body, "at_ns"), maybe_integer(body, "last_ns", 0), task(body.get("thread")))
        if row.last_ns is not None and row.last_ns > row.at_ns:
            raise BadField("last_ns is later than at_ns")
        if not known or self._overflow.full("places of programs", self._many):
            return
        rows = self.places.setdefault(integer(body, "proc"), [])
        if len(rows) >= LIMITS["places of a program"]:
            self._overflow.turned_away["places of a program"] += 1
            return
        self._many += 1
        rows.append(row)

    def program_at(self, proc: int, at_ns: int) -> Program | None:
        """What the process ran at that time."""
        programs = self.programs.get(proc, [])
        return next((one for one in reversed(programs) if one.at_ns <= at_ns), programs[0] if programs else None)

"""Where the hosts of a block's processes were: looks at their threads, and stacks, taken while it lasted."""

from __future__ import annotations

from typing import Any, NamedTuple

from stallscope.aggregate.checks import BadField, integer, items, maybe_integer, maybe_text
from stallscope.aggregate.limits import Overflow
from stallscope.wire.frames import Body

__all__ = ["Host", "Hosts", "Stack", "Task", "stack_frame", "task"]

MAX_TASKS, MAX_FRAMES, MAX_TEXT = 64, 256, 512
KEPT = 8


class Task(NamedTuple):
    """One thread: state as in /proc/PID/stat, where it is blocked, and on which file."""

    tid: int
    name: str
    state: str
    syscall: str | None
    wchan: str | None
    file: str | None
    cpu_ns: int


class Host(NamedTuple):
    """One look at a process. `writing`: a regular file that grew since the look before, and by how many bytes."""

    at_ns: int
    calls: int
    tasks: list[Task]
    writing: tuple[str, int] | None


class Stack(NamedTuple):
    """A stack, innermost frame first; `why` it is empty."""

    at_ns: int
    tid: int
    frames: list[dict[str, Any]]
    why: str | None


class Hosts:
    """HOST, STACK and SUSPECT frames: the newest few of each process.

    Attributes:
        stackless: processes of which there is no stack at all, and why not.
        suspect_ns: since when capture has seen something stand still, None while all moves.
    """

    def __init__(self, overflow: Overflow) -> None:
        self.looks: dict[int, list[Host]] = {}
        self.stacks: dict[int, list[Stack]] = {}
        self.stackless: dict[int, str] = {}
        self.suspect_ns: int | None = None
        self._overflow = overflow

    def look(self, body: Body) -> None:
        """A HOST frame."""
        tasks = [task(row) for row in items(body, "threads", MAX_TASKS)]
        host = Host(integer(body, "at_ns"), integer(body, "calls"), tasks, _writing(body.get("writing")))
        self._keep(self.looks, integer(body, "proc"), host, "looks at hosts")

    def stack(self, body: Body) -> None:
        """A STACK frame."""
        frames = [stack_frame(row) for row in items(body, "frames", MAX_FRAMES)]
        stack = Stack(integer(body, "at_ns"), integer(body, "tid"), frames, maybe_text(body, "why"))
        proc = integer(body, "proc")
        self._keep(self.stacks, proc, stack, "stacks")
        if any(known.frames for known in self.stacks.get(proc, [])):
            self.stackless.pop(proc, None)
        elif proc in self.stacks and stack.why:
            self.stackless[proc] = stack.why[:MAX_TEXT]

    def suspect(self, body: Body) -> None:
        """A SUSPECT frame."""
        on = body.get("on")
        if not isinstance(on, bool):
            raise BadField("on is no boolean")
        since = maybe_integer(body, "since_ns", 0)
        self.suspect_ns = since if on else None

    def _keep(self, table: dict[int, list[Any]], proc: int, item: Any, name: str) -> None:
        if proc in table or not self._overflow.full(name, len(table)):
            table.setdefault(proc, []).append(item)
            del table[proc][:-KEPT]

    def during(self, proc: int, from_ns: int, to_ns: int) -> list[Host]:
        """Looks at a process in that time, oldest first."""
        return [host for host in self.looks.get(proc, []) if from_ns <= host.at_ns <= to_ns]

    def stack_during(self, proc: int, from_ns: int, to_ns: int, tid: int | None = None) -> Stack | None:
        """The newest stack that was taken in that time and is one: of this thread, else of any of the process."""
        found = [s for s in self.stacks.get(proc, []) if from_ns <= s.at_ns <= to_ns and s.frames]
        found = [s for s in found if s.tid == tid] or found
        return found[-1] if found else None


def _word(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise BadField("a word is no string")
    return value[:MAX_TEXT] if value is not None else None


def task(row: Any) -> Task:
    """A row of `threads`. Raises BadField."""
    if not isinstance(row, list) or len(row) != 7 or not all(type(row[i]) is int and row[i] >= 0 for i in (0, 6)):
        raise BadField("threads holds no thread")
    return Task(row[0], _word(row[1]) or "", _word(row[2]) or "?", _word(row[3]), _word(row[4]), _word(row[5]), row[6])


def _writing(value: Any) -> tuple[str, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or type(value[1]) is not int:
        raise BadField("writing is no file and size")
    return _word(value[0]) or "", value[1]


def stack_frame(row: Any) -> dict[str, Any]:
    """A frame of a stack as frames have it, checked. Raises BadField."""
    if not isinstance(row, list) or len(row) != 4 or not (row[1] is None or type(row[1]) is int):
        raise BadField("frames holds no frame")
    kind = "python" if row[3] == "python" else "native"
    function = _word(row[2]) or ("?" if kind == "python" else None)
    return {"file": _word(row[0]), "line": row[1], "function": function, "kind": kind}

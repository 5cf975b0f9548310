"""Processes of the job that the kernel ended for want of memory, whether or not they are traced."""

from __future__ import annotations

from typing import NamedTuple

from stallscope.aggregate.checks import integer, maybe_boolean, maybe_integer, maybe_text
from stallscope.aggregate.limits import Overflow
from stallscope.wire.frames import Body

__all__ = ["OomKill", "OomKills"]


class OomKill(NamedTuple):
    """One frame: `kills` processes at once where only a counter tells; `ours` None: whose they were is not known."""

    at_ns: int
    proc: int | None
    pid: int | None
    name: str | None
    kills: int
    cgroup: str | None
    ours: bool | None


class OomKills:
    """OOM frames."""

    def __init__(self, overflow: Overflow) -> None:
        self.rows: list[OomKill] = []
        self._overflow = overflow

    def add(self, body: Body) -> None:
        """An OOM frame."""
        row = OomKill(
            integer(body, "at_ns"), maybe_integer(body, "proc", 0), maybe_integer(body, "pid", 0),
            maybe_text(body, "name"), integer(body, "kills", 1, 1 << 32), maybe_text(body, "cgroup"),
            maybe_boolean(body, "ours"),
        )  # fmt: skip
        if not self._overflow.full("kills for want of memory", len(self.rows)):
            self.rows.append(row)

    def notes(self, traced: set[int]) -> list[str]:
        """One sentence each, of those that no row of the report stands for. `traced`: keys of processes."""
        return [_sentence(row) for row in self.rows if row.ours is not False and row.proc not in traced]


def _sentence(row: OomKill) -> str:
    where = f" of the cgroup {row.cgroup}" if row.cgroup else ""
    if row.pid is None and row.name is None:
        many = "a process" if row.kills == 1 else f"{row.kills} processes"
        return f"the kernel ended {many}{where} for want of memory"
    who = f"{row.name or 'a process'} (pid {row.pid if row.pid is not None else 'not visible'})"
    unsure = "" if row.ours else "; whether it belongs to the job is not known"
    return f"the kernel ended {who}{where} for want of memory; it is not traced{unsure}"

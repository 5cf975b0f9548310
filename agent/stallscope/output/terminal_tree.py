"""The processes of the job as a tree: a few lines for a person."""

from __future__ import annotations

from collections import defaultdict

from rich.console import Console
from rich.text import Text

from stallscope.output.rows import Row
from stallscope.output.words import count, cut

__all__ = ["tree"]

LINES, DEPTH = 16, 8
WIDTH = 78
FIRST = "TRACEPARENT"
ALIKE = 3  # so many of a kind are told in one line


def tree(report: Row, page: Console) -> None:
    """Nothing where there is one process only, and nothing is known of its trace."""
    people = report["processes"]
    if len(people) < 2 and not any(FIRST in p["trace_context"] for p in people):
        return
    lines = _Tree(people).lines()
    page.print()
    page.print(Text("processes", style="bold"))
    for line in lines[:LINES]:
        page.print(Text(cut(line, WIDTH)))
    if len(lines) > LINES:
        page.print(Text(f"and {count(len(lines) - LINES)} more lines: --json shows all", style="dim"))


class _Tree:
    """Ancestors above what branches or is traced; siblings that are alike as one."""

    def __init__(self, people: list[Row]) -> None:
        self._people = {p["proc"]: p for p in people}
        self._children: dict[int | None, list[Row]] = defaultdict(list)
        for person in people:
            parent = person["parent"] if person["parent"] in self._people else None
            self._children[parent].append(person)

    def lines(self) -> list[str]:
        """One each, the parents first."""
        found: list[str] = []
        for root in self._children[None]:
            self._add(self._first(root), 0, found)
        return found

    def _first(self, person: Row) -> Row:
        """Below what every job on the machine descends from."""
        children = self._children[person["proc"]]
        while not person["traced"] and person["role"] == "helper" and len(children) == 1:
            person = children[0]
            children = self._children[person["proc"]]
        return person

    def _add(self, person: Row, depth: int, found: list[str]) -> None:
        found.append(f"{_indent(depth)}{_who(person)}{_what(person)}")
        if depth >= DEPTH:
            return
        alike: dict[str, list[Row]] = defaultdict(list)
        for child in self._children[person["proc"]]:
            is_leaf = not self._children[child["proc"]]
            alike[f"{child['name']}{_what(child)}{_end(child)}" if is_leaf else str(child["proc"])].append(child)
        for group in alike.values():
            if len(group) < ALIKE:
                for child in group:
                    self._add(child, depth + 1, found)
            else:
                found.append(f"{_indent(depth + 1)}{count(len(group))} × {_many(group)}{_what(group[0])}")


def _indent(depth: int) -> str:
    return "  " * (depth - 1) + "└ " if depth else ""


def _who(person: Row) -> str:
    return f"{cut(person['name'], 16)} (pid {person['pid']}{_end(person)})"


def _many(group: list[Row]) -> str:
    pids = [p["pid"] for p in group]
    return f"{cut(group[0]['name'], 16)} ({min(pids)} to {max(pids)}{_end(group[0])})"


def _end(person: Row) -> str:
    end = person["exit"]
    if not end:
        return ""
    if end["signal"]:
        return f", signal {end['signal']}"
    return ", ended" if not end["code"] else f", exit code {end['code']}"


def _what(person: Row) -> str:
    role = person["role"].replace("_", " ")
    is_rank = role == "trainer" and person["global_rank"] is not None
    parts = [f"{role} rank {person['global_rank']}" if is_rank else role]
    parts += ["not traced"] if not person["traced"] else _trace(person)
    return f": {', '.join(parts)}"


def _trace(person: Row) -> list[str]:
    """What became of the trace context."""
    told = person["trace_context"].get(FIRST)
    if told is None:
        return []
    if not told["lost"]:
        return [f"trace {cut(_trace_id(told['value']), 10)}{', unknown whether kept' if told['lost'] is None else ''}"]
    if "now" in told:
        return [f"trace {cut(_trace_id(told['now']), 10)} by itself, not {cut(_trace_id(told['value']), 10)}"]
    return [f"trace lost {'by itself' if told['from'] == person['proc'] else 'before it began'}"]


def _trace_id(value: str) -> str:
    parts = value.split("-")
    return parts[1] if len(parts) > 2 else value

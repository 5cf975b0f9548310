"""Processes that did not just end: a line each for a person."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from stallscope.output.rows import Row
from stallscope.output.words import count, cut

__all__ = ["ends_section"]

LINES = 8
LONG_NS = 1_000_000_000


def ends_section(report: Row, page: Console) -> None:
    """Nothing where all that ended did so in order and soon."""
    rows = [person for person in report["processes"] if person["traced"] and _is_odd(person["exit"])]
    if not rows:
        return
    page.print()
    page.print(Text("how processes ended", style="bold"))
    for person in rows[:LINES]:
        role = person["role"].replace("_", " ")
        page.print(Text(f"{cut(person['name'], 16)} (pid {person['pid']}), {role}: {person['exit']['cause']}"))
    if len(rows) > LINES:
        page.print(Text(f"and {count(len(rows) - LINES)} more: --json shows all", style="dim"))


def _is_odd(end: Row | None) -> bool:
    return end is not None and bool(end["signal"] or end["code"] or (end["exiting_ns"] or 0) >= LONG_NS)

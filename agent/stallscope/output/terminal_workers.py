"""Who starves for data, and whose fault it is: a few lines for a person."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from stallscope.output.rows import Row
from stallscope.output.tables import table
from stallscope.output.words import cut, duration, share

__all__ = ["workers_section"]

TRAINERS, WORKERS = 4, 6
LEAST_PERCENT = 1.0


def workers_section(report: Row, page: Console) -> None:
    """Nothing where nobody has workers."""
    people = {p["proc"]: p for p in report["processes"]}
    starved = [s for s in report["stalls"] if s["cause"] == "workers" and _percent(s) >= LEAST_PERCENT]
    rows = report["workers"]
    if not rows:
        return
    for stall in starved[:TRAINERS]:
        page.print()
        page.print(Text(_sentence(stall, rows, people), style="bold"))
    columns = ["pid", "WORKER", "busy", "idle", "blocked", "trainer waited", "IN"]
    table(page, "workers, by looks at them (shares of the time)", columns, rows, WORKERS, lambda row: [
        str(people[row["proc"]]["pid"]),
        cut(people[row["proc"]]["name"], 14),
        *[_part(row, name) for name in ("busy_ns", "idle_ns", "blocked_ns")],
        f"~{duration(row['starved_ns'])}",
        _place(row),
    ])  # fmt: skip


def _percent(stall: Row) -> float:
    return share(stall["total_ns"], stall["watched_ns"]) or 0.0


def _sentence(stall: Row, rows: list[Row], people: dict[int, Row]) -> str:
    person = people[stall["proc"]]
    who = f"rank {person['global_rank']}" if person["global_rank"] is not None else f"pid {person['pid']}"
    slowest = next((row for row in rows if row["trainer"] == stall["proc"] and row["starved_ns"]), None)
    text = f"{who}: starved by data ~{_percent(stall):.0f} % of the time (~{duration(stall['total_ns'])})"
    if slowest is None:
        return text
    place = f", {_place(slowest)}" if slowest["waiting_in"] else ""
    return f"{text}; slowest is worker pid {people[slowest['proc']]['pid']}{place}"


def _part(row: Row, name: str) -> str:
    percent = share(row[name], sum(row[key] for key in ("busy_ns", "idle_ns", "blocked_ns")))
    return "-" if percent is None else f"~{percent:.0f} %"


def _place(row: Row) -> str:
    place = row["waiting_in"]
    if not place:
        return "-"
    if place["syscall"] == "running":
        return "running"
    file = f" on {cut(place['file'], 40)}" if place["file"] else ""
    return f"in {cut(place['syscall'], 20)}(){file}"

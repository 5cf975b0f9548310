"""One screen: who is waiting now, where does the time go."""

from __future__ import annotations

import io
import os
from typing import TextIO

from rich.console import Console
from rich.text import Text

from stallscope.aggregate.faults import Faults
from stallscope.output.gpu import gpu_lines
from stallscope.output.header import counted, ends, subject, traced
from stallscope.output.remarks import remarks
from stallscope.output.rounds import threads_section
from stallscope.output.rows import Row
from stallscope.output.startup import startup_section
from stallscope.output.stdout import printable
from stallscope.output.steps import steps_section
from stallscope.output.tables import table
from stallscope.output.terminal_ends import ends_section
from stallscope.output.terminal_incidents import blocks, episodes, executed, no_blocks
from stallscope.output.terminal_tree import tree
from stallscope.output.terminal_workers import workers_section
from stallscope.output.waits import Whose, is_accident, line_of, lines, own_frame, waits, walls_of
from stallscope.output.words import at_least, count, cut, duration, least

__all__ = ["PLAIN_WIDTH", "render", "report_text"]

PLAIN_WIDTH = 80
FLIGHT, ENQUEUES, COMMS, ERRORS, NOTES = 10, 8, 6, 6, 10
ENQUEUE_KINDS = ("launch", "graph", "copy", "event")


def report_text(report: Row, out: TextIO) -> str:
    """The report for a person, as `out` can show it: 80 columns and no colour unless it is a terminal."""
    tty = out.isatty()
    width = max(PLAIN_WIDTH, os.get_terminal_size(out.fileno()).columns) if tty else PLAIN_WIDTH
    return printable(render(report, width, tty=tty), out)


def render(report: Row, width: int, *, tty: bool) -> str:
    """The report for a person; with colours for a terminal."""
    # No markup, no emoji: names come from the target, and rich would load the tables for them when it can't any more.
    page = Console(
        file=io.StringIO(), width=width, force_terminal=tty, color_system="auto" if tty else None, highlight=False,
        markup=False, emoji=False,
    )  # fmt: skip
    sections = (blocks, _header, no_blocks, episodes, startup_section, steps_section, workers_section, _flight, waits)
    more = (lines, threads_section, _enqueues, _communicators, executed, _others, _errors, tree, ends_section, _remarks)
    faults = Faults()
    for section in (*sections, *more):
        with faults.held(f"showing {section.__name__.strip('_')}"):
            section(report, page)
    for note in faults.notes():
        page.print(Text(note, style="bold red"))
    text: str = page.file.getvalue()  # type: ignore[attr-defined]
    return text


def _header(report: Row, page: Console) -> None:
    page.print(Text(subject(report), style="bold"))
    page.print(Text(traced(report)))
    for end in ends(report):
        page.print(Text(end, style="bold"))
    page.print(Text(counted(report), style="bold red" if report["capture"]["lost"] else ""))


def _flight(report: Row, page: Console) -> None:
    rows = report["in_flight"]
    if not rows:
        _nobody(report, page)
        return
    whose = Whose(report, rows[:FLIGHT])
    columns = [*whose.columns, "tid", "FUNCTION", "for", "WHERE"]
    table(page, "waiting now (inside a call at the end)", columns, rows, FLIGHT, lambda r: [
        *whose.cells(r),
        str(r["tid"]),
        cut(r["api"], 30),
        least(r, "age_ns", duration),
        _place(r),
    ])  # fmt: skip


def _nobody(report: Row, page: Console) -> None:
    """Only where it is known: the last look was taken, and somebody was left to be looked at."""
    capture = report["capture"]
    alive = any(p["libraries"] and not p["exit"] for p in report["processes"])
    if alive and not capture["lost_by"] and not at_least(capture, "duration_ns"):
        page.print()
        page.print(Text("waiting now: no thread was seen inside a call at the end", style="bold"))


def _place(row: Row) -> str:
    if row["inferred"]:
        return "(since before the attach)"
    if row["stack"] and row["comm"] is None:
        return cut(line_of(own_frame(row["stack"])), 32)
    parts = [row["comm_uid"] or row["comm"] or ""]
    parts += [f"rank {row['rank']}"] if row["rank"] is not None else []
    parts += [f"#{row['seq']}"] if row["seq"] is not None else []
    return cut(" ".join(part for part in parts if part), 32)


def _enqueues(report: Row, page: Console) -> None:
    untimed = [c for c in report["calls"] if c["kind"] in ENQUEUE_KINDS and c["total_ns"] is None]
    rows = sorted((c for c in untimed if _outermost(c)), key=lambda c: (is_accident(c, _outermost(c)), -_outermost(c)))
    if not rows:
        return
    walls, whose = walls_of(report), Whose(report, rows[:ENQUEUES])
    title = "enqueue calls (work handed to the GPU; how long it ran is not known)"
    table(page, title, [*whose.columns, "FUNCTION", "calls", "per second"], rows, ENQUEUES, lambda c: [
        *whose.cells(c),
        cut(c["api"], 36),
        at_least(c, "count") + count(_outermost(c)),
        at_least(c, "count") + _rate(_outermost(c), walls.get(c["proc"], 0)),
    ])  # fmt: skip


def _outermost(call: Row) -> int:
    outermost: int = call["count"] - call["nested"]
    return outermost


def _rate(calls: int, wall: int) -> str:
    return count(round(calls * 1e9 / wall)) if wall > 0 else "-"


def _communicators(report: Row, page: Console) -> None:
    rows = report["communicators"]
    if not rows:
        return
    columns = ["UID", "ROOT", "ranks here", "of", "CREATION"]
    table(page, "communicators seen being created", columns, rows, COMMS, lambda c: [
        c["uid"] or (f"child of {c['parent']}" if c["parent"] else "-"),
        cut(c["root_addr"] or "-", 24),
        str(len(c["members"])),
        str(c["nranks"]) if c["nranks"] is not None else "?",
        _outcome(c),
    ])  # fmt: skip


def _outcome(comm: Row) -> str:
    status = comm["status"]
    if status is None:
        return "abandoned" if all(m["abandoned"] for m in comm["members"]) else "under way"
    return {0: "ok", 7: "in progress"}.get(status, f"failed ({status})")


def _others(report: Row, page: Console) -> None:
    lines = gpu_lines(report)
    if lines:
        page.print()
        page.print(Text("what others say", style="bold"))
    for line in lines:
        page.print(Text(line))


def _errors(report: Row, page: Console) -> None:
    rows = sorted((c for c in report["calls"] if c["errors"]), key=lambda c: -c["errors"])
    if not rows:
        return
    whose = Whose(report, rows[:ERRORS])
    columns = [*whose.columns, "FUNCTION", "errors", "of"]
    table(page, "calls that returned an error", columns, rows, ERRORS, lambda c: [
        *whose.cells(c),
        cut(c["api"], 36),
        least(c, "errors", count),
        least(c, "count", count),
    ])  # fmt: skip


def _remarks(report: Row, page: Console) -> None:
    lines = remarks(report)
    if not lines:
        return
    page.print()
    page.print(Text("not seen, and other remarks", style="bold"))
    for line in lines[:NOTES]:
        page.print(Text(f"- {line}"))
    if len(lines) > NOTES:
        page.print(Text(f"and {count(len(lines) - NOTES)} more: --json shows all", style="dim"))

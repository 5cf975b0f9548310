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
from stallscope.output.rows import Row
from stallscope.output.startup import startup_section
from stallscope.output.stdout import printable
from stallscope.output.steps import steps_section
from stallscope.output.tables import table
from stallscope.output.terminal_ends import ends_section
from stallscope.output.terminal_incidents import blocks, episodes, executed, no_blocks
from stallscope.output.terminal_tree import tree
from stallscope.output.terminal_workers import workers_section
from stallscope.output.words import at_least, count, cut, duration, least, share

__all__ = ["PLAIN_WIDTH", "render", "report_text"]

PLAIN_WIDTH = 80
WAITS, FLIGHT, ENQUEUES, COMMS, ERRORS, NOTES = 12, 10, 8, 6, 6, 10
ENQUEUE_KINDS = ("launch", "graph", "copy", "event")
SMALL_PERCENT = 0.5
SHOWN_ANYWAY = 3
OFTEN_NESTED = 10


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
    sections = (blocks, _header, no_blocks, episodes, startup_section, steps_section, workers_section, _flight, _waits)
    faults = Faults()
    for section in (*sections, _enqueues, _communicators, executed, _others, _errors, tree, ends_section, _remarks):
        with faults.held(f"showing {section.__name__.strip('_')}"):
            section(report, page)
    for note in faults.notes():
        page.print(Text(note, style="bold red"))
    text: str = page.file.getvalue()  # type: ignore[attr-defined]
    return text


class _Whose:
    """The columns that say whose a row is: the pid; the rank where one is known; the name where names differ."""

    def __init__(self, report: Row, rows: list[Row]) -> None:
        procs = {row["proc"] for row in rows}
        self._people = {p["proc"]: p for p in report["processes"] if p["proc"] in procs}
        self._ranked = any(p["global_rank"] is not None for p in self._people.values())
        self._named = len({p["name"] for p in self._people.values()}) > 1
        self.columns = ["rank"] * self._ranked + ["pid"] + ["NAME"] * self._named
        self.plain = len(self.columns) == 1

    def cells(self, row: Row) -> list[str]:
        """Of one row."""
        person = self._people.get(row["proc"])
        rank = person["global_rank"] if person else None
        ranks = ["-" if rank is None else str(rank)] * self._ranked
        return [*ranks, str(row["pid"]), *[cut(person["name"] if person else "-", 10)] * self._named]


def _header(report: Row, page: Console) -> None:
    page.print(Text(subject(report), style="bold"))
    page.print(Text(traced(report)))
    for end in ends(report):
        page.print(Text(end, style="bold"))
    page.print(Text(counted(report), style="bold red" if report["capture"]["lost"] else ""))


def _wall(report: Row) -> dict[int, int]:
    """By process: ns under observation."""
    end = report["capture"]["duration_ns"] or 0
    walls = {}
    for p in report["processes"]:
        begin = max(0, p["start_ns"], p["observed_from_ns"] or 0)
        walls[p["proc"]] = (p["exit"]["at_ns"] if p["exit"] else end) - begin
    return walls


def _waits(report: Row, page: Console) -> None:
    walls = _wall(report)
    rows = _by_total(report)
    if not rows:
        page.print()
        page.print(Text("no wait has ended in this time", style="bold"))
        return
    big = [s for s in rows if _counts(s, walls)]
    small = [s for s in rows if not _counts(s, walls)]
    shown = min(len(big), WAITS) or SHOWN_ANYWAY
    whose = _Whose(report, [*big, *small][:shown])
    title = "where the time went: waits that ended, by total (share of the process's time)"
    columns = [*whose.columns, "FUNCTION", "count", "total", "share", *["p50"] * whose.plain, "p99", "max"]
    more = _unshown(len(big) - min(len(big), shown), len(small) - max(0, shown - len(big)))
    table(page, title, columns, [*big, *small], shown, lambda s: [
        *whose.cells(s),
        s["api"] or "(waits for workers)",
        least(s, "count", count),
        least(s, "total_ns", duration),
        _share(s, walls),
        *[duration(s["p50_ns"])] * whose.plain,
        duration(s["p99_ns"]),
        least(s, "max_ns", duration),
    ], more)  # fmt: skip


def _by_total(report: Row) -> list[Row]:
    """The stalls, the largest first; those last that are an accident of the attach."""
    calls = {(c["proc"], c["api"]): c for c in report["calls"]}
    return sorted(report["stalls"], key=lambda s: _is_accident(calls.get((s["proc"], s["api"])), s["count"]))


def _is_accident(call: Row | None, outermost: int) -> bool:
    """Whether calls into the driver that the runtime makes stand here because the attach came in between.

    The runtime's call began before its link; all that came later are nested in one.
    """
    return call is not None and call["library"] == "CUDA" and call["nested"] >= OFTEN_NESTED * max(1, outermost)


def _percent(stall: Row, walls: dict[int, int]) -> float | None:
    return share(stall["total_ns"], walls.get(stall["proc"], 0))


def _counts(stall: Row, walls: dict[int, int]) -> bool:
    percent = _percent(stall, walls)
    return percent is None or percent >= SMALL_PERCENT


def _share(stall: Row, walls: dict[int, int]) -> str:
    percent = _percent(stall, walls)
    if percent is None or (percent < SMALL_PERCENT and at_least(stall, "total_ns")):
        return "-"
    return f"<{SMALL_PERCENT} %" if percent < SMALL_PERCENT else f"{at_least(stall, 'total_ns')}{percent:.0f} %"


def _unshown(big: int, small: int) -> str:
    parts = [f"{count(big)} more"] if big else []
    parts += [f"{count(small)} more below {SMALL_PERCENT} %"] if small else []
    return f"and {' and '.join(parts)}: --json shows all"


def _flight(report: Row, page: Console) -> None:
    rows = report["in_flight"]
    if not rows:
        _nobody(report, page)
        return
    whose = _Whose(report, rows[:FLIGHT])
    columns = [*whose.columns, "tid", "FUNCTION", "for", "COMMUNICATOR"]
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
    parts = [row["comm_uid"] or row["comm"] or ""]
    parts += [f"rank {row['rank']}"] if row["rank"] is not None else []
    parts += [f"#{row['seq']}"] if row["seq"] is not None else []
    return cut(" ".join(part for part in parts if part), 32)


def _enqueues(report: Row, page: Console) -> None:
    untimed = [c for c in report["calls"] if c["kind"] in ENQUEUE_KINDS and c["total_ns"] is None]
    rows = sorted((c for c in untimed if _outermost(c)), key=lambda c: (_is_accident(c, _outermost(c)), -_outermost(c)))
    if not rows:
        return
    walls, whose = _wall(report), _Whose(report, rows[:ENQUEUES])
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
    whose = _Whose(report, rows[:ERRORS])
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

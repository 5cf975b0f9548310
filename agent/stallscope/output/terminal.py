"""One screen: where does the time go, who is waiting now."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stallscope.output.rows import Row
from stallscope.output.words import at_least, clean, count, cut, duration, least

__all__ = ["print_report"]

PLAIN_WIDTH = 80
WAITS, FLIGHT, ENQUEUES, COMMS, ERRORS, NOTES = 12, 10, 8, 6, 6, 10
ENQUEUE_KINDS = ("launch", "graph", "copy", "event")
LINE = 76


def print_report(report: Row, out: TextIO) -> None:
    """Print a report for a person: 80 columns and no colour unless `out` is a terminal."""
    tty = out.isatty()
    width = max(PLAIN_WIDTH, os.get_terminal_size(out.fileno()).columns) if tty else PLAIN_WIDTH
    page = Console(
        file=io.StringIO(), width=width, force_terminal=tty, color_system="auto" if tty else None, highlight=False
    )
    for section in (_header, _waits, _flight, _enqueues, _communicators, _errors, _remarks):
        section(report, page)
    text: str = page.file.getvalue()  # type: ignore[attr-defined]
    encoding = out.encoding or "utf-8"
    out.write(text.encode(encoding, "replace").decode(encoding))


def _table(
    page: Console, title: str, columns: list[str], rows: list[Row], limit: int, cells: Callable[[Row], list[str]]
) -> None:
    """Print the first `limit` rows. Columns named in capitals hold words and give way; numbers are never cut."""
    page.print()
    page.print(Text(title, style="bold"))
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    lines = [cells(row) for row in rows[:limit]]
    for i, name in enumerate(columns):
        is_word = name.isupper()
        widest = max(len(name), *(len(line[i]) for line in lines))
        table.add_column(
            name.lower(), no_wrap=True, justify="left" if is_word else "right", min_width=None if is_word else widest
        )
    for line in lines:
        table.add_row(*map(Text, line))
    page.print(table)
    if len(rows) > limit:
        page.print(Text(f"and {count(len(rows) - limit)} more (--json shows all)", style="dim"))


def _header(report: Row, page: Console) -> None:
    capture = report["capture"]
    people = report["processes"]
    first = f"{clean(people[0]['name'])} (pid {people[0]['pid']})" if people else "no process"
    who = f"{first} and {len(people) - 1} more" if len(people) > 1 else first
    host = f" on {clean(capture['host'])}" if capture["host"] else ""
    page.print(Text(cut(f"stallscope: {who}{host}", LINE), style="bold"))
    one_in = capture["sample_one_in"] or 1
    sampling = "every call recorded" if one_in == 1 else f"1 in {one_in:,.6g} short calls recorded, all counted"
    page.print(Text(f"{duration(capture['duration_ns'])} traced, {sampling}"))
    captured = f"captured {least(capture, 'events', count)}, lost {least(capture, 'lost', count)}"
    filtered = sum(capture["filtered"].values())
    more = f", filtered {count(filtered)}" if filtered else ""
    style = "bold red" if capture["lost"] else ""
    page.print(Text(f"{captured}, sampled out {least(capture, 'sampled_out', count)}{more}", style=style))


def _wall(report: Row) -> dict[int, int]:
    """By process: ns under observation."""
    end = report["capture"]["duration_ns"] or 0
    walls = {}
    for p in report["processes"]:
        begin = max(0, p["start_ns"], p["observed_from_ns"] or 0)
        walls[p["proc"]] = (p["exit"]["at_ns"] if p["exit"] else end) - begin
    return walls


def _share(total: int, wall: int) -> str:
    return f"{100 * total / wall:.0f} %" if wall > 0 else "-"


def _waits(report: Row, page: Console) -> None:
    walls = _wall(report)
    if not report["stalls"]:
        page.print()
        page.print(Text("no wait has ended in this time", style="bold"))
        return
    title = "waits, by total (share of the process's wall time, all threads together)"
    columns = ["pid", "FUNCTION", "count", "total", "share", "p50", "p99", "max"]
    _table(page, title, columns, report["stalls"], WAITS, lambda s: [
        str(s["pid"]),
        s["api"],
        least(s, "count", count),
        least(s, "total_ns", duration),
        at_least(s, "total_ns") + _share(s["total_ns"], walls.get(s["proc"], 0)),
        duration(s["p50_ns"]),
        duration(s["p99_ns"]),
        least(s, "max_ns", duration),
    ])  # fmt: skip


def _flight(report: Row, page: Console) -> None:
    rows = report["in_flight"]
    if not rows:
        return
    columns = ["pid", "tid", "FUNCTION", "for", "COMMUNICATOR"]
    _table(page, "inside a call at the end", columns, rows, FLIGHT, lambda r: [
        str(r["pid"]),
        str(r["tid"]),
        cut(r["api"], 30),
        least(r, "age_ns", duration),
        _place(r),
    ])  # fmt: skip


def _place(row: Row) -> str:
    if row["inferred"]:
        return "(since before the attach)"
    parts = [row["comm_uid"] or row["comm"] or ""]
    parts += [f"rank {row['rank']}"] if row["rank"] is not None else []
    parts += [f"#{row['seq']}"] if row["seq"] is not None else []
    return cut(" ".join(part for part in parts if part), 32)


def _enqueues(report: Row, page: Console) -> None:
    untimed = [c for c in report["calls"] if c["kind"] in ENQUEUE_KINDS and c["total_ns"] is None]
    rows = sorted((c for c in untimed if c["count"] > c["nested"]), key=lambda c: c["nested"] - c["count"])
    if not rows:
        return
    walls = _wall(report)
    title = "enqueue calls (work handed to the GPU; how long it ran is not known)"
    _table(page, title, ["pid", "FUNCTION", "calls", "per second"], rows, ENQUEUES, lambda c: [
        str(c["pid"]),
        cut(c["api"], 36),
        at_least(c, "count") + count(c["count"] - c["nested"]),
        _rate(c["count"] - c["nested"], walls.get(c["proc"], 0)),
    ])  # fmt: skip


def _rate(calls: int, wall: int) -> str:
    return count(round(calls * 1e9 / wall)) if wall > 0 else "-"


def _communicators(report: Row, page: Console) -> None:
    rows = report["communicators"]
    if not rows:
        return
    columns = ["UID", "ROOT", "ranks here", "of", "CREATION"]
    _table(page, "communicators seen being created", columns, rows, COMMS, lambda c: [
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


def _errors(report: Row, page: Console) -> None:
    rows = sorted((c for c in report["calls"] if c["errors"]), key=lambda c: -c["errors"])
    if not rows:
        return
    columns = ["pid", "FUNCTION", "errors", "of"]
    _table(page, "calls that returned an error", columns, rows, ERRORS, lambda c: [
        str(c["pid"]),
        cut(c["api"], 36),
        least(c, "errors", count),
        least(c, "count", count),
    ])  # fmt: skip


def _remarks(report: Row, page: Console) -> None:
    capture = report["capture"]
    pids = {p["proc"]: p["pid"] for p in report["processes"]}
    lines = [clean(note) for note in capture["notes"]]
    lines += [f"lost at {clean(place)}: {count(n)}" for place, n in capture["lost_by"].items()]
    lines += [_gap(gap, pids) for gap in capture["gaps"]]
    if not lines:
        return
    page.print()
    page.print(Text("not seen, and other remarks", style="bold"))
    for line in lines[:NOTES]:
        page.print(Text(f"- {line}"))
    if len(lines) > NOTES:
        page.print(Text(f"and {len(lines) - NOTES} more (--json shows all)", style="dim"))


def _gap(gap: Row, pids: dict[int, int]) -> str:
    where = f"pid {pids.get(gap['proc'], '?')}" if gap["proc"] is not None else "all processes"
    missed = "unknown calls" if gap["count"] is None else f"{count(gap['count'])} records"
    span = duration(gap["to_ns"] - gap["from_ns"])
    return f"{where}: {missed} missed in {span} at {duration(gap['from_ns'])} ({clean(gap['reason'])})"

"""Sections of the screen about waits that ended: by function, and by the Python line that waited."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from stallscope.diagnose.callsites import not_own
from stallscope.output.rows import Row, bound
from stallscope.output.tables import table
from stallscope.output.words import at_least, count, cut, duration, least, share

__all__ = ["Whose", "is_accident", "line_of", "lines", "own_frame", "python_frames", "waits", "walls_of"]

WAITS, LINES, DRY = 12, 10, 3
SMALL_PERCENT = 0.5
SHOWN_ANYWAY = 3
OFTEN_NESTED = 10


class Whose:
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


def walls_of(report: Row) -> dict[int, int]:
    """By process: ns under observation."""
    end = report["capture"]["duration_ns"] or 0
    walls = {}
    for p in report["processes"]:
        begin = max(0, p["start_ns"], p["observed_from_ns"] or 0)
        walls[p["proc"]] = (p["exit"]["at_ns"] if p["exit"] else end) - begin
    return walls


def waits(report: Row, page: Console) -> None:
    """By function and process, the largest total first."""
    walls = walls_of(report)
    rows = _by_total(report)
    if not rows:
        page.print()
        page.print(Text("no wait has ended in this time", style="bold"))
        return
    big = [s for s in rows if _counts(s, walls)]
    small = [s for s in rows if not _counts(s, walls)]
    shown = min(len(big), WAITS) or SHOWN_ANYWAY
    whose = Whose(report, [*big, *small][:shown])
    title = "where the time went: waits that ended, by total (share of the process's time)"
    columns = [*whose.columns, "FUNCTION", "count", "total", "share", *["p50"] * whose.plain, "p99", "max"]
    more = _unshown(len(big) - min(len(big), shown), len(small) - max(0, shown - len(big)))
    table(page, title, columns, [*big, *small], shown, lambda s: [
        *whose.cells(s),
        _function(s),
        least(s, "count", count),
        least(s, "total_ns", duration),
        _share(s, walls),
        *[duration(s["p50_ns"])] * whose.plain,
        duration(s["p99_ns"]),
        least(s, "max_ns", duration),
    ], more)  # fmt: skip


def _by_total(report: Row) -> list[Row]:
    """The stalls by function, the largest first; those last that are an accident of the attach."""
    calls = {(c["proc"], c["api"]): c for c in report["calls"]}
    groups: dict[tuple[int, str], list[Row]] = {}
    for stall in report["stalls"]:
        groups.setdefault((stall["proc"], _function(stall)), []).append(stall)
    rows = [_whole(group, calls.get(key)) for key, group in groups.items()]
    rows.sort(key=lambda s: -s["total_ns"])
    return sorted(rows, key=lambda s: is_accident(calls.get((s["proc"], s["api"])), s["count"]))


def _function(stall: Row) -> str:
    return stall["api"] or ("(waits for workers)" if stall["cause"] == "workers" else "(waits for threads)")


def _whole(group: list[Row], call: Row | None) -> Row:
    """The rows of one function as one. Percentiles of parts don't add up: those of all its calls serve, where none of
    them was nested."""
    if len(group) == 1:
        return group[0]
    longest = [row["max_ns"] for row in group]
    row = group[0] | {key: sum(part[key] for part in group) for key in ("count", "total_ns")}
    row |= {"max_ns": None if None in longest else max(longest), "p50_ns": None, "p99_ns": None}
    if call is not None and not call["nested"]:
        row |= {key: call[key] for key in ("max_ns", "p50_ns", "p99_ns")}
    return row


def is_accident(call: Row | None, outermost: int) -> bool:
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


def lines(report: Row, page: Console) -> None:
    """The Python lines that waited most, over all processes."""
    known: dict[tuple[str, str, str], list[Row]] = {}
    unknown: list[Row] = []
    for stall in report["stalls"]:
        frame = stall["user_site"] or stall["site"]
        if frame and frame["file"]:
            known.setdefault((line_of(frame, 26), _function(stall), _why(stall)), []).append(stall)
        else:
            unknown.append(stall)
    if not known:
        return
    walls = walls_of(report)
    rows = sorted((_sum(key, group, walls) for key, group in known.items()), key=lambda r: (-r["total_ns"], r["line"]))
    several = any(row["procs"] > 1 for row in rows[:LINES])
    columns = ["LINE", "FUNCTION", *["processes"] * several, "count", "total", "share", "WHY"]
    table(page, "the lines that wait most (share of the time of their processes)", columns, rows, LINES, lambda r: [
        cut(r["line"], 20 if several else 26),
        cut(r["api"], 21),
        *[str(r["procs"])] * several,
        least(r, "count", count),
        least(r, "total_ns", duration),
        _share(r, {0: r["wall"]}),
        r["why"],
    ])  # fmt: skip
    _tell_dry(rows, page)
    _tell_unknown(unknown, page)


def _why(stall: Row) -> str:
    """The cause, marked where it is a guess."""
    return ("~" if stall.get("cause_is") else "") + (stall.get("cause") or "-")


def _tell_dry(rows: list[Row], page: Console) -> None:
    """After which lines the device had nothing left to do, and for how long until the next launch."""
    dry = sorted((row for row in rows if row["dry_ns"]), key=lambda row: -row["dry_ns"])
    if dry:
        told = ", ".join(f"{row['line']} ~{duration(row['dry_ns'])}" for row in dry[:DRY])
        page.print(Text(f"nothing was queued any more after: {told}", style="dim"))


def _tell_unknown(unknown: list[Row], page: Console) -> None:
    if unknown:
        why = sorted({stall["site_unknown"] for stall in unknown if stall["site_unknown"]})
        told = f": {why[0]}" + (" and other reasons" if len(why) > 1 else "") if why else ""
        calls, total_ns = (sum(stall[key] for stall in unknown) for key in ("count", "total_ns"))
        page.print(Text(f"and {count(calls)} waits ({duration(total_ns)}) from unknown lines{told}", style="dim"))


def own_frame(stack: list[Row]) -> Row:
    """The innermost Python frame in a file of the user's own, else the innermost one."""
    frames = python_frames(stack) or stack
    return next((frame for frame in frames if not not_own(frame["file"])), frames[0])


def python_frames(stack: list[Row]) -> list[Row]:
    """Without native ones."""
    return [frame for frame in stack if frame["kind"] == "python"]


def line_of(frame: Row, most: int = 80) -> str:
    """ "loop/train.py:42 step": the end of the path tells more than its beginning.

    Args:
        most: columns there are; where they don't suffice the folder goes first.
    """
    folder, _, name = (frame["file"] or "?").rpartition("/")
    place = f"{folder.rpartition('/')[2]}/{name}" if folder else name
    function = frame["function"] or "?"
    if len(f"{place}:{frame['line'] or '?'} {function}") > most:
        place = name
    return f"{place[-24:]}:{frame['line'] or '?'} {function}"


def _sum(key: tuple[str, str, str], group: list[Row], walls: dict[int, int]) -> Row:
    procs = {stall["proc"] for stall in group}
    row: Row = {"line": key[0], "api": key[1], "why": key[2], "procs": len(procs), "proc": 0}
    row["dry_ns"] = sum(stall.get("dry_ns") or 0 for stall in group)
    row |= {number: sum(stall[number] for stall in group) for number in ("count", "total_ns")}
    for number in ("count", "total_ns"):
        bound(row, any(at_least(stall, number) for stall in group), number)
    return row | {"wall": sum(walls.get(proc, 0) for proc in procs)}

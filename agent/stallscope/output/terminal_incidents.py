"""Who blocks whom, for a tired person: incidents, waits that resolved, and what the communicators did."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stallscope.output.announce import OUTCOMES
from stallscope.output.rows import Row
from stallscope.output.tables import table
from stallscope.output.waits import python_frames
from stallscope.output.words import at_least, clean, count, cut, duration, least

__all__ = ["blocks", "episodes", "executed", "no_blocks"]

INCIDENTS, CULPRITS, FRAMES, EPISODES, OPERATIONS, CASCADE = 4, 4, 3, 8, 8, 3
SHORT_GAP_NS = 1_000_000_000  # nobody waits for a late rank for two seconds inside a shorter one
LONG_CALL_NS = 2_000_000_000
MEANING = {
    "DIED": "a process died",
    "NOT_ARRIVED": "a rank has not come",
    "LEFT": "a rank has ended its part",
    "GPU_STUCK": "a GPU does not come to it",
    "MISMATCH": "ranks call different things",
    "SKIPPED": "a rank left a call out",
    "EXTRA": "a rank made a call too many",
    "ORDER_DEADLOCK": "ranks wait for each other",
    "IN_API": "a rank is inside a call that does not return",
    "ALL_ARRIVED": "all ranks came, it does not end",
    "STRAGGLER": "a rank is slow",
    "SILENT_MISMATCH": "ranks called different things, unnoticed",
    "WORKER_DIED": "a worker process died",
    "CANNOT_DECIDE": "it can't be told who",
}
EVIDENCE = {
    "host_state": "where each host stands now, not which calls were made",
    "api": "which NCCL calls each rank made; not what its GPU did",
    "completion": "which calls each rank made and which of them completed",
    "gpu_start": "which calls each rank made and which of them its GPU began",
}


def blocks(report: Row, page: Console) -> None:
    """The incidents, those that go on in front."""
    rows = sorted(report["incidents"], key=lambda row: (row["ended"], row["start_ns"], row["id"]))
    for row in rows[:INCIDENTS]:
        _block(row, report, page)
    if len(rows) > INCIDENTS:
        page.print(Text(f"and {count(len(rows) - INCIDENTS)} more incidents: --json shows all", style="dim"))
        page.print()


def _block(row: Row, report: Row, page: Console) -> None:
    page.print(Text(_title(row), style="bold" if row["ended"] else "bold red"))
    page.print(Text(clean(row["summary"]), style="bold"))
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, words in _facts(row, report):
        grid.add_row(Text(name), Text(words))
    page.print(grid)
    page.print()


def _title(row: Row) -> str:
    how = OUTCOMES.get(row["outcome"], row["outcome"]) if row["ended"] else "NOT OVER"
    lasted = f", {how} after {least(row, 'duration_ns', duration)}" if row["duration_ns"] else ""
    label = f" ({row['label'].replace('_', ' ')})" if row["label"] else ""
    meaning = MEANING.get(row["class"])
    what = f"{row['class']}: {meaning}" if meaning else row["class"]
    return f"INCIDENT {row['id']}{lasted}{label}: {what}"


def _facts(row: Row, report: Row) -> Iterator[tuple[str, str]]:
    for culprit in row["culprits"][:CULPRITS]:
        yield "at fault", _who(culprit)
        yield from _where(culprit)
    if len(row["culprits"]) > CULPRITS:
        yield "", f"and {count(len(row['culprits']) - CULPRITS)} more ranks"
    if not row["culprits"]:
        yield "at fault", "no rank that can be named"
    yield from _operation(row, report)
    yield "since", _since(row)
    yield "evidence", f"{row['confidence']} confidence; known is {EVIDENCE.get(row['evidence'], row['evidence'])}"
    for name, number in row["numbers"].items():
        yield "measured", _measured(name, number)
    yield from _others(row, report)
    for witness in report["witnesses"]:
        if witness["incident"] == row["id"]:
            yield f"{clean(witness['source'])} says", clean(witness["says"])
    yield "do now", clean(row["next"])


def _who(place: Row) -> str:
    parts = [f"rank {place['rank']}"] if place["rank"] is not None else []
    parts += [f"global rank {place['global_rank']}"] if place["global_rank"] is not None else []
    host = f" on {cut(place['host'], 64)}" if place["host"] else ""
    return ", ".join([*parts, f"pid {place['pid']}"]) + host


def _where(culprit: Row) -> Iterator[tuple[str, str]]:
    waiting = culprit["waiting_in"]
    if waiting and (waiting["syscall"] or waiting["wchan"]):
        file = f" of {cut(waiting['file'], 200)}" if waiting["file"] else ""
        inside = f" ({cut(waiting['wchan'], 40)})" if waiting["wchan"] else ""
        yield "waits in", f"{cut(waiting['syscall'] or 'the kernel', 40)}{file}{inside}"
    stack = python_frames(culprit["stack"] or []) or culprit["stack"] or []
    for i, frame in enumerate(stack[:FRAMES]):
        yield ("stack" if i == 0 else ""), _frame(frame)


def _frame(frame: Row) -> str:
    line = f":{frame['line']}" if frame["line"] is not None else ""
    place = f"  {cut(frame['file'], 160)}{line}" if frame["file"] else ""
    return f"{cut(frame['function'] or '?', 80)}{place}"


def _operation(row: Row, report: Row) -> Iterator[tuple[str, str]]:
    if row["op"]:
        yield "call", row["op"] + (f" #{row['seq']}" if row["seq"] is not None else "")
    if row["comm"]:
        yield "group", _communicator(row["comm"], report)


def _communicator(comm: str, report: Row) -> str:
    known = next((c for c in report["communicators"] if c["id"] == comm), None)
    if known is None:
        return f"communicator {clean(comm)}"
    name = (
        f"communicator {known['uid']}" if known["uid"] else f"communicator {known['id']}, a child without a unique id"
    )
    parent = next((c for c in report["communicators"] if c["id"] == known["parent"]), None)
    if parent is not None:
        name += f" (child of {parent['uid'] or parent['id']})"
    parts = [name] + ([f"hash {known['comm_hash']}"] if known["comm_hash"] else [])
    parts += [f"{known['nranks']} ranks"] if known["nranks"] is not None else []
    return ", ".join(parts) + ("" if known["identity"] == "verified" else " (identity not verified)")


def _since(row: Row) -> str:
    if row["start_ns"] <= 0:
        return f"before the capture began, so for longer than {duration(row['duration_ns'])}"
    seen = duration(row["reported_ns"] - row["start_ns"])
    about = "at the latest " if row.get("start_ns_is") else ""
    return f"{about}{duration(row['start_ns'])} after the capture began; reported {seen} later"


def _measured(name: str, number: int) -> str:
    if name.endswith("_ns"):
        return f"{name.removesuffix('_ns').replace('_', ' ')}: {duration(number)}"
    if name.endswith("_percent"):
        return f"{name.removesuffix('_percent').replace('_', ' ')} {number} %"
    return f"{name.replace('_', ' ')}: {count(number)}"


def _others(row: Row, report: Row) -> Iterator[tuple[str, str]]:
    victims, cascade = row["victims"], row["cascade"]
    if victims:
        ranks = [place["global_rank"] for place in victims]
        known = sorted(rank for rank in ranks if rank is not None)
        named = f": {_ranges(known)}" if known and len(known) == len(ranks) else ""
        yield "held up", f"{count(len(victims))} rank{'s' * (len(victims) != 1)}{named}"
    if cascade:
        names = {c["id"]: c["uid"] or c["id"] for c in report["communicators"]}
        listed = ", ".join(clean(names.get(comm, comm)) for comm in cascade[:CASCADE])
        named = listed + (", …" if len(cascade) > CASCADE else "")
        yield "spread to", f"{count(len(cascade))} more communicator{'s' * (len(cascade) != 1)}: {named}"


def _ranges(numbers: list[int]) -> str:
    """Of sorted numbers, e.g. "0, 2-7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number <= runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def no_blocks(report: Row, page: Console) -> None:
    """That nobody was held up, where collectives were watched and nothing was missed."""
    if report["incidents"] or not report["communicators"] or not _is_whole(report):
        return
    page.print()
    page.print(Text("no incident: no rank held up a collective for seconds", style="bold"))


def _is_whole(report: Row) -> bool:
    capture = report["capture"]
    short = [gap for gap in capture["gaps"] if gap["source"] == "link" and gap["to_ns"] - gap["from_ns"] < SHORT_GAP_NS]
    verified = all(comm["identity"] == "verified" for comm in report["communicators"])
    stands = any(row["age_ns"] > LONG_CALL_NS for row in report["in_flight"])
    bounded = at_least(capture, "duration_ns")
    return verified and not (bounded or stands or capture["lost"]) and len(short) == len(capture["gaps"])


def episodes(report: Row, page: Console) -> None:
    """Waits for late ranks, also those that resolved by themselves."""
    rows = report["episodes"]
    if not rows:
        return
    worst = rows[0]
    rank = worst["global_rank"] if worst["global_rank"] is not None else worst["rank"]
    who = f"rank {rank}" if rank is not None else f"pid {worst['pid']}"
    title = (
        f"waits for a late rank that ended: {who} made others wait {_times(worst['count'])}, "
        f"{_about(worst, 'total_ns')} in all, longest {_about(worst, 'max_ns')}"
    )
    columns = ["rank", "pid", "COMMUNICATOR", "times", "total", "p99", "longest", "it began at"]
    table(page, title, columns, rows, EPISODES, lambda row: [
        "-" if row["global_rank"] is None else str(row["global_rank"]),
        str(row["pid"]),
        row["comm_uid"] or cut(row["comm"], 16),
        count(row["count"]),
        _about(row, "total_ns"),
        duration(row["p99_ns"]),
        _about(row, "max_ns"),
        duration(row["longest"][0]["at_ns"]) if row["longest"] else "-",
    ])  # fmt: skip


def _times(number: int) -> str:
    return "once" if number == 1 else f"{count(number)} times"


def _about(row: Row, key: str) -> str:
    mark = "~" if row.get(f"{key}_is") == "estimated" else at_least(row, key)
    return f"{mark}{duration(row[key])}"


def executed(report: Row, page: Console) -> None:
    """What the communicators really did, the operations with the most bytes in front."""
    rows = sorted(report["collectives"], key=lambda row: -row["bytes"])
    if not rows:
        return
    uids = {comm["id"]: comm["uid"] for comm in report["communicators"]}
    columns = ["COMMUNICATOR", "OPERATION", "DTYPE", "calls", "per step", "bytes", "waited"]
    table(page, "what the communicators executed", columns, rows, OPERATIONS, lambda row: [
        uids.get(row["comm"]) or cut(row["comm"], 16),
        cut(row["op"], 24),
        cut(row["dtype"], 8),
        least(row, "calls", count),
        "-" if row["calls_per_step"] is None else f"{row['calls_per_step']:g}",
        least(row, "bytes", _bytes),
        "-" if row["wait_ns"] is None else least(row, "wait_ns", duration),
    ])  # fmt: skip


def _bytes(number: int) -> str:
    for size, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"

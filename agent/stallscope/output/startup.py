"""`startup` of the report, and what a person reads of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from stallscope.aggregate.state import State
from stallscope.diagnose.startphases import Phase
from stallscope.diagnose.startup import Command, StartUp
from stallscope.output.rows import Row, since
from stallscope.output.words import at_least, clean, count, cut, duration

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["startup_notes", "startup_rows", "startup_section"]

LINE, SHOWN, WORDS = 150, 5, 60
LEAST_NS, WORTH_NS = 200_000_000, 1_000_000_000
NAMES = {
    "imports": "interpreter and imports", "loading": "loading", "first_cuda_call": "first CUDA call",
    "context": "context", "communicators": "communicators", "first_launch": "first launch", "warm_up": "warm-up",
    "first_steady_step": "first steady step",
}  # fmt: skip


def startup_rows(state: State, found: StartUp) -> list[Row]:
    """The section, in the order of time; what has no instant comes last."""
    rows = [_command(state, one, index == found.worst) for index, one in enumerate(found.commands)]
    rows += [_phase(state, one) for one in found.phases]
    return sorted(rows, key=lambda row: (row["at_ns"] is None, row["at_ns"] or 0))


def startup_notes(state: State, found: StartUp) -> list[str]:
    """What of the start-up is not known, or not told."""
    notes = []
    if found.left_out:
        notes.append(f"start-up: {found.left_out} shorter commands are not listed")
    capture = state.capture
    if not found.commands or capture is None:
        return notes
    if "bpf" not in capture.sources:
        notes.append("start-up: commands that ended within a second may not have been seen")
        return notes
    oldest = min((p.start_ns for p in state.processes.table.values() if p.traced), default=capture.start_mono_ns)
    before_ns = capture.start_mono_ns - oldest
    if before_ns >= LEAST_NS:
        notes.append(
            f"start-up: {duration(before_ns)} of it were before the capture: commands that had ended are not seen"
        )
    return notes


def _command(state: State, one: Command, is_worst: bool) -> Row:
    exit_row = one.exit and {"code": one.exit.code, "signal": one.exit.signal}
    known = exit_row if exit_row and any(value is not None for value in exit_row.values()) else None
    waited = one.waited
    row: Row = {
        "what": "wait" if one.is_itself else "command",
        "command": " ".join(one.what),
        "proc": one.proc,
        "by": one.by,
        "at_ns": since(state, one.from_ns),
        "duration_ns": one.to_ns - one.from_ns,
        "own_ns": one.own_ns,
        "waited_for": waited and {
            "syscall": waited.task.syscall, "file": waited.task.file, "wchan": waited.task.wchan,
            "duration_ns": waited.ns, "duration_ns_is": "lower_bound" if waited.is_least else "estimated",
        },
        "exit": known,
        "went_on": one.ignored,
        "avoidable_ns": one.avoidable_ns,
        "largest": is_worst,
        "times": one.times,
        "together_ns": one.together_ns,
    }  # fmt: skip
    row["together_ns_is"] = row["own_ns_is"] = row["avoidable_ns_is"] = "estimated"
    if one.running:
        row["duration_ns_is"] = "lower_bound"
    elif not one.exact:
        row["duration_ns_is"] = "estimated"
    return row


def _phase(state: State, one: Phase) -> Row:
    row: Row = {"what": one.what, "proc": one.proc, "at_ns": since(state, one.at_ns), "duration_ns": one.ns,
                "waited_for": None, "exit": None, "why": one.why}  # fmt: skip
    if one.at_is and one.at_ns is not None:
        row["at_ns_is"] = one.at_is
    if one.ns_is and one.ns is not None:
        row["duration_ns_is"] = one.ns_is
    return row


def startup_section(report: Row, page: Console) -> None:
    """The largest avoidable item first, then what else took long, then the trainer's own way."""
    rows = report["startup"]
    commands = [row for row in rows if "command" in row]
    worst = [row for row in commands if row["largest"]]
    told = {(r["command"], r["by"]) for r in worst if r["times"] > 1}
    rest = (r for r in commands if not r["largest"] and (r["command"], r["by"]) not in told)
    others = sorted((r for r in rest if r["own_ns"] >= LEAST_NS), key=lambda r: -r["own_ns"])
    way = _way(report, [row for row in rows if "command" not in row])
    if not worst and not others and not way:
        return
    pids = {p["proc"]: p["pid"] for p in report["processes"]}
    page.print()
    page.print(Text("start-up", style="bold"))
    for row in worst:
        page.print(Text(cut(_sentence(row, pids), 2 * LINE), style="bold red"))
    for row in others[:SHOWN]:
        page.print(Text(f"- {cut(_sentence(row, pids), 2 * LINE)}"))
    if len(others) > SHOWN:
        page.print(Text(f"and {count(len(others) - SHOWN)} more: --json shows all", style="dim"))
    if way:
        page.print(Text(way))


def _sentence(row: Row, pids: dict[int, int]) -> str:
    """E.g. "18.0 s: `grep x /proc/kmsg` (pid 4711, by launch.sh) waited in read() on /proc/kmsg, exit 1, and ..."."""
    took = f"{at_least(row, 'duration_ns')}{duration(row['duration_ns'])}"
    if row["largest"] and row["times"] > 1:
        took = f"{duration(row['together_ns'])} in {count(row['times'])} times"
    by = f", by {clean(row['by'])}" if row["by"] else ""
    who = f"`{cut(row['command'], WORDS)}` (pid {pids.get(row['proc'], '?')}{by})"
    return f"{took}: {who} {_waited(row)}{_ending(row)}"


def _waited(row: Row) -> str:
    waited = row["waited_for"]
    if waited is None:
        return "was not looked at" if row["duration_ns"] >= LEAST_NS else "ran"
    if waited["syscall"] is None:
        return "computed"
    on = f" on {_file(waited['file'])}" if waited["file"] else ""
    mostly = "" if 2 * waited["duration_ns"] >= row["duration_ns"] else f" for {duration(waited['duration_ns'])}"
    return f"waited{mostly} in {waited['syscall']}(){on}"


def _file(name: str) -> str:
    """Of a long path the end tells more than the beginning."""
    if name.startswith("pipe:"):
        return "a pipe"
    if name.startswith("socket:"):
        return "a socket"
    return clean(name) if len(name) <= WORDS else f"..{clean(name[-(WORDS - 2) :])}"


def _ending(row: Row) -> str:
    if row["what"] == "wait":
        return ""
    if row["exit"] is None:
        return ", still running" if row.get("duration_ns_is") == "lower_bound" else ", exit status unknown"
    signal, code = row["exit"]["signal"], row["exit"]["code"]
    ended = f"signal {signal}" if signal else f"exit {code}"
    on = f", and {clean(row['by'] or 'who started it')} went on" if row["went_on"] else ""
    return f", {ended}{on}" if signal or code else ""


def _way(report: Row, rows: list[Row]) -> str:
    """The first trainer's phases in one line."""
    first = next((row["proc"] for row in rows), None)
    known = [row for row in rows if row["proc"] == first and row["duration_ns"] is not None]
    parts = [f"{NAMES.get(row['what'], row['what'])} {at_least(row, 'duration_ns')}{duration(row['duration_ns'])}"
             for row in known if row["what"] != "context"]  # fmt: skip
    if not parts or sum(row["duration_ns"] for row in known) < WORTH_NS:
        return ""
    ranks = {p["proc"]: p["global_rank"] for p in report["processes"]}
    whose = f"rank {ranks[first]}" if first is not None and ranks.get(first) is not None else "the trainer"
    return f"{whose}: {', '.join(parts)}"

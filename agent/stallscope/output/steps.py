"""`steps` of the report, and what a person reads of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from stallscope.aggregate.state import State
from stallscope.diagnose.steps import Part, Range, SlowStep, StepsFound
from stallscope.output.rows import Row, since
from stallscope.output.words import clean, count, cut, duration

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["steps_row", "steps_section"]

RANGES, SLOW = 6, 3


def steps_row(state: State, found: StepsFound | None) -> Row | None:
    """The section; None where nothing repeats."""
    if found is None:
        return None
    row = _part(state, found.parts[0])
    row["ranges"] = [_range(state, found, one) for one in found.ranges]
    if found.ranges_left_out:
        row["ranges_left_out"] = found.ranges_left_out
    row["slow"] = [_slow(state, one) for one in found.slow]
    row["processes"] = [_part(state, part) for part in found.parts]
    return row


def _part(state: State, part: Part) -> Row:
    row: Row = {
        "proc": part.proc,
        "count": part.number,
        "p50_ns": part.p50_ns,
        "p99_ns": part.p99_ns,
        "per_second": _rate(part),
        "first_end_ns": since(state, part.first_ns),
        "last_end_ns": since(state, part.last_ns),
        "from_start": part.from_start,
        "mark": part.mark,
        "launches_per_step": part.launches,
    }
    row["launches_before"] = part.before or None
    if part.unclassified:
        row["unclassified"] = part.unclassified
    if part.before:
        row["launches_before_is"] = "estimated"
    if part.number_is:
        row["count_is"] = part.number_is
    for key in ("p50_ns", "p99_ns", "launches_per_step"):
        if row[key] is not None:
            row[f"{key}_is"] = "estimated"
    return row


def _rate(part: Part) -> float | None:
    span = part.last_ns - part.first_ns
    return round((part.number - 1) * 1e9 / span, 3) if span > 0 and part.number > 1 else None


def _range(state: State, found: StepsFound, one: Range) -> Row:
    row: Row = {
        "first": one.first,
        "last": one.last,
        "count": one.number,
        "every": one.every,
        "from_ns": since(state, one.from_ns),
        "to_ns": since(state, one.to_ns),
        "says": one.says,
        "launches_per_step": one.launches,
        "procs": list(one.procs),
    }
    part = next(part for part in found.parts if part.proc == one.procs[0])
    if not part.edges_sure or part.number_is:
        row["first_is"] = row["last_is"] = row["count_is"] = "estimated"
    if one.launches is not None:
        row["launches_per_step_is"] = "estimated"
    return row


def _slow(state: State, one: SlowStep) -> Row:
    return {
        "proc": one.proc,
        "step": one.step,
        "at_ns": since(state, one.at_ns),
        "duration_ns": one.duration_ns,
        "usual_ns": one.usual_ns,
        "says": one.says,
    }


def steps_section(report: Row, page: Console) -> None:
    """How many steps, how long, and which were different."""
    steps = report["steps"]
    if steps is None:
        return
    page.print()
    page.print(Text(_title(steps), style="bold"))
    page.print(Text(f"each has one {cut(steps['mark'], 60)}", style="dim"))
    if steps["launches_before"]:
        before = f"about {count(steps['launches_before'])} kernels were launched"
        page.print(Text(f"- before the first of them {before}: steps that nothing tells apart?"))
    for one in steps["ranges"][:RANGES]:
        page.print(Text(f"- {_which(one)}: {clean(one['says'])}{_whose(report, steps, one['procs'])}"))
    left = len(steps["ranges"]) - RANGES + steps.get("ranges_left_out", 0)
    if left > 0:
        page.print(Text(f"and {count(left)} more ranges: --json shows all", style="dim"))
    for slow in steps["slow"][:SLOW]:
        took = f"{duration(slow['duration_ns'])}, usual {duration(slow['usual_ns'])}"
        who = _whose(report, steps, [slow["proc"]])
        page.print(Text(f"- slow step {count(slow['step'])} ({took}){who}: {clean(slow['says'])}"))


def _title(steps: Row) -> str:
    mark = {"lower_bound": "≥", "estimated": "~"}.get(steps.get("count_is", ""), "")
    rate = f", {steps['per_second']:.3g} a second" if steps["per_second"] else ""
    since_when = "" if steps["from_start"] else " since the capture began"
    times = f": p50 {duration(steps['p50_ns'])}, p99 {duration(steps['p99_ns'])}" if steps["p50_ns"] else ""
    return f"steps: {mark}{count(steps['count'])}{since_when}{rate}{times}"


def _which(one: Row) -> str:
    about = "~" if "first_is" in one else ""
    if one["every"] is not None:
        first = f"{about}{count(one['first'])}"
        return f"{count(one['count'])} steps, about every {count(one['every'])}th from step {first} on"
    if one["first"] == one["last"]:
        return f"step {about}{count(one['first'])}"
    return f"steps {about}{count(one['first'])} to {about}{count(one['last'])}"


def _whose(report: Row, steps: Row, procs: list[int]) -> str:
    """Whose they are, where not everybody's."""
    if len(procs) == len(steps["processes"]):
        return ""
    ranks = {process["proc"]: process["global_rank"] for process in report["processes"]}
    pids = {process["proc"]: process["pid"] for process in report["processes"]}
    names = [f"pid {pids.get(proc, '?')}" if ranks.get(proc) is None else f"rank {ranks[proc]}" for proc in procs]
    return f" ({', '.join(names[:4])}{' and others' if len(names) > 4 else ''})"

"""The first lines for a person: who was traced, for how long, how that ended, what was counted."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from stallscope.output.rows import Row
from stallscope.output.words import at_least, clean, count, cut, duration, least

__all__ = ["counted", "ends", "subject", "traced"]

LINE = 76
NAMED = 4


def subject(report: Row) -> str:
    """Who was traced, on which machine."""
    people = [p for p in report["processes"] if p["traced"]]
    first = f"{clean(people[0]['name'])} (pid {people[0]['pid']})" if people else "no process"
    who = f"{first} and {len(people) - 1} more" if len(people) > 1 else first
    host = f" on {clean(report['capture']['host'])}" if report["capture"]["host"] else ""
    return cut(f"stallscope: {who}{host}", LINE)


def traced(report: Row) -> str:
    """For how long, and how much of it is recorded."""
    capture = report["capture"]
    one_in = capture["sample_one_in"] or 1
    # Where counts are lower bounds, the marks and the remarks say why.
    counting = "" if any(at_least(c, "count") for c in report["calls"]) else ", all counted"
    sampling = "every call recorded" if one_in == 1 else f"1 in {one_in:,.6g} short calls recorded{counting}"
    return f"{least(capture, 'duration_ns', duration)} traced, {sampling}"


def counted(report: Row) -> str:
    """The calls made and what became of them."""
    capture = report["capture"]
    mark = "≥" if any(at_least(c, "count") for c in report["calls"]) else at_least(capture, "duration_ns")
    filtered = sum(capture["filtered"].values())
    history = capture["filtered"].get("before the attach", 0)
    made = sum(c["count"] for c in report["calls"])
    if mark:  # a recording that is cut has records whose counters had not come yet
        made = max(made, capture["events"] + capture["lost"] + capture["sampled_out"] + filtered)
    more = f", {count(filtered - history)} told to an earlier reader" if filtered > history else ""
    more += f", {count(history)} before the attach" if history else ""
    return (
        f"calls made: {mark}{count(made)} ({least(capture, 'events', count)} recorded, "
        f"{least(capture, 'lost', count)} lost, {least(capture, 'sampled_out', count)} not sampled{more})"
    )


def ends(report: Row) -> list[str]:
    """How the targets ended, and every process that ended badly; one line each."""
    targets = set(report["capture"]["targets"])
    ended = [p for p in report["processes"] if p["exit"] and p["traced"]]
    # A target that ended well is told only when there is nothing worse to say.
    told = [p for p in ended if p["exit"]["signal"] or p["exit"]["code"]] or [p for p in ended if p["pid"] in targets]
    lines = [_end(p) for p in told[:NAMED]]
    if len(told) > NAMED:
        lines.append(f"and {count(len(told) - NAMED)} more")
    return lines


def _end(process: Row) -> str:
    end = process["exit"]
    who = f"{cut(process['name'], 16)} (pid {process['pid']})"
    return f"{who} ended {' '.join(_how(end))} at {duration(end['at_ns'])}"


def _how(end: Row) -> Iterator[str]:
    if end["signal"]:
        yield f"by signal {end['signal']}"
        # The number comes from a file and may be none that this machine knows.
        if end["signal"] in set(signal.Signals):
            yield f"({signal.Signals(end['signal']).name})"
    elif end["code"] is not None:
        yield f"with exit code {end['code']}"
    else:
        yield "in an unknown way"

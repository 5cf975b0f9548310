"""What the simulated job wrote of itself beside what the report says: for people only, nothing else reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stallscope.cli.report import replay
from stallscope.diagnose.follow import Follower
from stallscope.diagnose.incident import Incident, Place
from stallscope.output.words import duration

__all__ = ["comparison"]

Json = dict[str, Any]


def comparison(truth_file: str, recording: str, *, faulty: bool) -> str:
    """Two lines: who was at fault, who was named. Raises RecordingProblem."""
    path = Path(truth_file)
    if not path.exists():
        return "the job's own record: none, it ended before it could write one"
    truth: Json = json.loads(path.read_text(encoding="utf-8"))
    follower = replay(recording)
    start_ns = follower.state.capture.start_mono_ns if follower.state.capture else 0
    return f"\nthe job's own record: {_record(truth, start_ns, faulty)}\nstallscope said:      {_said(truth, follower)}"


def _record(truth: Json, start_ns: int, faulty: bool) -> str:
    plan = truth["fault"]
    if not faulty or plan is None:
        slow = [rank["rank"] for rank in truth["ranks"] if rank.get("slow")]
        return f"no fault; the kernels of rank {slow[0]} take longer" if slow else "no fault"
    if not plan["happened"]:
        return f"the fault ({plan['kind']}, step {plan['step']}) did not come: give a longer --duration"
    until = f" until {_at(plan['end_ns'] - start_ns)}" if plan["end_ns"] else ""
    return f"{_ranks(plan['culprits'])} at fault ({plan['kind']}) since {_at(plan['start_ns'] - start_ns)}{until}"


def _at(offset_ns: int) -> str:
    when = duration(abs(offset_ns))
    return f"{when} before the capture began" if offset_ns < 0 else f"{when} after the capture began"


def _ranks(ranks: list[int]) -> str:
    if not ranks:
        return "no rank"
    return f"rank{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks))}"


def _said(truth: Json, follower: Follower) -> str:
    ranks = {rank["pid"]: rank["rank"] for rank in truth["ranks"]}
    watch = follower.watch
    capture = follower.state.capture
    start_ns = max(capture.start_mono_ns if capture else 0, (truth["fault"] or {}).get("start_ns") or 0)
    parts = [_incident(one, start_ns, ranks) for one in watch.incidents] or ["no incident"]
    worst = max(watch.episodes, key=lambda e: e.total_ns, default=None)
    if worst is not None and not watch.incidents:
        who = _ranks([_rank(worst.place, ranks)])
        parts.append(f"{who} made others wait {worst.count} times, {duration(worst.total_ns)} in all")
    return "; ".join(parts)


def _incident(incident: Incident, start_ns: int, ranks: dict[int, int]) -> str:
    """`start_ns`: of the fault, or of the capture if that began later."""
    who = _ranks([_rank(culprit.place, ranks) for culprit in incident.culprits])
    return f"{incident.kind} {who} after {duration(incident.reported_ns - start_ns)}"


def _rank(place: Place, ranks: dict[int, int]) -> int:
    return place.global_rank if place.global_rank is not None else ranks.get(place.pid, -1)

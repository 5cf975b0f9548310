"""Compares a report with what the job itself wrote down."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from culprit_cases import LIMIT_S, LIVE, MID, SHIM, Case
from culprit_run import Run

from stallscope.sim.job.faults import CALL_FAULTS, parse_fault
from stallscope.sim.job.layout import Layout
from stallscope.sim.job.schedule import Call, Transfer, schedule

LEAST_EPISODES = 0.9
START_OFF_S = 1.5  # ranks come to the call at which they wait at their own pace
Json = dict[str, Any]


class Score(NamedTuple):
    """What was said, how long after the start of the block (None: nothing), and what is wrong with it."""

    said: str
    seconds: float | None
    problems: list[str]


def score(case: Case, run: Run) -> Score:
    """All that is wrong, most important first."""
    incidents = run.report["incidents"]
    seconds = _seconds(case, run, incidents[0]) if incidents else None
    said = "; ".join(_said(incident, run.truth) for incident in incidents) or "nothing"
    return Score(said, seconds, list(_problems(case, run, seconds)))


def _pids(truth: Json) -> dict[int, int]:
    """pid -> global rank."""
    return {rank["pid"]: rank["rank"] for rank in truth["ranks"] if rank["pid"]}


def _culprits(incident: Json, truth: Json) -> list[int]:
    pids = _pids(truth)
    return sorted(pids.get(culprit["pid"], -1) for culprit in incident["culprits"])


def _said(incident: Json, truth: Json) -> str:
    ranks = ", ".join(map(str, _culprits(incident, truth))) or "nobody"
    return f"{incident['class']} {ranks}"


def _seconds(case: Case, run: Run, incident: Json) -> float:
    """From the start of the block (attached into one: from the attach) to the report."""
    since_ns = run.truth["fault"]["start_ns"]
    if case.mode == MID:
        since_ns = max(since_ns, run.attached_ns)
    return _instant(run, incident["reported_ns"]) - since_ns / 1e9


def _instant(run: Run, offset_ns: int) -> float:
    """An offset of the report on CLOCK_MONOTONIC, s."""
    start_ns = int(run.report["capture"]["start_unix_ns"]) - run.unix_minus_mono_ns
    return float(start_ns + offset_ns) / 1e9


def _problems(case: Case, run: Run, seconds: float | None) -> Iterator[str]:
    incidents, answer = run.report["incidents"], case.answer
    if not run.truth["fault"]["happened"]:
        yield "the fault did not happen"
        return
    if not answer.kinds and incidents:
        yield f"{len(incidents)} incidents where there is none"
    if "episodes" in answer.also:
        yield from _episodes(run)
    if not answer.kinds:
        return
    if not incidents:
        yield "no incident"
        return
    if len(incidents) > 1:
        yield f"{len(incidents)} incidents instead of one"
    yield from _incident(case, run, incidents[0])
    if answer.operations is not None:
        yield from _soon(case, run)
    elif seconds is None or not 0 < seconds <= LIMIT_S:
        yield f"reported after {seconds:.1f} s"


def _incident(case: Case, run: Run, incident: Json) -> Iterator[str]:
    answer, plan = case.answer, run.truth["fault"]
    if incident["class"] not in answer.kinds:
        yield f"{incident['class']} instead of {' or '.join(answer.kinds)}"
    wanted = plan["culprits"] if answer.named else []
    if _culprits(incident, run.truth) != wanted:
        yield f"culprits {_culprits(incident, run.truth)} instead of {wanted}"
    pids = _pids(run.truth)
    for place in (*incident["culprits"], *incident["victims"]):
        if place["global_rank"] != pids.get(place["pid"]):
            yield f"pid {place['pid']} is global rank {pids.get(place['pid'])}, not {place['global_rank']}"
    if incident["label"] not in (None, "warm_up"):
        yield f"labelled {incident['label']}"
    if answer.evidence and incident["evidence"] not in answer.evidence:
        yield f"evidence {incident['evidence']}"
    if answer.named and not (case.mode == MID and incident["comm"] is None):  # nobody said its name any more
        yield from _communicator(case, run, incident)
    yield from _more(case, run, incident)


def _groups(case: Case, truth: Json) -> list[Json]:
    """Communicators that are right to name."""
    plan = truth["fault"]
    ours = [group for group in truth["communicators"] if plan["rank"] in group["ranks"]]
    if case.kind == "slow":
        return ours
    if case.kind in (*CALL_FAULTS, "in-abort"):  # where it happened, beside those where others wait
        where = parse_fault(plan["text"]).words
        return [*plan["waited_on"], *(group for group in ours if group["kind"] in where.values())]
    waited_on: list[Json] = plan["waited_on"]
    return waited_on


def _communicator(case: Case, run: Run, incident: Json) -> Iterator[str]:
    """The right one, and the culprits' ranks in it."""
    row = next((c for c in run.report["communicators"] if c["id"] == incident["comm"]), None)
    group = next((g for g in _groups(case, run.truth) if row is not None and _is_that(row, g, run)), None)
    if group is None:
        yield f"communicator {incident['comm']} is not one in which others wait for it"
        return
    pids = _pids(run.truth)
    for culprit in incident["culprits"]:
        member = pids.get(culprit["pid"])
        rank = group["ranks"].index(member) if member in group["ranks"] else None
        if culprit["rank"] != rank:
            yield f"rank {culprit['rank']} in its communicator instead of {rank}"


def _is_that(row: Json, group: Json, run: Run) -> bool:
    """By its ranks, and by its unique id where the report knows one."""
    pids = _pids(run.truth)
    members = {pids.get(member["pid"], -1) for member in row["members"]}
    if not members or not members <= set(group["ranks"]) or row["nranks"] not in (None, len(group["ranks"])):
        return False
    if group["unique_id"] is not None:
        return row["unique_id"] in (None, group["unique_id"]) and row["parent"] is None
    parent = next((c for c in run.report["communicators"] if c["id"] == row["parent"]), None)
    known = parent["unique_id"] if parent else None
    return row["unique_id"] is None and known in (None, group["parent_unique_id"])


def _more(case: Case, run: Run, incident: Json) -> Iterator[str]:
    also, culprits, plan = case.answer.also, incident["culprits"], run.truth["fault"]
    off_s = _instant(run, incident["start_ns"]) - plan["start_ns"] / 1e9
    if case.mode != MID and plan["hangs"] and abs(off_s) > START_OFF_S:
        yield f"said to have begun {off_s:+.1f} s after it did"
    if case.kind == "transport-stuck" and incident["seq"] not in (None, plan["operation"]):
        yield f"operation #{incident['seq']} instead of #{plan['operation']}"
    if "host" in also and not all(c["stack"] or c["waiting_in"] for c in culprits):
        yield "nothing of where the culprit's host is"
    if "file" in also:
        waits = [c["waiting_in"] or {} for c in culprits]
        if not any(w.get("syscall") == "read" and (w.get("file") or "").endswith("batches") for w in waits):
            yield f"the file that it reads is not named: {waits}"
    if "abort" in also and "ncclCommAbort" not in incident["summary"]:
        yield f"ncclCommAbort is not named: {incident['summary']}"
    if "resolved" in also:
        yield from _resolved(run, incident)
    elif case.via == SHIM and case.mode == LIVE:  # `run` reports when the job has been ended
        if incident["outcome"] == "resolved" and run.truth["fault"]["hangs"]:
            yield "resolved while it goes on"
    elif run.truth["fault"]["hangs"] and case.kind != "die" and (incident["ended"] or incident["outcome"] != "running"):
        yield f"outcome {incident['outcome']} while it goes on"
    if run.told_ns is None:
        yield "no line while it ran"


def _resolved(run: Run, incident: Json) -> Iterator[str]:
    plan = run.truth["fault"]
    lasted_ns = plan["end_ns"] - plan["start_ns"]
    if incident["outcome"] != "resolved" or not incident["ended"]:
        yield f"outcome {incident['outcome']} although it resolved"
    elif abs(incident["duration_ns"] - lasted_ns) > 0.1 * lasted_ns:
        yield f"lasted {lasted_ns / 1e9:.2f} s, reported as {incident['duration_ns'] / 1e9:.2f} s"


def _soon(case: Case, run: Run) -> Iterator[str]:
    """In operations of the fastest communicator of the rank at fault."""
    rank, steps_then = run.truth["fault"]["rank"], run.steps_then
    shape = run.truth["layout"]
    layout = Layout(shape["tp"], shape["pp"], shape["dp"])
    calls = [item.kind for item in schedule(layout, rank) if isinstance(item, Call | Transfer)]
    a_step = max(calls.count(kind) for kind in calls)
    gone_on = (steps_then - run.truth["fault"]["step"]) * a_step if steps_then is not None else None
    if gone_on is None or gone_on > (case.answer.operations or 0):
        yield f"told after {gone_on} operations"


def episodes_of(run: Run, rank: int) -> list[Json]:
    """Episodes for which a global rank is at fault."""
    pids = _pids(run.truth)
    return [
        row
        for row in run.report["episodes"]
        if _pid(run.report, row["proc"]) in pids and pids[_pid(run.report, row["proc"])] == rank
    ]


def _pid(report: Json, proc: int) -> int:
    return next((p["pid"] for p in report["processes"] if p["proc"] == proc), -1)


def _episodes(run: Run) -> Iterator[str]:
    """Nearly all of its pauses, and more time than anybody else's; busy machines add waits of their own."""
    plan = run.truth["fault"]
    ours = episodes_of(run, plan["rank"])
    number, pauses = sum(row["count"] for row in ours), len(plan["pauses"])
    if number < LEAST_EPISODES * pauses:
        yield f"{number} episodes of rank {plan['rank']} instead of {pauses}"
    if ours and run.report["episodes"][0]["proc"] != ours[0]["proc"]:
        yield f"rank {plan['rank']} is not the one that others waited for longest"

"""`stalls[]` of the report: calls that waited, by Python line and cause."""

from __future__ import annotations

from stallscope.aggregate.state import State
from stallscope.diagnose.accounting import Accounting
from stallscope.diagnose.stalls import Stall, stalls
from stallscope.diagnose.steps import Part, StepsFound
from stallscope.output.rows import Row, bound, since

__all__ = ["stall_rows", "step_share"]


def stall_rows(state: State, accounting: Accounting, steps: StepsFound | None) -> list[Row]:
    """All of them, the largest total first."""
    return [_stall(state, accounting, steps, stall) for stall in stalls(state)]


def _stall(state: State, accounting: Accounting, steps: StepsFound | None, stall: Stall) -> Row:
    timing = stall.timing
    row: Row = {
        "proc": stall.process.proc,
        "pid": stall.process.pid,
        "kind": stall.hook.stall_kind,
        "cause": stall.cause.word,
        "api": stall.hook.name,
        "site": stall.site,
        "site_unknown": stall.why,
        "user_site": stall.user_site,
        "count": timing.calls,
        "total_ns": timing.total_ns,
        "max_ns": timing.max_ns,
        "p50_ns": timing.p50_ns,
        "p50_ns_is": "estimated",
        "p99_ns": timing.p99_ns,
        "p99_ns_is": "estimated",
        "longest": [{"at_ns": since(state, at), "duration_ns": ns, "stack": stack} for ns, at, stack in stall.longest],
    }
    row |= _about(stall) | step_share(steps, stall.process.proc, timing.total_ns)
    if stall.is_rest:
        row["max_ns"] = None
    bound(row, stall.cut or accounting.unsure(stall.process.proc, stall.hook.id), "count", "total_ns", "max_ns")
    return row


def _about(stall: Stall) -> Row:
    """What copy it belongs to, and whether the device ran dry behind it."""
    row: Row = {"copy": None, "dry_count": stall.idle, "dry_ns": None}
    if stall.cause.is_guess:
        row["cause_is"] = "estimated"
    if stall.cause.direction or stall.cause.memory:
        row["copy"] = {"direction": stall.cause.direction, "memory": stall.cause.memory}
    if stall.idle is not None:
        # The launch takes its time to reach the device; other streams may have been at work after the wait for one.
        row |= {"dry_ns": stall.idle_ns, "dry_ns_is": "lower_bound" if stall.is_whole else "estimated"}
        row["dry_count_is"] = "lower_bound"
    return row


def step_share(steps: StepsFound | None, proc: int, total_ns: int) -> Row:
    """How much of an average step it takes; waits before the first step and behind the last one are in it."""
    part = _part_of(steps, proc)
    span = part.last_ns - part.first_ns if part is not None else 0
    if part is None or span <= 0 or part.number < 2:
        return {"step_share": None}
    whole = span / (part.number - 1) * part.number
    return {"step_share": round(total_ns / whole, 4), "step_share_is": "estimated"}


def _part_of(steps: StepsFound | None, proc: int) -> Part | None:
    return next((part for part in steps.parts if part.proc == proc), None) if steps is not None else None

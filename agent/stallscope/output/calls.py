"""`calls[]`: how often each function was called, and how long it took where that is known."""

from __future__ import annotations

from stallscope.aggregate.hooks import HookFacts
from stallscope.aggregate.process import Counts, Process
from stallscope.aggregate.state import State
from stallscope.diagnose.accounting import Accounting
from stallscope.diagnose.timing import all_calls, is_timed, untimed
from stallscope.output.rows import Row, bound

__all__ = ["call_rows"]


def call_rows(state: State, accounting: Accounting) -> list[Row]:
    """One row for each process and function that was called, in the order of the hook table."""
    under_way = state.flight.under_way()
    rows = []
    for process in sorted(state.processes.table.values(), key=lambda p: p.order):
        for number, counts in sorted(process.counts.items()):
            if counts.calls:
                now = sum(under_way[process.proc, number, nested] for nested in (False, True))
                rows.append(
                    _row(state.hooks.get(number), process, counts, now, accounting.unsure(process.proc, number))
                )
    return rows


def _row(hook: HookFacts, process: Process, counts: Counts, under_way: int, unsure: bool) -> Row:
    timing = all_calls(process, hook)
    row: Row = {
        "proc": process.proc,
        "pid": process.pid,
        "api": hook.name,
        "library": hook.library,
        "kind": hook.kind,
        "count": counts.calls,
        "nested": counts.nested,
        "errors": counts.errors if is_timed(process, hook) else None,
        "total_ns": timing.total_ns if timing else None,
        "max_ns": timing.max_ns if timing else None,
        "p50_ns": timing.p50_ns if timing else None,
        "p99_ns": timing.p99_ns if timing else None,
        "source": process.source,
    }
    if timing and timing.p50_ns is not None:
        row["p50_ns_is"] = row["p99_ns_is"] = "estimated"
    bound(row, unsure, "count", "errors")
    cut = timing is not None and (untimed(counts, timing, under_way) or process.untimed)
    bound(row, unsure or cut, "total_ns", "max_ns")
    return row

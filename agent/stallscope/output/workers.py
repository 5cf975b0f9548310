"""`workers[]` and the stalls of kind `data`: what workers did, and how long their trainer waited for data."""

from __future__ import annotations

from stallscope.aggregate.crews import CrewWorker, Starving
from stallscope.aggregate.state import State
from stallscope.diagnose.lineage import TRAINER, WORKER, Lineage
from stallscope.output.rows import Row

__all__ = ["data_stalls", "worker_rows"]


def worker_rows(state: State, lineage: Lineage) -> list[Row]:
    """Of processes that are workers of a trainer; the one that held it up most in front."""
    rows = [row for row in state.crews.workers.values() if _is_one(state, lineage, row)]
    return [_worker(row) for row in sorted(rows, key=lambda row: (-row.charged_ns, row.proc))]


def _is_one(state: State, lineage: Lineage, row: CrewWorker) -> bool:
    table = state.processes.table
    return (
        row.proc in table and row.trainer in table
        and lineage.role(row.proc) == WORKER and lineage.role(row.trainer) == TRAINER
    )  # fmt: skip


def _worker(row: CrewWorker) -> Row:
    found: Row = {"proc": row.proc, "trainer": row.trainer, "looks": row.looks}
    times = {
        "busy_ns": row.busy_ns, "idle_ns": row.idle_ns, "blocked_ns": row.blocked_ns, "starved_ns": row.charged_ns,
    }  # fmt: skip
    for name, ns in times.items():
        found[name], found[f"{name}_is"] = ns, "estimated"
    found["waiting_in"] = {"syscall": row.syscall, "file": row.file} if row.syscall else None
    return found


def data_stalls(state: State, lineage: Lineage) -> list[Row]:
    """One for each trainer that waited for data, as rows of `stalls[]`."""
    rows = [row for row in state.crews.trainers.values() if row.waits and row.proc in state.processes.table]
    return [_stall(state, row) for row in rows if lineage.role(row.proc) == TRAINER]


def _stall(state: State, row: Starving) -> Row:
    return {
        "proc": row.proc,
        "pid": state.processes.table[row.proc].pid,
        "kind": "data",
        "cause": "workers",
        "api": None,
        "site": None,
        "user_site": None,
        "copy": None,
        "dry_count": None,
        "dry_ns": None,
        "step_share": None,
        "count": row.waits,
        "count_is": "lower_bound",  # what begins and ends between two looks is not seen
        "total_ns": row.starved_ns,
        "total_ns_is": "estimated",
        "max_ns": row.longest_ns,
        "max_ns_is": "estimated",
        "p50_ns": None,
        "p99_ns": None,
        "longest": [],
        "looks": row.looks,
        "watched_ns": row.watched_ns,
    }

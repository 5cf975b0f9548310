"""`threads[]`, and the stalls of kind `data` whose cause is a pipeline: what threads do, and who waits for them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rich.console import Console

from stallscope.aggregate.state import State
from stallscope.aggregate.threads import Pipeline, PipelineWait, Thread
from stallscope.diagnose.callsites import not_own
from stallscope.diagnose.steps import StepsFound
from stallscope.output.rows import Row, since
from stallscope.output.stalls import step_share
from stallscope.output.tables import table
from stallscope.output.words import count, cut, share

__all__ = ["pipeline_stalls", "thread_rows", "threads_section"]

DEEDS = ("launches", "waits", "copies_to_device", "copies_to_host", "copies_other", "allocs", "nccl_calls", "other")
SHOWN = 6
# Where Python threads wait for each other; a native pipeline is waited for in a file of its own.
_PYTHON_WAITS = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py", "/concurrent/futures/thread.py")


def thread_rows(state: State) -> list[Row]:
    """Of threads that made calls; those that gave the device most work in front."""
    table = [t for t in state.threads.table.values() if t.proc in state.processes.table]
    return [_thread(state, t) for t in sorted(table, key=lambda t: (t.proc, -sum(t.deeds[:5]), t.tid))]


def _thread(state: State, thread: Thread) -> Row:
    row: Row = {
        "proc": thread.proc,
        "pid": state.processes.table[thread.proc].pid,
        "tid": thread.tid,
        "name": thread.name,
        "python": thread.is_python,
        "seen_from_ns": since(state, thread.since_ns),
        "seen_to_ns": since(state, thread.last_ns),
    }
    counts = dict(zip(DEEDS, thread.deeds, strict=True)) | {"wait_ns": thread.wait_ns}
    for name, number in counts.items():
        row[name], row[f"{name}_is"] = number, "lower_bound"  # its last second may be missing
    return row


def pipeline_stalls(state: State, steps: StepsFound | None) -> list[Row]:
    """One for each process and line in which a main thread waited while native threads fed the device."""
    found = []
    for proc, pipeline in state.threads.pipelines.items():
        if proc not in state.processes.table:
            continue
        groups: dict[str, list[PipelineWait]] = defaultdict(list)
        for wait in pipeline.waits:
            if wait.frames and not (wait.frames[0]["file"] or "").endswith(_PYTHON_WAITS):
                groups[str((wait.frames[0], _own(wait)))].append(wait)
        for waits in groups.values():
            row = _stall(proc, state.processes.table[proc].pid, pipeline, waits)
            found.append(row | step_share(steps, proc, row["total_ns"]))
    return sorted(found, key=lambda row: -row["total_ns"])


def _own(wait: PipelineWait) -> dict[str, Any] | None:
    return next((frame for frame in wait.frames if not not_own(frame["file"])), None)


def _stall(proc: int, pid: int, pipeline: Pipeline, waits: list[PipelineWait]) -> Row:
    innermost = waits[0].frames[0]
    return {
        "proc": proc,
        "pid": pid,
        "kind": "data",
        "cause": "pipeline",
        "cause_is": "estimated",  # nobody sees who wakes it
        "api": None,
        "site": innermost if innermost["file"] else None,
        "site_unknown": None if innermost["file"] else "its code object was gone, or could not be read",
        "user_site": _own(waits[0]),
        "copy": None,
        "dry_count": None,
        "dry_ns": None,
        "count": sum(wait.waits for wait in waits),
        "count_is": "lower_bound",  # what begins and ends between two looks is not seen
        "total_ns": sum(wait.total_ns for wait in waits),
        "total_ns_is": "estimated",
        "max_ns": max(wait.longest_ns for wait in waits),
        "max_ns_is": "estimated",
        "p50_ns": None,
        "p99_ns": None,
        "longest": [],
        "looks": pipeline.looks,
        "watched_ns": pipeline.watched_ns,
    }


def threads_section(report: Row, page: Console) -> None:
    """Native threads that feed the device, of processes whose Python is known."""
    rows = [row for row in report["threads"] if row["python"] is False and _fed(row)]
    if not rows:
        return
    columns = ["pid", "tid", "THREAD", "copies in", "copies out", "launches", "waits"]
    table(page, "threads that are none of Python's and feed the device", columns, rows, SHOWN, lambda row: [
        str(row["pid"]),
        str(row["tid"]),
        cut(row["name"] or "?", 15),
        *[_rate(row, name) for name in ("copies_to_device", "copies_to_host", "launches")],
        _waits(row),
    ])  # fmt: skip


def _fed(row: Row) -> int:
    return int(row["launches"] + row["copies_to_device"])


def _seen_ns(row: Row) -> int:
    return int(row["seen_to_ns"] - row["seen_from_ns"])


def _rate(row: Row, name: str) -> str:
    """A second; the calls as such where it was seen only once."""
    seen = _seen_ns(row)
    return f"~{row[name] * 1e9 / seen:.0f}/s" if seen > 0 and row[name] else count(row[name])


def _waits(row: Row) -> str:
    percent = share(row["wait_ns"], _seen_ns(row))
    return "-" if percent is None or not row["waits"] else f"~{min(percent, 100):.0f} %"

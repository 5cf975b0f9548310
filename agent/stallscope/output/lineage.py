"""What the family tree of the processes adds to a report: role, rank, trace context, and what is known of time-outs."""

from __future__ import annotations

import itertools

from stallscope.aggregate.process import Process
from stallscope.aggregate.state import State
from stallscope.diagnose.lineage import TRAINER, Lineage
from stallscope.output.rows import Row

__all__ = ["context_row", "time_outs"]

# Variables and options that say how long a collective may take, and their unit in seconds.
VARIABLES = {"TORCH_NCCL_TIMEOUT": 1, "TORCH_NCCL_TIMEOUT_SEC": 1, "NCCL_TIMEOUT": 1, "NCCL_TIMEOUT_SEC": 1,
             "DEEPSPEED_TIMEOUT": 60}  # fmt: skip
OPTIONS = {"--distributed-timeout-minutes": 60, "--ddp-timeout": 1, "--ddp_timeout": 1}
MOST_SECONDS = 10**9
NAMED = 3


def context_row(lineage: Lineage, proc: int) -> Row:
    """`trace_context` of one process."""
    told = lineage.context(proc).items()
    return {
        name: {"value": one.value, "from": one.proc, "lost": one.lost, **({} if one.now is None else {"now": one.now})}
        for name, one in told
    }


def time_outs(state: State, lineage: Lineage) -> list[str]:
    """How long an operation of the job may take before the job is ended; one sentence, none where no rank is seen."""
    members = {m.proc for c in state.communicators.table.values() for m in c.members}
    ranks = [p for p in state.processes.table.values() if p.proc in members and lineage.role(p.proc) == TRAINER]
    if not ranks:
        return []
    told = sorted({one for p in ranks if (one := _time_out(lineage, p))})
    if not told:
        return ["time-out of the job: not visible (no variable or option says one)"]
    words = ", ".join(f"{_span(seconds)} ({name})" for seconds, name in told[:NAMED])
    return [f"time-out of the job: {words}"]


def _time_out(lineage: Lineage, process: Process) -> tuple[int, str] | None:
    """(seconds, who says so); an option counts before a variable."""
    for word, after in itertools.pairwise([*process.cmdline, ""]):
        name, equals, value = word.partition("=")
        if name in OPTIONS and (seconds := _seconds(value if equals else after, OPTIONS[name])):
            return seconds, name
    context = lineage.context(process.proc)
    for name, unit in VARIABLES.items():
        told = context.get(name)
        if told is None or (told.lost and told.now is None):
            continue
        if seconds := _seconds(told.now or told.value, unit):
            return seconds, name
    return None


def _seconds(word: str, unit: int) -> int | None:
    if not (word.isascii() and word.isdecimal() and len(word) < 10):
        return None
    return min(int(word) * unit, MOST_SECONDS) or None


def _span(seconds: int) -> str:
    return f"{seconds // 60} min" if seconds % 60 == 0 else f"{seconds} s"

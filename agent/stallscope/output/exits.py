"""How processes ended."""

from __future__ import annotations

from stallscope.aggregate.process import Process, Sender
from stallscope.aggregate.state import State
from stallscope.diagnose.deaths import how_it_ended, sender_of
from stallscope.output.rows import Row, since

__all__ = ["exit_row"]


def exit_row(state: State, process: Process) -> Row | None:
    """None while it lives, as far as is known."""
    ended = process.exit
    if ended is None:
        return None
    row: Row = {
        "code": ended.code,
        "signal": ended.signal,
        "sender": _sender(state, ended.sender) if ended.sender else None,
        "at_ns": since(state, ended.at_ns),
        "exiting_ns": ended.at_ns - ended.exiting_ns if ended.exiting_ns is not None else None,
        "oom": ended.oom,
        "cause": how_it_ended(state, process),
    }
    if ended.oom and not any(kill.proc == process.proc for kill in state.oom_kills.rows):
        row["oom_is"] = "estimated"  # its cgroup counts kills and does not say whose
    return row


def _sender(state: State, sent: Sender) -> Row:
    process = sender_of(state, sent)
    return {
        "proc": process.proc if process else None,
        "pid": sent.pid or None,
        "name": sent.name,
        "signal": sent.signal,
        "at_ns": since(state, sent.at_ns),
    }

"""Who sent a signal, and what a death is called."""

from __future__ import annotations

import signal

from stallscope.aggregate.process import Process, Sender
from stallscope.aggregate.state import State

__all__ = ["cause_of", "how_it_ended", "sender_of", "signal_name"]


def sender_of(state: State, sent: Sender) -> Process | None:
    """The process in the table that had this pid at that time."""
    rows = (p for p in state.processes.table.values() if p.pid == sent.pid and p.start_ns <= sent.at_ns)
    return max(
        (p for p in rows if p.exit is None or p.exit.at_ns >= sent.at_ns), key=lambda p: p.start_ns, default=None
    )


def signal_name(number: int) -> str:
    """E.g. "SIGKILL"; "signal 34" for those without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def cause_of(state: State, process: Process) -> str:
    """E.g. "SIGTERM from python3 (pid 12)", "SIGKILL, the kernel's, for want of memory", "exit code 7"."""
    end = process.exit
    if end is None:
        return "it lives"
    if end.oom:
        return "SIGKILL: the kernel ended it for want of memory"
    if end.signal is None:
        return "exit code not known" if end.code is None else f"exit code {end.code}"
    name = signal_name(end.signal)
    return f"{name}{_from(state, process, end.sender)}" if end.sender else name


def _from(state: State, process: Process, sent: Sender) -> str:
    if sent.pid is None:
        return ", sent by the kernel"
    if sent.pid == process.pid:
        return ", sent by itself"
    known = sender_of(state, sent)
    if not sent.pid:
        return f" from {sent.name or 'a process'} outside this pid namespace"
    return f" from {known.name if known else sent.name} (pid {sent.pid})"


def how_it_ended(state: State, process: Process) -> str:
    """The same, with the time that it took from the first sign of its end on, where that was long."""
    end = process.exit
    cause = cause_of(state, process)
    if end is None or end.exiting_ns is None or end.at_ns - end.exiting_ns < 100_000_000:
        return cause
    return f"{cause}, {(end.at_ns - end.exiting_ns) / 1e9:.1f} s after it began to end"

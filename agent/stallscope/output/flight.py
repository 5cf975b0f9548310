"""`in_flight[]`: who is inside a call now."""

from __future__ import annotations

from stallscope.aggregate.communicators import Communicator, Member
from stallscope.aggregate.events import NESTED, NO_SEQ
from stallscope.aggregate.flight import Call, Inferred, Thread
from stallscope.aggregate.hooks import HookFacts
from stallscope.aggregate.process import Process
from stallscope.aggregate.state import State
from stallscope.output.rows import Row

__all__ = ["flight_rows"]


def flight_rows(state: State) -> list[Row]:
    """The outermost call of each thread, the oldest first."""
    table = state.processes.table
    rows = [_seen(state, table[t.proc], t) for t in state.flight.waiting() if t.proc in table]
    rows += [_inferred(state, table[c.proc], c) for c in state.flight.inferred.values() if c.proc in table]
    return sorted(rows, key=lambda row: (-row["age_ns"], row["proc"], row["tid"]))


def _seen(state: State, process: Process, thread: Thread) -> Row:
    call = thread.calls[0]
    hook = state.hooks.get(call.hook)
    comm, member = _communicator(state, thread, call, hook)
    numbered = hook.seq and not call.flags & (NESTED | NO_SEQ)
    return {
        "proc": process.proc,
        "pid": process.pid,
        "tid": thread.tid,
        "api": hook.name,
        "inferred": False,
        "age_ns": max(0, state.flight.at_ns - call.ts_ns),
        "comm": comm.id if comm else None,
        "comm_uid": comm.uid if comm else None,
        "rank": member.rank if member else None,
        "seq": call.n if numbered else None,
        "stack": _stack(state, thread),
        "inner": [state.hooks.get(inner.hook).name for inner in thread.calls[1:]],
    }


def _stack(state: State, thread: Thread) -> list[Row] | None:
    """Python frames of the wait, innermost first."""
    site = state.sites.table.get(state.flight.sites.get((thread.proc, thread.tid), 0))
    matches = site is not None and (site.proc, site.hook) == (thread.proc, thread.calls[0].hook)
    return (site.frames if site and matches else None) or None


def _communicator(
    state: State, thread: Thread, call: Call, hook: HookFacts
) -> tuple[Communicator | None, Member | None]:
    """The communicator that a call works on or creates, and the caller's part in it, as far as they are known."""
    found = state.communicators.under_way(thread.proc, thread.tid, call.hook, call.ts_ns)
    if found is None and hook.comm >= 0:
        found = state.communicators.find(thread.proc, call.a[hook.comm])
    return found or (None, None)


def _inferred(state: State, process: Process, call: Inferred) -> Row:
    return {
        "proc": process.proc,
        "pid": process.pid,
        "tid": call.tid,
        "api": state.hooks.get(call.hook).name,
        "inferred": True,
        "age_ns": max(0, state.now_ns - call.since_ns),
        "age_ns_is": "lower_bound",
        "comm": None,
        "comm_uid": None,
        "rank": None,
        "seq": None,
        "stack": None,
        "inner": [],
    }

"""The JSON report, schema stallscope.report/1."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from stallscope.aggregate.communicators import Communicator, root_address
from stallscope.aggregate.process import SHIM, Process
from stallscope.aggregate.state import State
from stallscope.diagnose.accounting import Accounting, account
from stallscope.diagnose.hidden import hidden
from stallscope.diagnose.incident import Findings
from stallscope.diagnose.lineage import Lineage
from stallscope.diagnose.stalls import Stall, stalls
from stallscope.diagnose.startup import start_up
from stallscope.output.calls import call_rows
from stallscope.output.exits import exit_row
from stallscope.output.flight import flight_rows
from stallscope.output.gpu import gpu_rows, witness_rows
from stallscope.output.incidents import Names, collective_rows, episode_rows, incident_rows
from stallscope.output.lineage import context_row, time_outs
from stallscope.output.rounds import thread_rows
from stallscope.output.rows import Row, bound, since
from stallscope.output.startup import startup_notes, startup_rows
from stallscope.output.steps import steps_row
from stallscope.output.workers import data_stalls, worker_rows

__all__ = ["SCHEMA", "build_report", "report_json"]

SCHEMA = "stallscope.report/1"
MAX_FILES_TOLD = 32


def report_json(state: State, findings: Findings) -> str:
    """The report as text: the same bytes for the same frames."""
    return json.dumps(build_report(state, findings), indent=1) + "\n"


def build_report(state: State, findings: Findings) -> Row:
    """The report as a dict. Sections that nothing fills yet are there and empty, so that readers find every key."""
    accounting = account(state)
    lineage = Lineage(state)
    # Who is traced comes first: ancestors were told before them.
    table = sorted(state.processes.table.values(), key=lambda p: (not p.traced, p.order))
    processes = _section(state, "processes", lambda: [_process(state, lineage, p) for p in table])
    known = state.communicators.table.values()
    communicators = _section(state, "communicators", lambda: [_communicator(state, c) for c in known])
    names = Names(processes, communicators)
    beginning = _section(state, "startup", lambda: start_up(state, lineage, findings.steps))
    sections: dict[str, Callable[[], Any]] = {
        "processes": lambda: processes,
        "calls": lambda: call_rows(state, accounting),
        "communicators": lambda: communicators,
        "collectives": lambda: collective_rows(findings),
        "in_flight": lambda: flight_rows(state),
        "blocked_threads": lambda: thread_rows(state),
        "stalls": lambda: [_stall(state, accounting, s) for s in stalls(state)] + data_stalls(state, lineage),
        "episodes": lambda: episode_rows(state, findings, names),
        "incidents": lambda: incident_rows(state, findings, names),
        "witnesses": lambda: witness_rows(state, findings),
        "startup": lambda: startup_rows(state, beginning) if beginning else [],
        "steps": lambda: steps_row(state, findings.steps),
        "workers": lambda: worker_rows(state, lineage),
        "gpu": lambda: gpu_rows(state),
    }
    made = {name: _section(state, name, make) for name, make in sections.items()}
    notes = _section(state, "startup", lambda: startup_notes(state, beginning)) if beginning else []
    capture = _capture(state, lineage, accounting)  # its notes tell which of the others failed
    capture["notes"] += notes
    return {"schema": SCHEMA, "capture": capture, **made}


def _section(state: State, name: str, make: Callable[[], Any]) -> Any:
    """A section; an empty one, and a note, where making it fails."""
    with state.faults.held(f"the section {name}, empty for that reason,"):
        return make()
    return None if name == "steps" else []


def _capture(state: State, lineage: Lineage, accounting: Accounting) -> Row:
    capture = state.capture
    start = capture.start_mono_ns if capture else 0
    row: Row = {
        "start_unix_ns": str(capture.start_unix_ns) if capture else None,
        "duration_ns": state.now_ns - start if capture else None,
        "host": capture.host if capture else None,
        "sources": _sources(state),
        "targets": capture.targets if capture else [],
        "sample_one_in": capture.sample_one_in if capture else None,
        "ended": state.reason,
        "events": accounting.events,
        "lost": accounting.lost,
        "lost_by": {name: n for name, n in sorted(state.lost_by.items()) if n},
        "sampled_out": accounting.sampled_out,
        "filtered": _filtered(accounting),
        "gaps": [_gap(state, gap) for gap in sorted(state.gaps, key=lambda g: (g.from_ns, g.to_ns))],
        "notes": _notes(state, accounting) + time_outs(state, lineage),
        "cost": _cost(state),
    }
    ended = state.complete and state.dropped is None
    bound(row, not ended, "duration_ns", "lost", "sampled_out")
    bound(row, accounting.events_bounded, "events")
    return row


def _filtered(accounting: Accounting) -> Row:
    found = {"rule": accounting.filtered - accounting.history, "before the attach": accounting.history}
    return {why: calls for why, calls in found.items() if calls}


def _sources(state: State) -> list[str]:
    """Those that the capture began with, and the shims that it met."""
    known = state.capture.sources if state.capture else []
    met = any(process.source == SHIM for process in state.processes.table.values())
    return [*known, SHIM] if met and SHIM not in known else known


def _gap(state: State, gap: Any) -> Row:
    return {
        "source": gap.source,
        "proc": gap.proc,
        "count": gap.missed,
        "from_ns": since(state, gap.from_ns),
        "to_ns": since(state, gap.to_ns),
        "reason": gap.reason,
    }


def _notes(state: State, accounting: Accounting) -> list[str]:
    told = [f"{_named(state, proc)}{text}" for proc, text in state.notes]
    notes = [
        *state.faults.notes(),
        *told,
        *hidden(state),
        *accounting.notes,
        *state.communicators.notes,
        *state.overflow.notes(),
    ]
    notes += [*state.witnesses.notes, *state.oom_kills.notes(set(state.processes.table))]
    for why, many in sorted(Counter(state.hosts.stackless.values()).items()):
        notes.append(f"no stack of {many} blocked process{'es' * (many > 1)}: {why}")
    if state.unknown_kinds:
        notes.append(f"{state.unknown_kinds} frames of a kind that this version does not know were skipped")
    if state.processes.unknown_frames:
        notes.append(f"{state.processes.unknown_frames} frames about processes that are not in the table were skipped")
    return notes + _probed(state)


def _probed(state: State) -> list[str]:
    """One sentence for each file: what stands in it, and in how many processes."""
    found: dict[tuple[str, str, bool], tuple[int, set[int]]] = {}
    for process in state.processes.table.values():
        for link in process.links:
            hooks = Counter(state.hooks.get(hook).library for hook in link.hooks)
            for library, number in sorted(hooks.items()):
                key = link.path, library, link.by_shim
                most, procs = found.get(key, (0, set()))
                found[key] = (max(most, number), procs | {process.proc})
    return [
        f"{path}: {number} functions of {library} {'behind the shim' if by_shim else 'probed'}"
        + (f" in {len(procs)} processes" if len(procs) > 1 else "")
        for (path, library, by_shim), (number, procs) in list(found.items())[:MAX_FILES_TOLD]
    ]


def _named(state: State, proc: int | None) -> str:
    process = state.processes.table.get(proc) if proc is not None else None
    return f"{process.name} (pid {process.pid}): " if process else ""


def _cost(state: State) -> Row | None:
    if state.cost is None:
        return None
    named = {name: {"cpu_ns": cpu, "rss_bytes": rss} for name, (cpu, rss) in sorted(state.cost.processes.items())}
    return {"cpu_ns": state.cost.cpu_ns, "rss_bytes": state.cost.rss_bytes, "processes": named}


def _process(state: State, lineage: Lineage, process: Process) -> Row:
    row: Row = {
        "proc": process.proc,
        "host": state.capture.host if state.capture else None,
        "pid": process.pid,
        "ns_pid": process.ns_pid,
        "parent": process.parent,
        "name": process.name,
        "cmdline": process.cmdline,
        "container_id": process.container_id,
        "role": lineage.role(process.proc),
        "global_rank": lineage.rank(process.proc),
        "start_ns": since(state, process.start_ns),
        "first_cuda_at_ns": None,
        "exit": exit_row(state, process),
        "trace_context": context_row(lineage, process.proc),
        "traced": process.traced,
        "observed_from_ns": since(state, min((link.at_ns for link in process.links), default=None)),
        "libraries": [{"library": link.library, "path": link.path} for link in process.links],
    }
    if process.first_cuda_ns is not None and _born_here(state, process):
        row["first_cuda_at_ns"] = since(state, process.first_cuda_ns)
        # The first call may have been sampled out or made before the link.
        row["first_cuda_at_ns_is"] = "estimated"
        if _first_is_exact(state, process):
            del row["first_cuda_at_ns_is"]
    return row


def _born_here(state: State, process: Process) -> bool:
    """Whether the process had no CUDA before the capture began: else its first call lies in the unknown past."""
    start = state.capture.start_mono_ns if state.capture else 0
    first = min((link for link in process.links if link.library != "NCCL"), key=lambda link: link.at_ns, default=None)
    return process.start_ns >= start or (first is not None and first.appeared_ns < first.at_ns)


def _first_is_exact(state: State, process: Process) -> bool:
    complete = state.capture is not None and state.capture.sample_one_in == 1
    return complete and not any(gap.proc in (None, process.proc) for gap in state.gaps)


def _communicator(state: State, comm: Communicator) -> Row:
    return {
        "id": comm.id,
        "uid": comm.uid,
        "unique_id": comm.unique_id.hex() if comm.unique_id else None,
        "comm_hash": None if comm.hash is None else f"{comm.hash:016x}",
        "log_comm_id": None if comm.log_comm_id is None else f"{comm.log_comm_id:016x}",
        "root_addr": root_address(comm.unique_id) if comm.unique_id else None,
        "nranks": comm.nranks,
        "parent": comm.parent,
        "identity": "verified" if comm.verified else "unverified",
        "status": comm.status,
        "members": [_member(state, m) for m in sorted(comm.members, key=lambda m: (m.rank is None, m.rank or 0))],
    }


def _member(state: State, member: Any) -> Row:
    process = state.processes.table.get(member.proc)
    numbered = member.next_seq
    if numbered is None and member.pointer:
        numbered = state.events.next_seq.get((member.proc, member.pointer), 0)
    return {
        "proc": member.proc,
        "pid": member.pid,
        "rank": member.rank,
        "global_rank": process.global_rank if process else None,
        "device": member.device,
        "next_seq": numbered,
        "status": member.status,
        "abandoned": member.abandoned,
    }


def _stall(state: State, accounting: Accounting, stall: Stall) -> Row:
    timing = stall.timing
    row: Row = {
        "proc": stall.process.proc,
        "pid": stall.process.pid,
        "kind": stall.hook.stall_kind,
        "cause": stall.cause,
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
    if stall.is_rest:
        row["max_ns"] = None
    bound(row, stall.cut or accounting.unsure(stall.process.proc, stall.hook.id), "count", "total_ns", "max_ns")
    return row

"""`incidents[]`, `episodes[]`, `collectives[]`: what the diagnosis found, as the report tells it."""

from __future__ import annotations

from collections.abc import Iterable

from stallscope.aggregate.state import State
from stallscope.diagnose.incident import Collective, Culprit, Episode, Findings, Incident, Longest, Place
from stallscope.output.rows import Row, bound, since

__all__ = ["Names", "collective_rows", "episode_rows", "incident_rows"]


class Names:
    """Communicators and hosts by key, as other sections of the same report name them."""

    def __init__(self, processes: Iterable[Row], communicators: Iterable[Row]) -> None:
        self._hosts = {row["proc"]: row["host"] for row in processes}
        self._communicators = {row["id"]: row for row in communicators}

    def host(self, proc: int) -> str | None:
        """Of a process."""
        host: str | None = self._hosts.get(proc)
        return host

    def of(self, comm: str | None, key: str) -> str | None:
        """What `communicators[]` says under `key`."""
        row = self._communicators.get(comm) if comm is not None else None
        value: str | None = row[key] if row else None
        return value


def incident_rows(state: State, findings: Findings, names: Names) -> list[Row]:
    """In the order in which they were found."""
    return [_incident(state, incident, names) for incident in findings.incidents]


def _incident(state: State, incident: Incident, names: Names) -> Row:
    end_ns = state.now_ns if incident.end_ns is None else incident.end_ns
    row: Row = {
        "id": incident.id,
        "class": incident.kind,
        "label": incident.label,
        "comm": incident.comm,
        "comm_uid": names.of(incident.comm, "uid"),
        "comm_hash": names.of(incident.comm, "comm_hash"),
        "op": incident.op,
        "seq": incident.seq,
        "culprits": [_culprit(culprit, names) for culprit in incident.culprits],
        "victims": [_place(place, names) for place in incident.victims],
        "cascade": list(incident.cascade),
        "start_ns": since(state, incident.start_ns),
        "reported_ns": since(state, incident.reported_ns),
        "duration_ns": end_ns - incident.start_ns,
        "ended": incident.end_ns is not None,
        "outcome": incident.outcome,
        "evidence": incident.evidence,
        "confidence": incident.confidence,
        "summary": incident.summary,
        "next": incident.next,
        "numbers": dict(sorted(incident.numbers.items())),
    }
    if incident.since_before:
        row["start_ns_is"] = "estimated"
    bound(row, incident.since_before or incident.end_ns is None, "duration_ns")
    return row


def _place(place: Place, names: Names) -> Row:
    return {
        "rank": place.rank,
        "global_rank": place.global_rank,
        "proc": place.proc,
        "pid": place.pid,
        "host": names.host(place.proc),
    }


def _culprit(culprit: Culprit, names: Names) -> Row:
    waiting = culprit.waiting_in
    return {
        **_place(culprit.place, names),
        "stack": culprit.stack,
        "waiting_in": waiting and {key: waiting.get(key) for key in ("syscall", "file", "wchan")},
    }


def episode_rows(state: State, findings: Findings, names: Names) -> list[Row]:
    """The rank that cost most in front."""
    found = sorted(findings.episodes, key=lambda e: (-e.total_ns, e.comm, e.place.proc))
    return [_episode(state, episode, names) for episode in found]


def _episode(state: State, episode: Episode, names: Names) -> Row:
    row: Row = {
        "comm": episode.comm,
        "comm_uid": names.of(episode.comm, "uid"),
        **_place(episode.place, names),
        "count": episode.count,
        "total_ns": episode.total_ns,
        "max_ns": episode.max_ns,
        "p99_ns": episode.p99_ns,
        "p99_ns_is": "estimated",
        "longest": [_longest(state, one) for one in episode.longest],
    }
    if not episode.exact:
        row["total_ns_is"] = row["max_ns_is"] = "estimated"
    return row


def _longest(state: State, one: Longest) -> Row:
    return {
        "at_ns": since(state, one.at_ns),
        "duration_ns": one.duration_ns,
        "op": one.op,
        "seq": one.seq,
        "culprit_stack": one.culprit_stack,
    }


def collective_rows(findings: Findings) -> list[Row]:
    """By communicator, the operation with the most bytes in front."""
    found = sorted(findings.collectives, key=lambda c: (c.comm, -c.bytes, c.op, c.dtype))
    return [_collective(one) for one in found]


def _collective(one: Collective) -> Row:
    row: Row = {
        "comm": one.comm,
        "op": one.op,
        "dtype": one.dtype,
        "calls": one.calls,
        "bytes": one.bytes,
        "calls_per_step": one.calls_per_step,
        "wait_ns": one.wait_ns,
    }
    bound(row, one.bounded, "calls", "bytes", "wait_ns")
    return row

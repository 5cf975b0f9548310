"""Makes incidents of verdicts: names, places, sentences, outcomes."""

from __future__ import annotations

import signal

from stallscope.aggregate.hosts import Host, Task
from stallscope.aggregate.process import Exit, Process
from stallscope.aggregate.state import State
from stallscope.diagnose.completed import Odd
from stallscope.diagnose.incident import Culprit, Incident, Place
from stallscope.diagnose.labels import label_of
from stallscope.diagnose.look import Looker
from stallscope.diagnose.mismatches import minority
from stallscope.diagnose.power import power_sentence
from stallscope.diagnose.stragglers import Straggler
from stallscope.diagnose.verdict import Verdict
from stallscope.diagnose.view import Key
from stallscope.diagnose.words import Facts, next_step, summary

__all__ = ["Writer", "time_of_day"]

NAMES = {"init": "the creation", "split": "ncclCommSplit", "end": "the end"}
MAX_NAMED = 4
NO_BLOCK = ("STRAGGLER", "SILENT_MISMATCH")
STOPPED = ("T", "t")  # states in /proc/PID/stat: by a signal, by a debugger
ABORT = "ncclCommAbort"


class Writer:
    """For one look."""

    def __init__(self, state: State, looker: Looker) -> None:
        self._state, self._looker = state, looker

    def write(self, verdict: Verdict, number: int, now: int) -> Incident:
        """A new incident."""
        verdict = self._where_others_wait(verdict)
        comm = verdict.comm
        incident = Incident(
            id=number,
            kind=verdict.kind,
            label=None,
            comm=self._looker.keys[comm] if comm is not None else None,
            op=self._op(verdict.key),
            seq=self._number(verdict),
            culprits=[Culprit(self._place(rank, comm)) for rank in verdict.culprits],
            victims=[self._place(rank, comm) for rank in verdict.victims],
            cascade=[self._looker.keys[other] for other in verdict.cascade],
            start_ns=verdict.since_ns,
            reported_ns=now,
            end_ns=None,
            outcome="running",
            evidence=verdict.evidence,
            confidence=verdict.confidence,
            summary="",
            next="",
            since_before=verdict.evidence == "host_state",
        )
        self._tell(incident, verdict.why, now)
        return incident

    def _where_others_wait(self, verdict: Verdict) -> Verdict:
        """A rank with a call too many waits for others where it made it; people look for where they wait for it."""
        if len(verdict.culprits) != 1 or verdict.kind not in ("EXTRA", "ORDER_DEADLOCK"):
            return verdict
        found = self._waits_for(self._looker.owners[verdict.culprits[0]][0])
        if not found or verdict.comm in {comm for _, comm, _ in found}:
            return verdict
        _, comm, number = min(found)
        cascade = tuple(c for c in (*verdict.cascade, verdict.comm) if c is not None and c != comm)
        return verdict._replace(comm=comm, key=(comm, "c", number), cascade=cascade)

    def _waits_for(self, proc: int) -> list[tuple[int, int, int]]:
        """(since_ns, communicator of the view, number) of collectives that others issued and this process did not."""
        arrivals, found = self._state.operations.arrivals, []
        for place in self._state.operations.issuers[proc].places.values():
            if place.comm < 0 or not place.numbered or place.key not in self._looker.keys:
                continue
            rows = arrivals.rank_rows(place.comm)
            number = int(arrivals.arrived[rows][place.rank])
            ahead = arrivals.present[rows] & (arrivals.arrived[rows] > number)
            if ahead.any():
                times, _ = arrivals.history(place.comm)
                since = int(times[ahead, number % times.shape[1]].min())
                found.append((since, self._looker.keys.index(place.key), number))
        return found

    def refresh(self, incident: Incident, verdict: Verdict, now: int) -> None:
        """What is known later: more victims, stacks, and a class where there was none."""
        if incident.kind == "NOT_ARRIVED" and verdict.kind == "DIED" and self._ended_by_itself(incident):
            incident.kind, incident.label = verdict.kind, None
        if incident.kind == "CANNOT_DECIDE" and verdict.kind != "CANNOT_DECIDE":
            incident.kind, incident.evidence, incident.confidence = verdict.kind, verdict.evidence, verdict.confidence
        if verdict.kind == incident.kind:
            seen = {place.proc for place in (*incident.victims, *(culprit.place for culprit in incident.culprits))}
            more = [self._place(rank, verdict.comm) for rank in verdict.victims]
            incident.victims += [place for place in more if place.proc not in seen]
            self._tell(incident, verdict.why, now)

    def _ended_by_itself(self, incident: Incident) -> bool:
        """An exception or a fault, whose tidying up took longer than the threshold, and not somebody who ended a rank
        that hung, nor a watchdog."""
        exits = [self._state.processes.table[culprit.place.proc].exit for culprit in incident.culprits]
        return all(end and end.signal in (None, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE) for end in exits)

    def close(self, incident: Incident, now: int) -> None:
        """The block is over."""
        incident.end_ns, incident.outcome = self._end(incident, now)

    def gave_up(self, incident: Incident) -> bool:
        """Whether a rank that waited has ended the wait by force."""
        return self._aborts({victim.proc for victim in incident.victims}, incident.start_ns) is not None

    def _end(self, incident: Incident, now: int) -> tuple[int, str]:
        procs = {culprit.place.proc for culprit in incident.culprits}
        victims = {victim.proc for victim in incident.victims}
        aborted = self._aborts(victims, incident.start_ns)
        if aborted is not None:
            return aborted, "timed_out"
        blocked = victims or procs
        ends = self._ends(blocked, incident.start_ns)
        if blocked and len(ends) == len(blocked):
            gave_up = any(end.signal == signal.SIGABRT for end in ends)  # torch's watchdog, which aborts the process
            how = "timed_out" if gave_up else "died" if incident.kind == "DIED" else "aborted"
            return max(end.at_ns for end in ends), how
        came = [self._first_after(proc, incident.start_ns) for proc in procs]
        known = [ns for ns in came if ns is not None]
        return (max(known) if known and len(known) == len(came) else now), "resolved"

    def _ends(self, procs: set[int], since_ns: int) -> list[Exit]:
        ends = (self._state.processes.table[proc].exit for proc in procs)
        return [end for end in ends if end is not None and end.at_ns > since_ns]

    def is_over(self, incident: Incident) -> bool:
        """Whether nobody is left that waits; in a deadlock all of its ranks do."""
        waits = {place.proc for place in incident.victims} or {culprit.place.proc for culprit in incident.culprits}
        return bool(waits) and len(self._ends(waits, incident.start_ns)) == len(waits)

    def _aborts(self, procs: set[int], since_ns: int) -> int | None:
        """When a victim gave up: torch's watchdog aborts communicators, NCCL returns ncclTimeout."""
        found = []
        for proc in procs:
            issuer = self._state.operations.issuers.get(proc)
            if issuer is None:
                continue
            rows = issuer.log.newest(64)
            names = [self._state.hooks.get(hook).name == ABORT for hook in rows["hook"].tolist()]
            found += [ts for ts, name in zip(rows["ts_ns"].tolist(), names, strict=True) if name and ts > since_ns]
            found += [issuer.timed_out_ns] if (issuer.timed_out_ns or 0) > since_ns else []
        return min((ts for ts in found if ts is not None), default=None)

    def _first_after(self, proc: int, since_ns: int) -> int | None:
        issuer = self._state.operations.issuers.get(proc)
        if issuer is None:
            return None
        stamps = issuer.log.newest(len(issuer.log))["ts_ns"]
        later = stamps[stamps > since_ns + 1_000_000_000]
        return int(later[0]) if len(later) else None

    def silent(self, odd: Odd, number: int, now: int) -> Incident:
        """Ranks called different things, and it completed."""
        operations = self._state.operations
        key = operations.key_of[odd.comm]
        ranks = minority(self._state, odd)
        places = [place for rank in ranks if (place := self._place_in(odd.comm, rank)) is not None]
        names = [operations.meaning.get(value, ("unknown", 0, -1, -1, -1)) for value in odd.signatures]
        incident = Incident(
            number, "SILENT_MISMATCH", None, key, names[0][0], odd.number, [Culprit(p) for p in places], [], [],
            odd.at_ns, now, odd.at_ns, "resolved", "api", "high" if len(odd.signatures) > 2 else "medium", "", "",
        )  # fmt: skip
        kinds = sorted({f"{n} of {elements} elements of type {dtype}" for n, elements, dtype, _, _ in names})
        self._tell(incident, " against ".join(kinds[:3]), now)
        return incident

    def straggler(self, one: Straggler, number: int, now: int) -> Incident:
        """A rank that is slow again and again."""
        place = self._place_in(one.comm, one.rank)
        key = self._state.operations.key_of[one.comm]
        incident = Incident(
            number, "STRAGGLER", None, key, None, None, [Culprit(place)] if place else [], [], [],
            now, now, None, "running", one.evidence, "low" if one.others else "medium", "", "",
            {"last_in_percent": one.percent, "own_ns": one.own_ns, "operations": one.operations},
        )  # fmt: skip
        why = f"last in {one.percent} % of the newest {one.operations} operations, then by {one.own_ns / 1e6:.1f} ms"
        why += " of its own time (median)" + (f"; {one.why}" if one.why else "")
        self._tell(incident, why, now)
        return incident

    def _tell(self, incident: Incident, why: str, now: int) -> None:
        incident.label = incident.label or label_of(self._state, incident, now)
        for culprit in incident.culprits:
            self._locate(culprit, incident.start_ns, now)
        places = [*(culprit.place for culprit in incident.culprits), *incident.victims]
        incident.gpu = power_sentence(self._state, [place.pid for place in places], incident.start_ns, now)
        there = sum(victim.rank is not None for victim in incident.victims) or len(incident.victims)
        facts = Facts(
            incident.kind,
            _who([culprit.place for culprit in incident.culprits]),
            incident.culprits[0].place.pid if incident.culprits else None,
            self._where(incident),
            why,
            self._host_words(incident),
            there,
            len(incident.victims) - there,
            time_of_day(self._state, incident.start_ns) if incident.kind not in NO_BLOCK else None,
            len(incident.culprits) > 1,
            incident.evidence,
            any(culprit.stack or culprit.waiting_in for culprit in incident.culprits),
        )
        incident.summary, incident.next = summary(facts), next_step(facts)

    def _locate(self, culprit: Culprit, start_ns: int, now: int) -> None:
        proc = culprit.place.proc
        looks = self._state.hosts.during(proc, start_ns, now)
        issuer = self._state.operations.issuers.get(proc)
        task = _likeliest(looks[-1], set(issuer.tids) if issuer else set()) if looks else None
        stack = self._state.hosts.stack_during(proc, start_ns, now, task.tid if task else None)
        culprit.stack = stack.frames if stack else culprit.stack
        if looks:
            culprit.waiting_in = _waiting_in(task)

    def _host_words(self, incident: Incident) -> str | None:
        words = incident.culprits[0].waiting_in if incident.culprits else None
        if not words:
            return None
        if words.get("state") in STOPPED:
            return "it is stopped by a signal (SIGSTOP) or a debugger"
        on = f" on {words['file']}" if words["file"] else ""
        if words["syscall"]:
            return f"it is in {words['syscall']}(){on}"
        return f"it is blocked in the kernel in {words['wchan']}" if words["wchan"] else None

    def _where(self, incident: Incident) -> str:
        comm = self._state.communicators.table.get(incident.comm or "")
        number = f" #{incident.seq}" if incident.seq is not None else ""
        if comm is None:
            return (incident.op or "an NCCL operation") + number
        name = comm.uid or comm.id
        size = f" ({comm.nranks} ranks)" if comm.nranks else ""
        return f"{incident.op or 'operations'}{number} on communicator {name}{size}"

    def _op(self, key: Key | None) -> str | None:
        if key is None:
            return None
        for rank in self._looker.view.ranks:
            for operation in reversed(rank.operations):
                if operation.key == key:
                    return operation.name
        return NAMES.get(str(key[1]))

    def _number(self, verdict: Verdict) -> int | None:
        """Where all have come, the one that stands is known only if it is the only one that may not be done."""
        number = _seq(verdict.key)
        if verdict.kind != "ALL_ARRIVED" or verdict.key is None:
            return number
        ranks, prefix = self._looker.view.ranks, verdict.key[:-1]
        undone = {o.key for r in verdict.victims for o in ranks[r].operations if o.key[:-1] == prefix and not o.done}
        return number if undone == {verdict.key} else None

    def _place(self, rank: int, comm: int | None) -> Place:
        process = self._looker.process_of(rank)
        return _place(process, self._looker.rank_of(comm, rank) if comm is not None else None)

    def _place_in(self, comm: int, rank: int) -> Place | None:
        for issuer in self._state.operations.issuers.values():
            if any(p.comm == comm and p.rank == rank for p in issuer.places.values()):
                return _place(issuer.process, rank)
        return None


def _place(process: Process, rank: int | None) -> Place:
    return Place(rank, process.global_rank, process.proc, process.pid)


def time_of_day(state: State, at_ns: int) -> str | None:
    """In UTC, by the clock of the capture's host."""
    if state.capture is None:
        return None
    unix_s = (state.capture.start_unix_ns + at_ns - state.capture.start_mono_ns) // 1_000_000_000
    seconds = unix_s % 86_400
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _seq(key: Key | None) -> int | None:
    return int(key[-1]) if key is not None and key[1] in ("c", "p") else None


def _who(places: list[Place]) -> str:
    names = []
    for place in places[:MAX_NAMED]:
        rank = place.global_rank if place.global_rank is not None else place.rank
        names.append(f"rank {rank} (pid {place.pid})" if rank is not None else f"pid {place.pid}")
    names += [f"{len(places) - MAX_NAMED} more"] if len(places) > MAX_NAMED else []
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _likeliest(host: Host, issuing: set[int]) -> Task | None:
    """The thread that is likeliest to hold the rank up: the main one, unless it only waits for one that calls NCCL."""
    main = next(iter(host.tasks), None)
    if main is None or main.tid in issuing or main.syscall != "futex":
        return main
    return next((task for task in host.tasks if task.tid in issuing), main)


def _waiting_in(task: Task | None) -> dict[str, str | None]:
    if task is None:
        return {"syscall": None, "file": None, "wchan": None, "state": None}
    return {"syscall": task.syscall, "file": task.file, "wchan": task.wchan, "state": task.state}

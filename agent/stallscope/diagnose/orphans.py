"""Trainers that wait for workers that are dead (WORKER_DIED)."""

from __future__ import annotations

from stallscope.aggregate.crews import IDLE, Starving
from stallscope.aggregate.process import Process
from stallscope.aggregate.state import State
from stallscope.diagnose.deaths import cause_of
from stallscope.diagnose.incident import Culprit, Incident, Place
from stallscope.diagnose.lineage import Lineage
from stallscope.diagnose.writer import time_of_day

__all__ = ["KIND", "Orphans"]

KIND = "WORKER_DIED"
WAITED_NS, IDLE_NS = 2_000_000_000, 500_000_000
# A trainer may live on what was fetched before for so long; a wait that begins later has other reasons.
CONCERNS_NS = 60_000_000_000
MAX_OPEN = 64
MAX_NAMED = 4
NEXT = (
    "look for the first error of pid {pid}: its log, dmesg (out of memory), its exit code; {trainer} must be restarted"
)


class Orphans:
    """Call `step` after each tick: incidents that are new. Closes and keeps up those that it opened."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._open: dict[int, tuple[int, Incident]] = {}  # trainer -> (since when it waits, what was told)

    def step(self, now: int, number: int) -> list[Incident]:
        """`number`: of the next incident."""
        self._close(now)
        found: list[Incident] = []
        for row in self._state.crews.trainers.values():
            trainer = self._state.processes.table.get(row.proc)
            if row.wait_ns is None or trainer is None or trainer.exit is not None or row.proc in self._open:
                continue
            dead = self._dead(row, now)
            if dead and self._is_trainer(row.proc) and len(self._open) < MAX_OPEN:
                incident = self._tell(trainer, row, dead, now, number + len(found))
                self._open[row.proc] = row.wait_ns, incident
                found.append(incident)
        return found

    def finish(self, now: int) -> None:
        """The stream is over."""
        self._close(now)

    def _is_trainer(self, proc: int) -> bool:
        return Lineage(self._state).role(proc) == "trainer"

    def _dead(self, row: Starving, now: int) -> list[Process]:
        """Whom it waits for in vain, while nobody who lives has anything left to do; the worst ends alone if any."""
        table = self._state.processes.table
        known = [table[proc] for proc in row.waits_for if proc in table]
        ended = [p for p in known if p.exit is not None and (row.wait_ns or now) - p.exit.at_ns < CONCERNS_NS]
        wrong = [p for p in ended if p.exit and (p.exit.signal or p.exit.code != 0)]
        if not wrong and (row.by_thread or len(ended) < len(known)):
            return []  # one that has done its part, as a pool's workers that are replaced
        dead = wrong or ended
        since = max([row.wait_ns or now, *(p.exit.at_ns for p in dead if p.exit)])
        lives = [p.proc for p in known if p.exit is None]
        if not dead or now - since < WAITED_NS or not all(self._is_idle(proc, now) for proc in lives):
            return []
        return dead

    def _is_idle(self, proc: int, now: int) -> bool:
        row = self._state.crews.workers.get(proc)
        return row is not None and row.state == IDLE and now - row.since_ns >= IDLE_NS

    def _tell(self, trainer: Process, row: Starving, dead: list[Process], now: int, number: int) -> Incident:
        lineage = Lineage(self._state)
        since = max([row.wait_ns or now, *(p.exit.at_ns for p in dead if p.exit)])
        wrong = any(p.exit and (p.exit.signal or p.exit.code) for p in dead)
        return Incident(
            id=number, kind=KIND, label=None, comm=None, op=None, seq=None,
            culprits=[Culprit(_place(lineage, p)) for p in dead], victims=[_place(lineage, trainer)], cascade=[],
            start_ns=since, reported_ns=now, end_ns=None, outcome="running", evidence="host_state",
            confidence="high" if wrong and not row.by_thread else "medium",
            summary=self._summary(trainer, row, dead, lineage, since),
            next=NEXT.format(pid=dead[0].pid, trainer=f"pid {trainer.pid}"),
        )  # fmt: skip

    def _summary(self, trainer: Process, row: Starving, dead: list[Process], lineage: Lineage, since_ns: int) -> str:
        named = ", ".join(f"pid {p.pid} ({cause_of(self._state, p)})" for p in dead[:MAX_NAMED])
        more = f" and {len(dead) - MAX_NAMED} more" if len(dead) > MAX_NAMED else ""
        rank = lineage.rank(trainer.proc)
        who = f"rank {rank} (pid {trainer.pid})" if rank is not None else f"{trainer.name} (pid {trainer.pid})"
        have = "workers have" if len(dead) > 1 else "a worker has"
        place = f" in {row.syscall}()" if row.syscall and not row.by_thread else ""
        them = "them" if len(dead) > 1 else "it"
        since = f"; since {told} UTC" if (told := time_of_day(self._state, since_ns)) else ""
        return f"{have} died: {named}{more}; {who} waits for {them}{place}{since}"

    def _close(self, now: int) -> None:
        for proc, (since, incident) in list(self._open.items()):
            row, end = self._state.crews.trainers.get(proc), self._state.processes.table[proc].exit
            if end is not None:
                incident.end_ns, incident.outcome = end.at_ns, "died"
            elif row is None or row.wait_ns != since:
                incident.end_ns, incident.outcome = now, "resolved"
            else:
                continue
            del self._open[proc]


def _place(lineage: Lineage, process: Process) -> Place:
    return Place(None, lineage.rank(process.proc), process.proc, process.pid)

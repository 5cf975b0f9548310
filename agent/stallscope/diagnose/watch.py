"""The diagnosis over time: when a block is an incident, what it is called, how it ends."""

from __future__ import annotations

from dataclasses import dataclass

from stallscope.aggregate.state import State
from stallscope.diagnose.begun import Begun
from stallscope.diagnose.completed import Completed
from stallscope.diagnose.episodes import Episodes
from stallscope.diagnose.incident import Collective, Episode, Incident
from stallscope.diagnose.judge import judge
from stallscope.diagnose.look import Looker
from stallscope.diagnose.mismatches import Silent
from stallscope.diagnose.orphans import Orphans
from stallscope.diagnose.pairs import settle_pairs
from stallscope.diagnose.steps import Steps, StepsFound
from stallscope.diagnose.stragglers import Straggler, colleagues, stragglers
from stallscope.diagnose.summing import collectives
from stallscope.diagnose.verdict import Verdict
from stallscope.diagnose.writer import Writer

__all__ = ["Watch"]

SUSPECT_NS = 1_000_000_000
LEAST_NS, MOST_NS = 2_000_000_000, 3_500_000_000
TIMES_P99 = 5
CREATION_NS = 2_800_000_000
CONFIRM_NS = 1_000_000_000
SLOW_FOR_NS = 450_000_000
# What costs little may be other work on the machine, and soon over.
MILD_COST, MILD_FOR_NS = 0.2, 5_000_000_000
ONE_AT_A_TIME_NS = 30_000_000_000
LOOK_EVERY_NS = 400_000_000
STRAGGLERS_EVERY_NS = 250_000_000
QUIET_NS = 700_000_000
SETTLED_NS = 600_000_000
MAX_INCIDENTS = 256


@dataclass
class _Suspect:
    """Something that may become an incident."""

    verdict: Verdict
    first_ns: int
    seen_ns: int
    incident: Incident | None = None


Name = tuple[object, ...]


class Watch:
    """Call `step` after each tick, `finish` at the end. Never reads a clock: a replay finds the same."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._begun = False
        self.incidents: list[Incident] = []
        self.dropped = 0

    def _begin(self) -> None:
        # The state's tables are made when the stream's first frame has told the hooks.
        self._begun = True
        self._completed = Completed(self._state)
        self._begun_on_gpus = Begun(self._state, self._completed)
        self._episodes = Episodes(self._state, self._completed)
        self._silent = Silent(self._state, self._completed)
        self._steps = Steps(self._state)
        self._orphans = Orphans(self._state)
        self._suspects: dict[Name, _Suspect] = {}
        self._next_look_ns = self._next_stragglers_ns = 0
        self._straggling: dict[int, int] = {}  # process -> when it was last seen to be one
        self._slow_since: dict[int, int] = {}
        self._counted: list[tuple[int, dict[int, int]]] = []

    @property
    def episodes(self) -> list[Episode]:
        """Waits for late ranks."""
        return self._episodes.rows() if self._begun else []

    @property
    def collectives(self) -> list[Collective]:
        """What the communicators executed."""
        return collectives(self._state, self._completed) if self._begun else []

    @property
    def steps(self) -> StepsFound | None:
        """What the trainers' steps were."""
        return self._steps.found() if self._begun else None

    def step(self) -> list[Incident]:
        """Look at the state after a tick. Returns incidents that are new."""
        if self._state.capture is None or self._state.dropped is not None:
            return []
        if not self._begun:
            self._begin()
        known = len(self.incidents)
        now = self._state.ticked_ns
        self._promise(now)
        settle_pairs(self._state)
        self._completed.step()
        self._begun_on_gpus.step()
        self._episodes.step(now)
        self._silent.step(now)
        self._steps.step(now)
        if now >= self._next_look_ns and (self._suspects or self._stands_still(now)):
            self._next_look_ns = now + LOOK_EVERY_NS
            self._look(now)
        for odd in self._silent.confirmed(now):
            self._open(Writer(self._state, Looker(self._state, now)).silent(odd, len(self.incidents) + 1, now))
        for incident in self._orphans.step(now, len(self.incidents) + 1):
            self._open(incident)
        if now >= self._next_stragglers_ns:
            self._next_stragglers_ns = now + STRAGGLERS_EVERY_NS
            self._stragglers(now)
        return self.incidents[known:]

    def finish(self) -> None:
        """The stream is over: so is what nobody waits in any more."""
        if not self._begun:
            return
        self._episodes.finish()
        self._orphans.finish(self._state.ticked_ns)
        for suspect in self._suspects.values():
            writer = Writer(self._state, Looker(self._state, self._state.ticked_ns))
            if suspect.incident is not None and suspect.incident.end_ns is None and writer.is_over(suspect.incident):
                writer.close(suspect.incident, self._state.ticked_ns)

    def _promise(self, now: int) -> None:
        """NCCL entries that the counters in the kernel had seen some ticks ago must have come as records by now."""
        operations = self._state.operations
        counted = {}
        for proc, issuer in operations.issuers.items():
            counts = issuer.process.counts
            counted[proc] = sum(row.calls - row.filtered for hook, row in counts.items() if operations.is_told[hook])
        self._counted.append((now, counted))
        while len(self._counted) > 1 and self._counted[1][0] <= now - SETTLED_NS:
            del self._counted[0]
        if self._counted[0][0] <= now - SETTLED_NS:
            for proc, entries in self._counted[0][1].items():
                operations.issuers[proc].promised = entries

    def _stands_still(self, now: int) -> bool:
        flight = self._state.flight
        oldest = min((t.calls[0].ts_ns for t in flight.waiting()), default=now)
        oldest = min([oldest, *(call.since_ns for call in flight.inferred.values())])
        if now - oldest >= SUSPECT_NS or self._state.hosts.suspect_ns is not None:
            return True
        return bool(self._state.operations.arrivals.lagging(now, SUSPECT_NS))

    def _look(self, now: int) -> None:
        looker = Looker(self._state, now)
        for verdict in _creations_as_one(judge(looker.view)):
            self._consider(looker, verdict, now)
        writer = Writer(self._state, looker)
        for name, suspect in list(self._suspects.items()):
            incident = suspect.incident
            is_over = now - suspect.seen_ns > QUIET_NS
            if is_over:
                del self._suspects[name]
            if incident is None or incident.end_ns is not None:
                continue
            if is_over or writer.gave_up(incident):
                writer.close(incident, now)
            elif suspect.seen_ns == now:  # an older verdict counts ranks as they were
                writer.refresh(incident, suspect.verdict, now)

    def _consider(self, looker: Looker, verdict: Verdict, now: int) -> None:
        name = self._name(looker, verdict)
        suspect = self._suspects.get(name)
        if self._have_ended(looker, verdict) or self._is_consequence(looker, verdict):
            return
        if now - verdict.since_ns < self._threshold_ns(looker, verdict):
            return
        if suspect is None:
            suspect = self._suspects.setdefault(name, _Suspect(verdict, now, now))
        if suspect.verdict.kind != verdict.kind and suspect.incident is None:
            suspect.first_ns = now
        suspect.verdict, suspect.seen_ns = verdict, now
        if suspect.incident is None and now - suspect.first_ns >= CONFIRM_NS:
            suspect.incident = Writer(self._state, looker).write(verdict, len(self.incidents) + 1, now)
            self._open(suspect.incident)

    def _have_ended(self, looker: Looker, verdict: Verdict) -> bool:
        """Whether nobody is left whom the block could concern, as after the end of a job."""
        ranks = (*verdict.culprits, *verdict.victims)
        return bool(ranks) and all(looker.process_of(rank).exit is not None for rank in ranks)

    def _is_consequence(self, looker: Looker, verdict: Verdict) -> bool:
        """Whether those at fault are some who waited in a block that was told, and gave up or ended over it."""
        procs = {looker.owners[rank][0] for rank in verdict.culprits}
        for incident in self.incidents:
            waited = {place.proc for place in incident.victims}
            gave_up = incident.outcome == "timed_out" or (incident.outcome == "running" and verdict.kind == "DIED")
            if procs and procs <= waited and gave_up:
                return True
        return False

    def _name(self, looker: Looker, verdict: Verdict) -> Name:
        """The same block has the same name at the next look: by who is at fault, else all undecided are one."""
        if _is_creation(verdict):
            return ("creation", looker.keys[int(verdict.comm or 0)])
        return tuple(looker.owners[rank] for rank in verdict.culprits) or ("nobody",)

    def _threshold_ns(self, looker: Looker, verdict: Verdict) -> int:
        if _is_creation(verdict) or (verdict.key is not None and verdict.key[1] == "split"):
            return CREATION_NS  # ranks of a job start at different times
        p99 = None
        if verdict.comm is not None:
            index = self._state.operations.index_of.get(looker.keys[verdict.comm])
            if index is not None:
                p99 = self._completed.slowest_p99_ns(index)
        return min(max(LEAST_NS, TIMES_P99 * (p99 or 0)), MOST_NS)

    def _as_before(self, incident: Incident) -> str | None:
        """The label of an earlier wait for the same rank in the same communicator: it writes checkpoints there."""
        procs = [culprit.place.proc for culprit in incident.culprits]
        return next(
            (i.label for i in self.incidents if i.label == "checkpoint" and i.kind == incident.kind
             and i.comm == incident.comm and procs == [culprit.place.proc for culprit in i.culprits]),
            None,
        )  # fmt: skip

    def _open(self, incident: Incident) -> None:
        incident.label = incident.label or self._as_before(incident)
        if len(self.incidents) >= MAX_INCIDENTS:
            self.dropped += 1
            return
        self.incidents.append(incident)

    def _is_behind_another(self, one: Straggler, now: int) -> bool:
        """Where only hosts tell: whether it works with one that was told."""
        recent = {other for other, seen_ns in self._straggling.items() if now - seen_ns < ONE_AT_A_TIME_NS}
        return one.evidence == "api" and bool(recent) and not recent.isdisjoint(colleagues(self._state, one.proc))

    def _since(self, one: Straggler, now: int) -> int:
        """Since when it is slow. While power has not told which of those that wait for each other it is, the guess goes
        from one to another: once it has, the time of the guesses counts."""
        if one.proc in self._slow_since or one.others or not self._slow_since:
            return self._slow_since.get(one.proc, now)
        near = colleagues(self._state, one.proc)
        return min([since for proc, since in self._slow_since.items() if proc in near], default=now)

    def _stragglers(self, now: int) -> None:
        """Those that stay ones for a while. Who works with one that was told is late because of it, as a rule."""
        found = {one.proc: one for one in stragglers(self._state, self._completed, self._begun_on_gpus)}
        self._slow_since = {proc: self._since(one, now) for proc, one in found.items()}
        for proc, since_ns in self._slow_since.items():
            least_ns = SLOW_FOR_NS if found[proc].cost >= MILD_COST else MILD_FOR_NS
            if proc in self._straggling:
                self._straggling[proc] = now
            elif now - since_ns >= least_ns and not self._is_behind_another(found[proc], now):
                self._straggling[proc] = now
                looker = Looker(self._state, now)
                self._open(Writer(self._state, looker).straggler(found[proc], len(self.incidents) + 1, now))


def _is_creation(verdict: Verdict) -> bool:
    return verdict.kind == "NOT_ARRIVED" and verdict.key is not None and verdict.key[1] == "init"


def _creations_as_one(verdicts: list[Verdict]) -> list[Verdict]:
    """Ranks start one by one: who is missing at a creation is one thing to tell, and fewer of them no new one."""
    found: list[Verdict] = []
    places: dict[int | None, int] = {}
    for verdict in verdicts:
        if not _is_creation(verdict) or verdict.comm not in places:
            if _is_creation(verdict):
                places[verdict.comm] = len(found)
            found.append(verdict)
            continue
        first = found[places[verdict.comm]]
        found[places[verdict.comm]] = first._replace(
            culprits=tuple(sorted({*first.culprits, *verdict.culprits})),
            victims=tuple(sorted({*first.victims, *verdict.victims})),
            cascade=tuple(sorted({*first.cascade, *verdict.cascade})),
            since_ns=min(first.since_ns, verdict.since_ns),
        )
    return found

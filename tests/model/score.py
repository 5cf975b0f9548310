"""Trials: a layout, a fault and a seed; what the diagnosis says of the end of the run, and whether it is right.

A seed draws the rank, the place, the evidence (see views.py), whether hosts run ahead, and what the windows keep.

What counts as right:

- a rank at fault: the culprits of all verdicts together are that rank, each verdict names it, and has the fault's class;
- transport: nobody is named, all verdicts are ALL_ARRIVED; with GPU evidence it is one, for the operation in question;
- GPU_STUCK without GPU evidence can't be told from the transport: nobody named, all ALL_ARRIVED. (The host of the
  stuck rank issued everything; so did all others.)
- a kernel stuck after the last operation can be told without GPU evidence, if all that its rank issued since its last
  returned wait is known to be done by another rank of each operation: else both answers count.
- swapped calls that block only because one stream waits for the other (calls don't show that): every operation has been
  issued by all its ranks, each stream by itself would end. Without GPU evidence both answers count: the rank, or nobody;
- a send moved before a receive: ORDER_DEADLOCK; while the rank has not got to where the send belongs, it is EXTRA too;
- a skipped last call of a rank, which then leaves: SKIPPED or LEFT.

What nobody can tell, computed from the run, never from the verdict (see `decidable`):

- a fault in the order of calls (skip, extra, swap, send before receive) is seen only against the rank's earlier steps:
  three complete ones must lie in its window, and what the rank issued must not be a beginning of what it always does.
- a mismatch needs those steps too, unless a strict majority of at least three arrived ranks agree against the rank.

There nobody but the rank may be named as the culprit alone: both ranks of a tie, or nobody.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Protocol

from stallscope.diagnose.view import FINISHED, Key, View

from .faults import EARLY_STEPS, FAULTS, HISTORY, MISMATCHES, Injected
from .program import Job, Launch, Layout, gpipe
from .simulator import Run, simulate, up_to
from .views import EVIDENCE, GPU, cut, view_of

__all__ = ["Judge", "Named", "Score", "Trial", "decidable", "healthy", "judged", "make_trial", "score"]

STEPS = 6
HISTORY_STEPS = 3
TRIES = 4
AHEAD_NS, IN_STEP_NS = 5_000, 900_000


class Named(Protocol):
    """What of a verdict counts here."""

    @property
    def kind(self) -> str: ...
    @property
    def culprits(self) -> tuple[int, ...]: ...
    @property
    def key(self) -> Key | None: ...


Judge = Callable[[View], Iterable[Named]]


@dataclass
class Trial:
    """One run with a fault, and what a capture would know of it."""

    fault: str
    evidence: str
    healthy: Job
    injected: Injected
    run: Run
    keep: list[int] | None
    view: View

    def first(self) -> int:
        """Index of the first operation in the window of the rank at fault."""
        rank = self.injected.rank or 0
        return cut(self.run.hosts[rank], self.keep[rank]) if self.keep else 0


@dataclass
class Score:
    """Counts of runs.

    Attributes:
        runs: those with a verdict to give: somebody waits for ever, and it can be told why.
        exact: of these, the right rank was named and nobody else; classed: and with the right class.
        no_hang: runs in which nobody waits; undecidable: where it can't be told; accused: of these, where another rank
            was named.
        misses: (seed, what was said) of runs that are not exact and classed.
    """

    runs: int = 0
    exact: int = 0
    classed: int = 0
    no_hang: int = 0
    undecidable: int = 0
    accused: int = 0
    misses: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Score) -> None:
        """Take over another one's counts."""
        for name in ("runs", "exact", "classed", "no_hang", "undecidable", "accused"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.misses += other.misses


@cache
def healthy(layout: Layout) -> Job:
    """The job without a fault. Not to be changed."""
    return gpipe(layout, STEPS)


@cache
def _early(layout: Layout, pace_ns: int) -> Run:
    job = healthy(layout)
    return up_to(job, [steps[EARLY_STEPS] for steps in job.steps], pace_ns)


def _run(layout: Layout, fault: str, injected: Injected, pace_ns: int) -> Run:
    """The early steps, which are the same for most faults, are run once."""
    start = None if fault in ("die", "missing_init", "missing_split") else _early(layout, pace_ns)
    return simulate(injected.job, injected.disturbance, pace_ns, start)


def _windows(job: Job, rng: random.Random) -> list[int] | None:
    """Everything, or for each rank about its last five steps."""
    if rng.random() < 0.5:
        return None
    return [int((steps[1] - steps[0]) * rng.uniform(4.6, 5.4)) for steps in job.steps]


def make_trial(layout: Layout, fault: str, seed: int) -> Trial | None:
    """One trial; None if the layout has no place for the fault. A fault that stops nobody is tried at other places; the
    trial that comes back may still be one."""
    rng = random.Random(f"{layout.name} {fault} {seed}")
    job, evidence = healthy(layout), EVIDENCE[seed % 3]
    pace_ns, keep = rng.choice((AHEAD_NS, IN_STEP_NS)), _windows(job, rng)
    for _ in range(TRIES):
        injected = FAULTS[fault](job, rng)
        if injected is None:
            continue
        run = _run(layout, fault, injected, pace_ns)
        if run.hangs:
            break
    else:
        if injected is None:
            return None
    return Trial(fault, evidence, job, injected, run, keep, view_of(run, evidence, keep))


def _enough_history(trial: Trial, rank: int) -> bool:
    """Whether the window of the rank holds enough complete steps before the one with the fault."""
    host, steps, first = trial.run.hosts[rank], trial.healthy.steps[rank], trial.first()
    begin = host.ops[first].pc if first else 0
    whole = [s for s in range(len(steps) - 1) if steps[s] >= begin and steps[s + 1] <= trial.injected.pc]
    return len(whole) >= HISTORY_STEPS


def _deviates(trial: Trial, rank: int) -> bool:
    """Whether the rank issued anything else than a beginning of its healthy program."""
    issued = [(op.call.comm, op.call.signature, op.call.name, op.call.peer) for op in trial.run.hosts[rank].ops
              if op.key[1] in ("c", "p")]  # fmt: skip
    calls = [c for i in trial.healthy.programs[rank] if isinstance(i, Launch) for c in i.calls]
    usual = [(c.comm, c.signature, c.name, c.peer) for c in calls]
    finished = trial.run.hosts[rank].state == FINISHED and len(issued) != len(usual)
    return finished or issued != usual[: len(issued)]


def _outvoted(trial: Trial, rank: int) -> bool:
    """Whether at a blocked operation of the rank a strict majority of at least three agree against it."""
    for op in trial.run.hosts[rank].ops:
        if op.done or op.key[1] != "c":
            continue
        arrived = [o.call.signature for h in trial.run.hosts for o in h.ops if o.key == op.key]
        signature, count = Counter(arrived).most_common(1)[0]
        if len(arrived) >= 3 and count * 2 > len(arrived) and signature != op.call.signature:
            return True
    return False


def decidable(trial: Trial) -> bool:
    """Whether the view holds what it takes to name the rank."""
    rank = trial.injected.rank
    if rank is None or trial.fault not in HISTORY | MISMATCHES:
        return True
    history = _enough_history(trial, rank) and _deviates(trial, rank)
    return history or (trial.fault in MISMATCHES and _outvoted(trial, rank))


def _known_elsewhere(trial: Trial, rank: int) -> bool:
    """Whether all that the rank issued and doesn't know to be done is known to be done by another of its ranks."""
    known = {op.key for other in trial.view.ranks for op in other.operations if op.done or op.ended}
    return all(op.done or op.ended or op.key in known for op in trial.view.ranks[rank].operations)


def _streams_alone_would_end(trial: Trial) -> bool:
    """Whether the same calls block nobody when no stream waits for another one."""
    programs = [[i._replace(after=None) if isinstance(i, Launch) else i for i in program]
                for program in trial.injected.job.programs]  # fmt: skip
    return not simulate(replace(trial.injected.job, programs=programs), trial.injected.disturbance).hangs


def _answers(trial: Trial) -> list[tuple[frozenset[int], frozenset[str]]]:
    """The (culprits, kinds) that are right."""
    rank, kinds = trial.injected.rank, trial.injected.kinds
    nobody = (frozenset[int](), frozenset({"ALL_ARRIVED"}))
    if rank is None:
        return [nobody]
    if trial.run.hosts[rank].state == FINISHED:
        kinds |= {"LEFT"}
    moved_from = trial.injected.moved_from
    if moved_from is not None and trial.run.hosts[rank].pc <= moved_from:
        kinds |= {"EXTRA"}
    named = (frozenset({rank}), kinds)
    if trial.evidence != GPU and trial.fault == "gpu_stuck":
        return [nobody]
    if trial.evidence != GPU and trial.fault == "swap" and _streams_alone_would_end(trial):
        return [named, nobody]
    if trial.evidence != GPU and trial.fault == "kernel_stuck" and not _known_elsewhere(trial, rank):
        return [named, nobody]
    return [named]


def judged(trial: Trial, verdicts: list[Named]) -> tuple[bool, bool]:
    """(the right rank and nobody else, and the right class) of verdicts on a decidable trial."""
    culprits = frozenset(rank for verdict in verdicts for rank in verdict.culprits)
    exact = classed = False
    for right, kinds in _answers(trial):
        fits = bool(verdicts) and culprits == right and all(bool(v.culprits) == bool(right) for v in verdicts)
        exact |= fits
        classed |= fits and {v.kind for v in verdicts} <= kinds
    if trial.injected.key is not None and trial.evidence == GPU:
        classed &= [v.key for v in verdicts] == [trial.injected.key]
    return exact, classed


def says(verdicts: list[Named]) -> str:
    """For people."""
    return "; ".join(f"{v.kind}{list(v.culprits)} at {v.key}" for v in verdicts) or "nothing"


def score(judge: Judge, layout: Layout, fault: str, seeds: Iterable[int], evidence: str | None = None) -> Score:
    """Run trials, those with other `evidence` left out."""
    total = Score()
    for seed in seeds:
        if evidence not in (None, EVIDENCE[seed % 3]):
            continue
        trial = make_trial(layout, fault, seed)
        if trial is None:
            continue
        if not trial.run.hangs:
            total.no_hang += 1
            continue
        verdicts = list(judge(trial.view))
        if not decidable(trial):
            culprits = {rank for verdict in verdicts for rank in verdict.culprits}
            total.undecidable += 1
            total.accused += bool(culprits) and trial.injected.rank not in culprits
            continue
        exact, classed = judged(trial, verdicts)
        total.runs += 1
        total.exact += exact
        total.classed += classed
        if not classed:
            wanted = f"{trial.evidence}: wanted {trial.injected.rank}"
            total.misses.append((seed, f"{wanted}, got {says(verdicts)}"))
    return total

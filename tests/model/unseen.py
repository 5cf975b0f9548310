"""Faults and layouts that the diagnosis was not written against: `python -m tests.model.unseen [SEEDS]` prints the score.

Written without sight of the diagnosis. Nothing here asserts a score; misses are printed with the rest. An answer is

- a hit: the right rank or ranks and nobody else, and the right class;
- rank only: the right ranks, another class;
- part: not all of the right ranks, and nobody else;
- too many: the right ranks and others, such as both ranks of a tie;
- no answer: nobody is named, where somebody could have been;
- wrong: only others are named, or some of the right ones and others.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from stallscope.diagnose.view import FINISHED, IN_SYNC, USER, Key, Operation, Rank, View

from .faults import FAULTS, altered
from .other_jobs import exchange_ring, experts, hybrid_sharded, one_forward_one_backward, training, with_evaluation
from .program import Create, Job, Launch
from .score import AHEAD_NS, IN_STEP_NS, Judge, says
from .simulator import Disturbance, simulate
from .views import CALLS, GPU, view_of

__all__ = ["CASES", "Question", "ask"]

OUTCOMES = ("hit", "rank only", "part", "too many", "no answer", "wrong")
Answer = tuple[frozenset[int], frozenset[str]]
ANY = frozenset({"ALL_ARRIVED", "CANNOT_DECIDE", "ORDER_DEADLOCK", "MISMATCH", "SKIPPED", "NOT_ARRIVED"})


@dataclass
class Question:
    """What a capture would know, and the (culprits, kinds) that are right."""

    view: View
    answers: list[Answer]


Case = Callable[[random.Random], "Question | None"]
CASES: dict[str, Case] = {}


def case(what: str) -> Callable[[Case], Case]:
    """Registers one under its name for people."""

    def add(function: Case) -> Case:
        CASES[what] = function
        return function

    return add


@cache
def _job(make: Callable[[], Job]) -> Job:
    return make()


def _pace(rng: random.Random) -> int:
    return rng.choice((AHEAD_NS, IN_STEP_NS))


def _one(rank: int, *kinds: str) -> list[Answer]:
    return [(frozenset({rank}), frozenset(kinds))]


def _known_fault(make: Callable[[], Job], fault: str, evidence: str = CALLS) -> Case:
    """A fault of the model's own list in another job. A rank that leaves after it skipped its last call has LEFT too."""

    def question(rng: random.Random) -> Question | None:
        job = _job(make)
        for _ in range(6):
            injected = FAULTS[fault](job, rng)
            if injected is None or injected.rank is None:
                continue
            run = simulate(injected.job, injected.disturbance, _pace(rng))
            if run.hangs:
                left = ("LEFT",) if run.hosts[injected.rank].state == FINISHED else ()
                return Question(view_of(run, evidence), _one(injected.rank, *injected.kinds, *left))
        return None

    return question


def _groups(job: Job, rank: int) -> list[tuple[int, Launch]]:
    """The groups of several calls that a rank launches late."""
    program = job.programs[rank]
    late = range(job.steps[rank][4], job.steps[rank][-1])
    return [(pc, what) for pc in late if isinstance(what := program[pc], Launch) and len(what.calls) > 1]


@case("two ranks stop at once")
def two_stop(rng: random.Random) -> Question | None:
    """Right: those of them that a rank waits for that is not itself behind the other one; or both."""
    job = _job(training)
    a, b = rng.sample(range(len(job.programs)), 2)
    step = rng.randrange(4, 6)
    stops = {r: (rng.randrange(job.steps[r][step], job.steps[r][step + 1]), USER) for r in (a, b)}
    run = simulate(job, Disturbance(stops=stops), _pace(rng))
    begun = {op.key: op.call.comm for h in run.hosts for op in h.ops if op.started and not op.done}
    issued = {(h.rank, op.key) for h in run.hosts for op in h.ops}
    waited = frozenset(r for r in (a, b) if any((r, key) not in issued and r in _members(job, key) for key in begun))
    kinds = frozenset({"NOT_ARRIVED"})
    return Question(view_of(run, CALLS), [(waited, kinds), (frozenset({a, b}), kinds)]) if waited else None


def _members(job: Job, key: Key) -> list[int]:
    members = job.members[int(key[0])]
    return members if key[1] == "c" else [members[int(key[2])], members[int(key[3])]]


@case("a rank stops, another one calls with a wrong count elsewhere")
def stop_and_mismatch(rng: random.Random) -> Question | None:
    """Only where both block by themselves: ranks of different replicas, in the same step."""
    job = _job(training)
    injected = FAULTS["wrong_count"](job, rng)
    if injected is None or injected.rank is None:
        return None
    other = rng.choice([r for r in range(len(job.programs)) if r // 8 != injected.rank // 8])
    step = 4 if injected.pc < job.steps[injected.rank][5] else 5
    stops = {other: (job.steps[other][step] + 1, USER)}
    run = simulate(injected.job, Disturbance(stops=stops), _pace(rng))
    by_signature: dict[Key, set[object]] = {}
    for op in (op for h in run.hosts for op in h.ops if not op.done and op.started):
        by_signature.setdefault(op.key, set()).add(op.call.signature)
    if all(len(found) < 2 for found in by_signature.values()):
        return None
    right = (frozenset({injected.rank, other}), frozenset({"NOT_ARRIVED", "MISMATCH"}))
    return Question(view_of(run, GPU), [right])


@case("expert parallel: a rank stops before an exchange")
def experts_stop(rng: random.Random) -> Question | None:
    """Between the calls of a group nothing is issued yet: the same as before the group."""
    job = _job(experts)
    rank = rng.randrange(len(job.programs))
    pc, _ = rng.choice(_groups(job, rank))
    run = simulate(job, Disturbance(stops={rank: (pc, USER)}), _pace(rng))
    return Question(view_of(run, CALLS), _one(rank, "NOT_ARRIVED"))


@case("expert parallel: one send is missing in an exchange")
def experts_skip(rng: random.Random) -> Question | None:
    """A rank leaves one peer out."""
    job = _job(experts)
    rank = rng.randrange(len(job.programs))
    pc, what = rng.choice(_groups(job, rank))
    out = rng.choice([i for i, one in enumerate(what.calls) if one.name == "ncclSend"])
    fewer = what._replace(calls=what.calls[:out] + what.calls[out + 1 :])
    run = simulate(altered(job, rank, pc, 1, [fewer]), None, _pace(rng))
    return Question(view_of(run, CALLS), _one(rank, "SKIPPED")) if run.hangs else None


@case("expert parallel: one count differs in an exchange")
def experts_count(rng: random.Random) -> Question | None:
    """A rank sends more than its peer expects."""
    job = _job(experts)
    rank = rng.randrange(len(job.programs))
    pc, what = rng.choice(_groups(job, rank))
    at = rng.randrange(len(what.calls))
    wrong = what.calls[at]._replace(signature=what.calls[at].signature._replace(elements=260))
    changed = what._replace(calls=(*what.calls[:at], wrong, *what.calls[at + 1 :]))
    run = simulate(altered(job, rank, pc, 1, [changed]), None, _pace(rng))
    return Question(view_of(run, CALLS), _one(rank, "MISMATCH")) if run.hangs else None


@case("a rank without NCCL runs beside a rank that stops")
def bystander(rng: random.Random) -> Question | None:
    """A loader is always outside every call; nobody waits for it."""
    question = _known_fault(training, "host_hang")(rng)
    if question is not None:
        since_ns = rng.randrange(question.view.now_ns)
        question.view.ranks.append(Rank(9000, None, USER, since_ns))
    return question


@case("a skipped call in the first step")
def warm_up(rng: random.Random) -> Question | None:
    """No history. In a communicator of three or more the others still agree against the rank."""
    job = _job(hybrid_sharded)
    rank = rng.randrange(len(job.programs))
    late = range(job.steps[rank][0], job.steps[rank][1])
    pc = rng.choice([pc for pc in late if isinstance(job.programs[rank][pc], Launch)])
    run = simulate(altered(job, rank, pc, 1, []), None, _pace(rng))
    return Question(view_of(run, CALLS), _one(rank, "SKIPPED")) if run.hangs else None


@case("a rank leaves a split out and goes on")
def split_left_out(rng: random.Random) -> Question | None:
    """The last of several splits of the world; all others are inside it."""
    job = _job(hybrid_sharded)
    extra = [[*p[:3], Create(0, "ncclCommSplit", ()), *p[3:]] for p in job.programs]
    rank = rng.randrange(len(extra))
    extra[rank].pop(3)
    run = simulate(replace(job, programs=extra), None, _pace(rng))
    return Question(view_of(run, CALLS), _one(rank, "SKIPPED", "NOT_ARRIVED")) if run.hangs else None


@case("records of a rank are lost, the transport is stuck")
def lost_records(rng: random.Random) -> Question | None:
    """What is missing inside a gap proves nothing: nobody may be named."""
    job = _job(training)
    injected = FAULTS["transport_stuck"](job, rng)
    assert injected is not None and injected.key is not None
    run = simulate(job, injected.disturbance, _pace(rng))
    view = view_of(run, CALLS)
    waits = [r for r in _members(job, injected.key) if view.ranks[r].state == IN_SYNC]
    rank = view.ranks[rng.choice(waits)]
    rank.operations = [op for op in rank.operations if op.key != injected.key]
    rank.gap = True
    return Question(view, [(frozenset(), ANY)])


@case("attached late, numbers don't agree, a rank stops")
def unaligned(rng: random.Random) -> Question | None:
    """Each rank counts from its first call that was seen. Who waits and who doesn't is still known."""
    question = _known_fault(training, "host_hang")(rng)
    if question is not None:
        for rank in question.view.ranks:
            first = len(rank.operations) - rng.randrange(60, 110)
            rank.operations = _renumbered(rank.operations[max(first, 0) :])
        for comm in question.view.comms:
            comm.aligned = False
    return question


@case("attached late, numbers don't agree, a call is skipped")
def unaligned_skip(rng: random.Random) -> Question | None:
    """With three steps of history the rank's own order still tells; nobody is an answer too."""
    question = _known_fault(training, "skip")(rng)
    if question is not None:
        for rank in question.view.ranks:
            keep = int(len(rank.operations) * rng.uniform(0.75, 0.9))
            rank.operations = _renumbered(rank.operations[-keep:])
        for comm in question.view.comms:
            comm.aligned = False
        question.answers.append((frozenset(), ANY))
    return question


def _renumbered(operations: list[Operation]) -> list[Operation]:
    counts: dict[Key, int] = {}
    out = []
    for op in operations:
        number = counts.get(op.key[:-1], 0)
        counts[op.key[:-1]] = number + 1
        out.append(op._replace(key=(*op.key[:-1], number)))
    return out


@case("three ranks receive before they send, in a ring")
def ring(rng: random.Random) -> Question | None:
    """All do the same, nobody in particular is at fault."""
    run = simulate(_job(_crossed), None, _pace(rng))
    kinds = frozenset({"ORDER_DEADLOCK", "CANNOT_DECIDE"})
    return Question(view_of(run, rng.choice((CALLS, GPU))), [(frozenset({0, 1, 2}), kinds), (frozenset(), kinds)])


def _crossed() -> Job:
    return exchange_ring(3, together=False)


def _full_queue(fault: str, evidence: str) -> Case:
    """Hosts run far ahead and block inside a call, since the queue of launches is full."""

    def question(rng: random.Random) -> Question | None:
        job = _job(training)
        injected = FAULTS[fault](job, rng)
        if injected is None or injected.rank is None:
            return None
        run = simulate(injected.job, replace(injected.disturbance, queue=8), AHEAD_NS)
        return Question(view_of(run, evidence), _one(injected.rank, *injected.kinds)) if run.hangs else None

    return question


CASES["queues are full, a rank stops"] = _full_queue("host_hang", CALLS)
CASES["queues are full, a call is skipped"] = _full_queue("skip", CALLS)
CASES["queues are full, a kernel is stuck (GPU's starts known)"] = _full_queue("gpu_stuck", GPU)
CASES["1F1B: a rank stops"] = _known_fault(one_forward_one_backward, "host_hang")
CASES["1F1B: a call is skipped"] = _known_fault(one_forward_one_backward, "skip")
CASES["1F1B: a kernel is stuck (GPU's starts known)"] = _known_fault(one_forward_one_backward, "gpu_stuck", GPU)
CASES["hybrid sharded: a rank dies"] = _known_fault(hybrid_sharded, "die")
CASES["hybrid sharded: a call is skipped"] = _known_fault(hybrid_sharded, "skip")
CASES["hybrid sharded: two calls are swapped (GPU's starts known)"] = _known_fault(hybrid_sharded, "swap", GPU)
CASES["hybrid sharded: a wrong count"] = _known_fault(hybrid_sharded, "wrong_count")
CASES["evaluation every third step: a call is skipped"] = _known_fault(with_evaluation, "skip")
CASES["evaluation every third step: a call too many"] = _known_fault(with_evaluation, "extra")
CASES["evaluation every third step: a wrong operation"] = _known_fault(with_evaluation, "wrong_op")


def ask(judge: Judge, question: Question) -> str:
    """One of OUTCOMES."""
    verdicts = list(judge(question.view))
    culprits = frozenset(rank for verdict in verdicts for rank in verdict.culprits)
    kinds = {verdict.kind for verdict in verdicts}
    for right, fitting in question.answers:
        if culprits == right and kinds <= fitting and (kinds or not right):
            return "hit"
    if not culprits:
        return "no answer"
    asked = [right for right, _ in question.answers if right]
    if culprits in asked:
        return "rank only"
    if any(culprits < right for right in asked):
        return "part"
    return "too many" if any(right < culprits for right in asked) else "wrong"


def main(seeds: int) -> None:
    """Print the score as a table, and one example of each kind of miss on stderr."""
    from stallscope.diagnose.judge import judge

    print(f"| what | runs | {' | '.join(OUTCOMES)} |\n|---|---|{'---|' * len(OUTCOMES)}")
    for what, make in CASES.items():
        found = dict.fromkeys(OUTCOMES, 0)
        for seed in range(seeds):
            question = make(random.Random(f"{what} {seed}"))
            if question is None:
                continue
            outcome = ask(judge, question)
            found[outcome] += 1
            if outcome != "hit" and found[outcome] == 1:
                wanted = " or ".join(str(sorted(right)) for right, _ in question.answers)
                print(f"{what}, seed {seed}: wanted {wanted}, got {says(list(judge(question.view)))}", file=sys.stderr)
        print(f"| {what} | {sum(found.values())} | {' | '.join(str(found[o]) for o in OUTCOMES)} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)

"""Faults put into a healthy job, and what there is to say about each."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from stallscope.diagnose.view import DEAD, USER, Key

from .program import Call, Create, Instruction, Job, Launch, Sync
from .simulator import Disturbance

__all__ = ["EARLY_STEPS", "FAULTS", "HISTORY", "MISMATCHES", "Injected", "altered", "launches", "number_at"]

EARLY_STEPS = 4
"""A fault is in one of the steps after these."""


@dataclass
class Injected:
    """A job with a fault.

    Attributes:
        rank: the culprit; None where nobody in particular is at fault.
        pc: place of the fault in the healthy program of the rank.
        job: what the ranks now do.
        kinds: the verdict kinds that are right.
        key: the operation that doesn't end, for a fault of the transport.
        moved_from: where a call stood that now comes too early.
    """

    rank: int | None
    pc: int
    job: Job
    kinds: frozenset[str]
    disturbance: Disturbance = field(default_factory=Disturbance)
    key: Key | None = None
    moved_from: int | None = None


Injector = Callable[[Job, random.Random], "Injected | None"]


def late(job: Job, rank: int) -> range:
    """Places in the rank's program where a fault may be."""
    return range(job.steps[rank][EARLY_STEPS], job.steps[rank][-1])


def launches(job: Job, rank: int, fits: Callable[[Call], bool] = lambda one: True) -> list[tuple[int, Launch]]:
    """The single calls among them that fit."""
    program = job.programs[rank]
    found = [(pc, what) for pc in late(job, rank) if isinstance(what := program[pc], Launch)]
    return [(pc, what) for pc, what in found if len(what.calls) == 1 and fits(what.calls[0])]


def altered(job: Job, rank: int, pc: int, length: int, new: list[Instruction]) -> Job:
    """A copy where one rank does `new` instead of the `length` instructions at `pc`."""
    programs = list(job.programs)
    programs[rank] = [*programs[rank][:pc], *new, *programs[rank][pc + length :]]
    return replace(job, programs=programs)


def number_at(job: Job, rank: int, pc: int) -> Key:
    """Key of the (only) call that a healthy rank launches at `pc`."""
    what = job.programs[rank][pc]
    assert isinstance(what, Launch)
    one = what.calls[0]
    before = [c for i in job.programs[rank][:pc] if isinstance(i, Launch) for c in i.calls]
    if one.peer < 0:
        return (one.comm, "c", sum(c.comm == one.comm and c.peer < 0 for c in before))
    me = job.members[one.comm].index(rank)
    ends = (me, one.peer) if one.name == "ncclSend" else (one.peer, me)
    return (one.comm, "p", *ends, sum((c.comm, c.peer, c.name) == (one.comm, one.peer, one.name) for c in before))


def _any_rank(job: Job, rng: random.Random) -> int:
    return rng.randrange(len(job.programs))


def _stop(state: str, kind: str) -> Injector:
    def inject(job: Job, rng: random.Random) -> Injected:
        rank = _any_rank(job, rng)
        pc = rng.choice(late(job, rank))
        return Injected(rank, pc, job, frozenset({kind}), Disturbance(stops={rank: (pc, state)}))

    return inject


def _edit(kind: str, fits: Callable[[Call], bool], edit: Callable[[Call, Job, random.Random], list[Call]]) -> Injector:
    """One call of one rank becomes other calls, or none."""

    def inject(job: Job, rng: random.Random) -> Injected | None:
        rank = _any_rank(job, rng)
        found = launches(job, rank, fits)
        if not found:
            return None
        pc, what = rng.choice(found)
        new = [what._replace(calls=(one,)) for one in edit(what.calls[0], job, rng)]
        return Injected(rank, pc, altered(job, rank, pc, 1, list(new)), frozenset({kind}))

    return inject


def _other_op(one: Call, job: Job, rng: random.Random) -> list[Call]:
    name = rng.choice(("ncclReduce", "ncclAlltoAll"))
    redop, root = (0, 0) if name == "ncclReduce" else (-1, -1)
    return [one._replace(name=name, signature=one.signature._replace(api=name, redop=redop, root=root))]


def _other_count(one: Call, job: Job, rng: random.Random) -> list[Call]:
    return [one._replace(signature=one.signature._replace(elements=one.signature.elements + 7))]


def _other_root(one: Call, job: Job, rng: random.Random) -> list[Call]:
    root = rng.randrange(1, len(job.members[one.comm]))
    return [one._replace(signature=one.signature._replace(root=root))]


def _shared(job: Job, rank: int, one: Call) -> set[int]:
    members = job.members[one.comm]
    return set(members) if one.peer < 0 else {rank, members[one.peer]}


def _swap(job: Job, rng: random.Random) -> Injected | None:
    """Two calls next to each other, on different communicators that share another rank: else nobody would notice."""
    rank = _any_rank(job, rng)
    after = dict(launches(job, rank))
    found = []
    for pc, what in after.items():
        then = after.get(pc + 1)
        if then is not None and then.calls[0].comm != what.calls[0].comm:
            both = _shared(job, rank, what.calls[0]) & _shared(job, rank, then.calls[0])
            found += [(pc, what, then)] if len(both) > 1 else []
    if not found:
        return None
    pc, what, then = rng.choice(found)
    return Injected(rank, pc, altered(job, rank, pc, 2, [then, what]), frozenset({"ORDER_DEADLOCK"}))


def _send_send(job: Job, rng: random.Random) -> Injected | None:
    """A stage sends its first gradient before it receives its last activation, which its neighbour is sending."""
    pairs = []
    for rank in range(len(job.programs)):
        for (pc, what), (then_pc, then) in pairwise(launches(job, rank, lambda one: one.peer >= 0)):
            one, other = what.calls[0], then.calls[0]
            same_step = not any(pc < begin <= then_pc for begin in job.steps[rank])
            if (one.name, other.name) == ("ncclRecv", "ncclSend") and one.peer == other.peer and same_step:
                pairs.append((rank, pc, then_pc))
    if not pairs:
        return None
    rank, pc, then_pc = rng.choice(pairs)
    program = job.programs[rank]
    changed = altered(job, rank, pc, then_pc - pc + 1, [program[then_pc], *program[pc:then_pc]])
    return Injected(rank, pc, changed, frozenset({"ORDER_DEADLOCK"}), moved_from=then_pc)


def _gpu_stuck(job: Job, rng: random.Random) -> Injected:
    """A kernel before an operation doesn't end."""
    rank = _any_rank(job, rng)
    pc, _ = rng.choice(launches(job, rank))
    return Injected(rank, pc, job, frozenset({"GPU_STUCK"}), Disturbance(stuck={(rank, pc)}))


def _kernel_stuck(job: Job, rng: random.Random) -> Injected:
    """A kernel after the last operation before a wait doesn't end."""
    rank = _any_rank(job, rng)
    pc = rng.choice([pc for pc in late(job, rank) if isinstance(job.programs[rank][pc], Sync)])
    return Injected(rank, pc, job, frozenset({"GPU_STUCK"}), Disturbance(stuck={(rank, pc)}))


def _transport_stuck(job: Job, rng: random.Random) -> Injected:
    rank = _any_rank(job, rng)
    pc, _ = rng.choice(launches(job, rank))
    key = number_at(job, rank, pc)
    return Injected(None, pc, job, frozenset({"ALL_ARRIVED"}), Disturbance(lost={key}), key)


def _missing(api: str) -> Injector:
    """A rank stops before it creates a communicator."""

    def inject(job: Job, rng: random.Random) -> Injected | None:
        rank = _any_rank(job, rng)
        places = [pc for pc, i in enumerate(job.programs[rank]) if isinstance(i, Create) and i.api == api]
        if not places:
            return None
        pc = rng.choice(places)
        return Injected(rank, pc, job, frozenset({"NOT_ARRIVED"}), Disturbance(stops={rank: (pc, USER)}))

    return inject


FAULTS: dict[str, Injector] = {
    "host_hang": _stop(USER, "NOT_ARRIVED"),
    "die": _stop(DEAD, "DIED"),
    "skip": _edit("SKIPPED", lambda one: True, lambda one, job, rng: []),
    "extra": _edit("EXTRA", lambda one: True, lambda one, job, rng: [one, one]),
    "wrong_op": _edit("MISMATCH", lambda one: one.peer < 0, _other_op),
    "wrong_count": _edit("MISMATCH", lambda one: True, _other_count),
    "wrong_root": _edit("MISMATCH", lambda one: one.signature.root >= 0, _other_root),
    "swap": _swap,
    "send_send": _send_send,
    "gpu_stuck": _gpu_stuck,
    "kernel_stuck": _kernel_stuck,
    "transport_stuck": _transport_stuck,
    "missing_init": _missing("ncclCommInitRank"),
    "missing_split": _missing("ncclCommSplit"),
}

MISMATCHES = frozenset({"wrong_op", "wrong_count", "wrong_root"})
HISTORY = frozenset({"skip", "extra", "swap", "send_send"})
"""Faults in the order of one rank's calls. Each rank alone looks fine to the others: only what it did before tells."""

"""What a capture would know about the end of a run."""

from __future__ import annotations

from stallscope.diagnose.look import SYMMETRIC
from stallscope.diagnose.view import DEAD, USER, Comm, Key, Operation, Rank, View

from .simulator import Host, Op, Run

__all__ = ["CALLS", "EVIDENCE", "GPU", "WAITS", "cut", "view_of"]

CALLS, WAITS, GPU = "calls", "waits", "gpu"
"""Evidence. WAITS: calls, and that what was issued before a wait for the device that returned is done. CALLS: the same,
but nothing is known of the ends of sends and receives, which is what a capture without a completion tap gives
(diagnose/look.py). GPU: which operations started and ended on each device, as a witness inside the process tells it: that one
GPU has ended its part means that all have begun it only where each needs something of all."""

EVIDENCE = (CALLS, GPU, WAITS)


def cut(host: Host, keep: int) -> int:
    """Index of the first operation of a window of `keep`: a little earlier where one before is not done (only done
    operations may fall out of a window), and where a group would be split."""
    first = max(0, len(host.ops) - keep)
    undone = next((i for i, op in enumerate(host.ops) if not op.done), len(host.ops))
    first = min(first, undone)
    while 0 < first < len(host.ops) and host.ops[first].batch is host.ops[first - 1].batch:
        first -= 1
    return first


def _operation(op: Op, pos: int, done: bool, evidence: str, comms: dict[int, int]) -> Operation:
    device = evidence == GPU and op.key[1] in ("c", "p")
    key: Key = (comms[op.call.comm], *op.key[1:])
    together = op.call.name in (*SYMMETRIC, "ncclRecv")
    return Operation(op.rank, pos, key, op.call.name, op.call.signature, op.stream, op.batch.enter_ns, op.returned,
                     op.batch.number, done and (together or not device), op.started if device else None,
                     device and done)  # fmt: skip


def _base(ops: list[Op], comms: dict[int, int]) -> dict[Key, int]:
    base: dict[Key, int] = {}
    for op in ops:
        if op.key[1] in ("c", "p"):
            prefix = (comms[op.call.comm], *op.key[1:-1])
            base[prefix] = base.get(prefix, 0) + 1
    return base


def _rank(host: Host, evidence: str, first: int, comms: dict[int, int]) -> Rank:
    operations = []
    for pos, op in enumerate(host.ops[first:], first):
        known = evidence == GPU or op.key[1] not in ("c", "p") or pos < host.synced
        known &= evidence != CALLS or op.key[1] != "p"
        operations.append(_operation(op, pos, op.done and known, evidence, comms))
    inside = None if host.in_comm is None else comms[host.in_comm]
    return Rank(1000 + host.rank, host.rank, host.state, host.since_ns, host.api, inside, None, operations,
                _base(host.ops[:first], comms))  # fmt: skip


def _guess(view: View) -> None:
    """Who is missing at a creation has not said which rank it is; where there are as many that wait for nothing, it is
    they, as diagnose/look.py has it."""
    under_way = {op.key[0] for r in view.ranks for op in r.operations[-1:] if op.key[1] == "init" and not op.returned}
    for number, comm in enumerate(view.comms):
        absent = [place for place in range(comm.nranks or 0) if place not in comm.members]
        taken = set(comm.members.values())
        idle = [i for i, rank in enumerate(view.ranks) if i not in taken and rank.state in (USER, DEAD)]
        if number in under_way and len(absent) == len(idle):
            comm.members.update(zip(absent, idle, strict=True))


def view_of(run: Run, evidence: str = GPU, keep: list[int] | None = None) -> View:
    """The end of a run.

    Args:
        run: the run.
        evidence: CALLS, WAITS or GPU.
        keep: how many operations the window of each rank has; None: all. Communicators that no rank got to are missing,
            and ranks that never called the creation of one are not known as its members, but by elimination.
    """
    known = [c for c in range(len(run.job.members)) if any(c in host.joined for host in run.hosts)]
    comms = {comm: i for i, comm in enumerate(known)}
    ranks = [_rank(h, evidence, cut(h, keep[h.rank]) if keep else 0, comms) for h in run.hosts]
    tables = []
    for comm in known:
        members = run.job.members[comm]
        joined = {i: rank for i, rank in enumerate(members) if comm in run.hosts[rank].joined}
        tables.append(Comm(run.job.names[comm], len(members), joined))
    view = View(run.now_ns, ranks, tables)
    _guess(view)
    return view

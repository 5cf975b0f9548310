"""Sentences of incidents: what happened and what to do next, for somebody who has just been woken up."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Facts", "next_step", "summary"]


class Facts(NamedTuple):
    """What a sentence is made of.

    who: e.g. "rank 5 (pid 1234)"; where: e.g. "ncclAllReduce #17 on communicator 1f2e3d4c (8 ranks)"; host: where the
    culprit's host is, e.g. "in read() on pipe:[123]"; waiting: how many ranks wait there;
    behind: how many more wait elsewhere because of it; since: time of day; several: `who` is more than one;
    looked: whether anything of the culprit's /proc is known.
    """

    kind: str
    who: str
    pid: int | None
    where: str
    why: str
    host: str | None
    waiting: int
    behind: int = 0
    since: str | None = None
    several: bool = False
    evidence: str = "api"
    looked: bool = True


SAID_BY_CLASS = ("DIED", "NOT_ARRIVED", "LEFT", "ALL_ARRIVED")
_HEADS = {
    "DIED": "{who} died; {waiting} for it at {where}{behind}",
    "NOT_ARRIVED": "{who} {has} not come to {where}; {waiting} for {it}{behind}",
    "LEFT": "{who} has left; {waiting} for it at {where}{behind}",
    "GPU_STUCK": "the GPU of {who} does not come to {where}; {waiting} for it{behind}",
    "MISMATCH": "{who} calls something else than the others at {where}",
    "SKIPPED": "{who} left out an operation before {where}; {all}",
    "EXTRA": "{who} made an operation too many before {where}; {all}",
    "ORDER_DEADLOCK": "{who} issues operations in another order than its peers: nobody can go on at {where}",
    "IN_API": "{who} {why}; {waiting} for it at {where}{behind}",
    "ALL_ARRIVED": "all ranks issued {where}, and it does not complete",
    "STRAGGLER": "{who} is slower than its peers: {where}",
    "SILENT_MISMATCH": "{who} called something else than the others at {where}, and it completed: results may be wrong",
    "CANNOT_DECIDE": "a block whose cause can't be told, at {where}",
}
_NEXT = {
    "DIED": "look for the first error of pid {pid}: its log, dmesg (out of memory), its exit code",
    "NOT_ARRIVED": "see where pid {pid} is: its stack and file are in the report, or py-spy dump --pid {pid}",
    "LEFT": "compare the number of steps or batches of the ranks: pid {pid} ended its loop before the others",
    "GPU_STUCK": "look at the kernels of pid {pid} before this operation (compute-sanitizer, cuda-gdb, Xid in dmesg)",
    "MISMATCH": "compare the code path of pid {pid} with its peers': other data, another branch or version",
    "SKIPPED": "look for a branch that pid {pid} took alone: a skipped batch, an unused parameter, an early continue",
    "EXTRA": "look for a branch that pid {pid} took alone: an additional batch, a retry, a logging reduce",
    "ORDER_DEADLOCK": "make all ranks issue the operations of these communicators in one order, or in one group",
    "IN_API": "native stack of pid {pid} (gdb -p, py-spy dump --native); NCCL's version and its log",
    "ALL_ARRIVED": "check GPUs (Xid in dmesg, power), network and NCCL's log; kernels before it may hang as well",
    "STRAGGLER": "compare clocks, temperature, other load and input sizes of pid {pid} with its peers",
    "SILENT_MISMATCH": "compare shapes and types of pid {pid} with its peers at this call",
    "CANNOT_DECIDE": "see who is where in the list of calls in flight; attach before the block to see more",
}

_NEXT_BY_GPU = {
    "ALL_ARRIVED": "check links, network and NCCL's log of these ranks: no kernel before it hangs",
}

_NEXT_UNSEEN = {
    "NOT_ARRIVED": "see where pid {pid} is: py-spy dump --pid {pid} where it runs (its /proc can't be read here)",
}


def summary(facts: Facts) -> str:
    """One sentence, e.g. "rank 5 (pid 12) has not come to ncclAllReduce #17 on ...; 7 ranks wait for it: in read()"."""
    words = {
        "who": facts.who,
        "where": facts.where,
        "why": facts.why,
        "has": "have" if facts.several else "has",
        "it": "them" if facts.several else "it",
        "waiting": _ranks(facts.waiting, "waits", "wait"),
        "behind": f", {facts.behind} more behind" if facts.behind else "",
        "all": _ranks(facts.waiting + facts.behind, "is blocked", "are blocked"),
    }
    head = _HEADS.get(facts.kind, "{who}: {where}").format(**words)
    # A verdict's reason repeats its class, for those who read only that.
    why = "" if "{why}" in _HEADS.get(facts.kind, "") else facts.why
    if facts.kind in SAID_BY_CLASS:
        why = why.partition(": ")[2]
    if facts.several:
        why = why.replace("its host is", "their hosts are")
    parts = [part for part in (why, facts.host) if part]
    since = f"; since {facts.since} UTC" if facts.since else ""
    return head + (f": {'; '.join(parts)}" if parts else "") + since


def _ranks(number: int, one: str, many: str) -> str:
    return f"1 rank {one}" if number == 1 else f"{number} ranks {many}"


def next_step(facts: Facts) -> str:
    """What to do now."""
    other = _NEXT_BY_GPU.get(facts.kind) if facts.evidence == "gpu_start" else None
    other = other or (None if facts.looked else _NEXT_UNSEEN.get(facts.kind))
    return (other or _NEXT.get(facts.kind, "")).format(pid=facts.pid if facts.pid is not None else "?")

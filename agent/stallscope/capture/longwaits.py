"""When all Python threads of a process are looked at: as something in it has waited for 2 s, and for 10 s.

The wait may be any hooked call, or, while a block is suspected, a process with NCCL that is inside no call: who is
waited for is among those. Nobody is stopped, and a process is looked at anew 10 s later at the earliest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from stallscope.capture.stacks import Everybody
from stallscope.capture.suspicion import MAY_WAIT
from stallscope.capture.tables import LEFT
from stallscope.capture.target import Target

__all__ = ["AGES_NS", "LongWaits"]

AGES_NS = (2_000_000_000, 10_000_000_000)
PAUSE_NS = 10_000_000_000
MAX_WAITS = 8
Waits = dict[int, int]


class _Plan:
    """What was looked at of a process: of which wait, at how many of the ages, and when."""

    def __init__(self) -> None:
        self.since_ns, self.ages, self.looked_ns = -1, 0, -PAUSE_NS

    def is_due(self, since_ns: int, now: int) -> bool:
        """Whether to look now."""
        if since_ns != self.since_ns:
            self.since_ns, self.ages = since_ns, 0
        reached = sum(now - since_ns >= age for age in AGES_NS)
        if reached <= self.ages or (not self.ages and now - self.looked_ns < PAUSE_NS):
            return False
        self.ages, self.looked_ns = reached, now
        return True


class LongWaits:
    """`judge` at every tick.

    Args:
        want: queues a look at a process.
    """

    def __init__(self, want: Callable[[Everybody], None]) -> None:
        self._want = want
        self._plans: dict[int, _Plan] = {}

    def judge(
        self, now: int, flying: list[list[Any]], targets: list[Target], idle: Iterable[Target], block_ns: int | None
    ) -> None:
        """`flying`: rows as INFLIGHT frames have them; `idle`: inside no call while a block lasts, since `block_ns`."""
        by_proc = {target.proc: target for target in targets}
        waits = _waits(flying, targets)
        if block_ns is not None:
            for one in idle:
                waits.setdefault(one.proc, {0: block_ns})
        self._plans = {proc: plan for proc, plan in self._plans.items() if proc in by_proc}
        for proc, threads in waits.items():
            since = min(threads.values())
            target = by_proc.get(proc)
            if target is not None and self._plans.setdefault(proc, _Plan()).is_due(since, now):
                longest = sorted((tid for tid in threads if tid), key=lambda tid: threads[tid])[:MAX_WAITS]
                self._want(Everybody(proc, target.pid, tuple(longest), since))


def _waits(flying: list[list[Any]], targets: list[Target]) -> dict[int, Waits]:
    """By process: threads inside a call that may wait, and since when."""
    found: dict[int, Waits] = {}
    for proc, tid, frames in flying:
        since = next((f[1] for f in frames if f[0] in MAY_WAIT and not f[3] & LEFT), None)
        if since is not None:
            found.setdefault(proc, {})[tid] = since
    for target in targets:
        for call in target.inferred:
            if call.hook in MAY_WAIT:
                found.setdefault(target.proc, {})[call.tid] = call.since_ns
    return found

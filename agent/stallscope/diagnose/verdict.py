"""The result of looking at one moment: who holds everybody up, and how that is known."""

from __future__ import annotations

from typing import NamedTuple

from stallscope.diagnose.view import Key

__all__ = ["Verdict"]


class Verdict(NamedTuple):
    """One root of a block.

    Attributes:
        kind: DIED, NOT_ARRIVED, LEFT, GPU_STUCK, MISMATCH, SKIPPED, EXTRA, ORDER_DEADLOCK, IN_API, ALL_ARRIVED or
            CANNOT_DECIDE.
        culprits: indices of ranks; empty where nobody in particular is at fault or it can't be told.
        key: the operation at which it shows first, None where none is known.
        comm: index of its communicator.
        since_ns: since when somebody waits for it.
        victims: ranks that wait, directly or behind others.
        cascade: other communicators in which ranks wait because of it.
        evidence: "host_state", "api", "completion" or "gpu_start": the weakest thing that the verdict rests on.
        confidence: "high", "medium", "low".
        why: a clause for people, e.g. "calls ncclReduce where 7 others call ncclAllReduce".
        where: for CANNOT_DECIDE, ALL_ARRIVED and deadlocks: (rank, key it waits in) of those concerned.
    """

    kind: str
    culprits: tuple[int, ...]
    key: Key | None
    comm: int | None
    since_ns: int
    victims: tuple[int, ...]
    cascade: tuple[int, ...]
    evidence: str
    confidence: str
    why: str
    where: tuple[tuple[int, Key], ...] = ()

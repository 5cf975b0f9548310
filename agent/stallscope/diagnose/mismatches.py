"""Collectives that ranks called differently and that completed all the same."""

from __future__ import annotations

from collections import Counter

import numpy as np

from stallscope.aggregate.state import State
from stallscope.diagnose.completed import Completed, Odd

__all__ = ["Silent", "minority"]

SETTLED_NS = 1_500_000_000
MAX_OPEN = 64


class Silent:
    """Keeps mismatches until it is sure that they did not block: then the communicator went on."""

    def __init__(self, state: State, completed: Completed) -> None:
        self._state, self._completed = state, completed
        self._open: list[Odd] = []
        self._told: set[int] = set()

    def step(self, _now: int) -> None:
        """Take what the last step of `Completed` found; the first of a communicator speaks for those after it."""
        for odd in self._completed.odd:
            if odd.comm not in self._told and len(self._open) < MAX_OPEN:
                self._told.add(odd.comm)
                self._open.append(odd)

    def confirmed(self, now: int) -> list[Odd]:
        """Those after which the communicator went on for a while."""
        arrivals = self._state.operations.arrivals
        done = []
        for odd in self._open:
            rows = arrivals.rank_rows(odd.comm)
            newest = int(arrivals.last_ns[rows][arrivals.present[rows]].min())
            if newest - odd.at_ns >= SETTLED_NS and now - newest < SETTLED_NS:
                done.append(odd)
        self._open = [odd for odd in self._open if odd not in done]
        return done


def minority(state: State, odd: Odd) -> list[int]:
    """Ranks (in the communicator) that called it differently: against most of the others, else against themselves."""
    arrivals = state.operations.arrivals
    ranks = np.flatnonzero(arrivals.present[arrivals.rank_rows(odd.comm)]).tolist()
    value, votes = Counter(odd.signatures).most_common(1)[0]
    if votes * 2 > len(odd.signatures):
        return [rank for rank, called in zip(ranks, odd.signatures, strict=True) if called != value]
    _, history = arrivals.history(odd.comm)
    new = [rank for rank, called in zip(ranks, odd.signatures, strict=True) if (history[rank] == called).sum() <= 1]
    return new if 0 < len(new) < len(ranks) else ranks

"""Stretches of time and what is left of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Span", "covered", "minus", "union"]


class Span(NamedTuple):
    """From one instant to another, ns."""

    from_ns: int
    to_ns: int

    def common(self, others: Iterable[Span]) -> list[Span]:
        """What it has in common with each of the others."""
        found = (Span(max(self.from_ns, one.from_ns), min(self.to_ns, one.to_ns)) for one in others)
        return [span for span in found if span.from_ns < span.to_ns]


def minus(spans: list[Span], taken: Iterable[Span]) -> list[Span]:
    """What is left of disjoint spans."""
    for one in taken:
        left = []
        for span in spans:
            left += [Span(span.from_ns, min(span.to_ns, one.from_ns)), Span(max(span.from_ns, one.to_ns), span.to_ns)]
        spans = [span for span in left if span.from_ns < span.to_ns]
    return spans


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as disjoint stretches, in order."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.from_ns <= found[-1].to_ns:
            found[-1] = Span(found[-1].from_ns, max(found[-1].to_ns, span.to_ns))
        else:
            found.append(span)
    return found


def covered(spans: Iterable[Span]) -> int:
    """How long they are together, ns; what several of them cover counts once."""
    return sum(span.to_ns - span.from_ns for span in union(spans))

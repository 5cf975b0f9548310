"""Stretches of time and what is left of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Span", "covered", "minus"]


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


def covered(spans: Iterable[Span]) -> int:
    """How long they are together, ns; what several of them cover counts once."""
    total, upto = 0, None
    for span in sorted(spans):
        begin = span.from_ns if upto is None else max(span.from_ns, upto)
        total += max(0, span.to_ns - begin)
        upto = span.to_ns if upto is None else max(upto, span.to_ns)
    return total

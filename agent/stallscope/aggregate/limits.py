"""Bounds of every table. What exceeds one is turned away, counted, and named in the report."""

from __future__ import annotations

from collections import Counter

__all__ = ["LIMITS", "Overflow"]

LIMITS = {
    "processes": 4096,
    "links of a process": 64,
    "characters of environments": 16 << 20,
    "counter rows": 65536,
    "histograms": 16384,
    "longest lists": 32768,
    "notes": 256,
    "gaps": 1024,
    "communicators": 4096,
    "communicator members": 16384,
    "communicator creations": 16384,
    "communicator pointers": 8192,
    "communicator splits": 8192,
    "creations under way": 4096,
    "sequence numbers": 8192,
    "threads in flight": 8192,
    "inferred calls": 8192,
    "issuing processes": 4096,
    "communicators of a process": 1024,
    "ranks of communicators": 1 << 20,
    "signatures": 8192,
    "looks at hosts": 4096,
    "stacks": 256,
    "processes with stacks": 256,
    "stacks of threads": 8192,
    "frames of threads": 16384,
    "gpus": 64,
    "witnesses": 64,
    "notes on GPUs": 16,
    "programs of a process": 16,
    "places of a program": 256,
    "places of programs": 32768,
    "kills for want of memory": 256,
    "trainers with workers": 256,
    "workers": 4096,
    "step tokens": 1 << 16,
    "processes with steps": 128,
    "kinds of calls in steps": 2048,
    "call sites": 16384,
    "frames of call sites": 65536,
}


class Overflow:
    """Counts what was turned away, by table."""

    def __init__(self) -> None:
        self.turned_away: Counter[str] = Counter()

    def full(self, table: str, size: int) -> bool:
        """Whether a table that holds `size` items takes no more; counts the item if so."""
        if size < LIMITS[table]:
            return False
        self.turned_away[table] += 1
        return True

    def notes(self) -> list[str]:
        """One sentence a table."""
        full = sorted(self.turned_away.items())
        return [f"{table}: {count} turned away (limit {LIMITS[table]})" for table, count in full]

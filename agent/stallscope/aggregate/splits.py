"""Which rank each process is in the children of a split, by the rule that NCCL's documentation gives (ncclCommSplit).

NCCL keeps the rank in its memory, which is read a moment later: a rank that died before is known only by this rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from stallscope.aggregate.communicator import IN_PROGRESS, SUCCESS, Communicator, Member
from stallscope.aggregate.limits import Overflow

__all__ = ["Entry", "Splits"]


class Entry(NamedTuple):
    """One rank's call: its key, who it is in the parent, and in the child; child None: it goes into none."""

    key: int
    parent: Member
    child: Communicator | None
    member: Member | None


@dataclass
class _Split:
    entries: list[Entry] = field(default_factory=list)


class Splits:
    """Collects the calls of each split until every rank of the parent has come."""

    def __init__(self, overflow: Overflow) -> None:
        self._open: dict[tuple[str, int], _Split] = {}
        self._overflow = overflow

    def enter(self, parent: Communicator, ordinal: int, entry: Entry) -> None:
        """A rank makes its `ordinal`-th split of the parent; ordinals agree where all its splits were seen."""
        if not parent.exact or entry.parent.status not in (SUCCESS, IN_PROGRESS):
            return
        place = (parent.id, ordinal)
        if place not in self._open and self._overflow.full("communicator splits", len(self._open)):
            return
        split = self._open.setdefault(place, _Split())
        split.entries.append(entry)
        if len(split.entries) == parent.nranks:
            del self._open[place]
            for child in {id(e.child): e.child for e in split.entries if e.child}.values():
                _place([entry for entry in split.entries if entry.child is child], child)


def _place(entries: list[Entry], child: Communicator) -> None:
    """Ranks by key, equal keys by rank in the parent; nobody is placed where what is known says otherwise."""
    if any(entry.parent.rank is None for entry in entries):
        return
    entries.sort(key=lambda entry: (entry.key, entry.parent.rank))
    members = [entry.member for entry in entries if entry.member]
    there = {id(member) for member in child.members}  # who has turned out to be another one's has left
    if child.nranks not in (None, len(members)) or any(id(member) not in there for member in members):
        return
    if any(m.rank not in (None, rank) or child.at_rank.get(rank, m) is not m for rank, m in enumerate(members)):
        return
    child.nranks = len(members)
    for rank, member in enumerate(members):
        member.rank, child.at_rank[rank] = rank, member

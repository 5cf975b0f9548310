"""Where everybody stands in a block: the steps of all ranks played through on paper."""

from __future__ import annotations

from stallscope.sim.job.faults import ABSENT, SLACK_BYTES, Fault
from stallscope.sim.job.layout import PIPELINE, WORLD, Group, Layout
from stallscope.sim.job.schedule import Call, Transfer, altered, schedule

Work = Call | Transfer
STEPS = 3  # the one with the fault, and what may follow before all stand


def _creation(layout: Layout, fault: Fault, rank: int) -> list[Work]:
    """Communicators are made like this; the rank at fault stops before that of the fault."""
    made: list[Work] = []
    for kind in layout.kinds():
        if rank == fault.rank and kind == fault.comm:
            break
        is_split = kind == layout.split_kind
        made.append(Call(WORLD, "split", 0) if is_split else Call(kind, "init", 0))
    return made


def _program(layout: Layout, fault: Fault, rank: int) -> list[Work]:
    if fault.kind in ("in-init", "in-split"):
        return _creation(layout, fault, rank)
    if fault.kind in ABSENT and rank == fault.rank:
        return []
    usual = schedule(layout, rank)
    at_fault = rank == fault.rank or rank in fault.culprits(layout)
    items = (altered(usual, fault, layout, rank) if at_fault else usual) + usual * (STEPS - 1)
    return [item for item in items if isinstance(item, Call | Transfer)]


class Model:
    def __init__(self, layout: Layout, fault: Fault) -> None:
        self._layout, self._fault = layout, fault
        self._left = {rank: _program(layout, fault, rank) for rank in range(layout.ranks)}
        self._stuck: set[int] = set()

    def heads(self) -> dict[int, Group]:
        """By rank, the communicator in which it waits for good; without those that wait in none."""
        while any(self._advance(rank) for rank in self._left):
            pass
        waiting = {rank: left[0].kind for rank, left in self._left.items() if left}
        return {rank: self._layout.group_of(kind, rank) for rank, kind in waiting.items()}

    def _advance(self, rank: int) -> bool:
        if not self._left[rank] or rank in self._stuck:
            return False
        head = self._left[rank][0]
        return self._meet(rank, head) if isinstance(head, Transfer) else self._collect(rank, head)

    def _meet(self, rank: int, mine: Transfer) -> bool:
        peer = self._layout.group_of(PIPELINE, rank).ranks[mine.stage]
        theirs = self._left[peer][0] if self._left[peer] else None
        my_stage = self._layout.place(rank)[2]
        if not isinstance(theirs, Transfer) or theirs.stage != my_stage or theirs.api == mine.api:
            return False
        for end in (rank, peer):
            self._left[end].pop(0)
        return True

    def _collect(self, rank: int, mine: Call) -> bool:
        members = self._layout.group_of(mine.kind, rank).ranks
        calls = {}
        for member in members:
            head = self._left[member][0] if self._left[member] else None
            if not isinstance(head, Call) or head.kind != mine.kind or member in self._stuck:
                return False
            calls[member] = head
        self._finish(calls)
        return True

    def _finish(self, calls: dict[int, Call]) -> None:
        """All have come: each ends, or stands for ever."""
        least = min(call.count for call in calls.values())
        fits = len({call.api for call in calls.values()}) == 1
        stands = self._fault.kind == "transport-stuck" and next(iter(calls.values())).kind == WORLD
        for member, call in calls.items():
            if fits and not stands and (call.count - least) * 4 <= SLACK_BYTES:
                self._left[member].pop(0)
            else:
                self._stuck.add(member)

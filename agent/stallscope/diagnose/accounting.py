"""Whether every call is accounted for, and so which numbers are exact."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from stallscope.aggregate.process import SHIM, Process
from stallscope.aggregate.state import State

__all__ = ["Accounting", "account"]

NAMED = 3
Blind = dict[int | None, set[frozenset[int] | None]]


@dataclass(frozen=True)
class Accounting:
    """The equation `events + lost + sampled_out + filtered == calls`, and what it says of the numbers.

    Attributes:
        history: those of `filtered` that a shim counted before the attach, and whose records nobody read.
        told_before: those of `filtered` whose records a reader before this one was told of (a daemon's; no BPF program
            filters by itself).
        missing: calls that no term explains; negative: records of calls that no counter knows.
        events_bounded: `events` (and what rests on records) is a lower bound.
        blind: process (None: every one) -> hooks (None: all of them) whose counts and totals are lower bounds.
        notes: one sentence for each reason.
    """

    events: int
    lost: int
    sampled_out: int
    filtered: int
    history: int
    told_before: int
    calls: int
    events_bounded: bool
    blind: Blind
    notes: tuple[str, ...]

    @property
    def missing(self) -> int:
        """Calls without an account."""
        return self.calls - self.events - self.lost - self.sampled_out - self.filtered

    def unsure(self, proc: int, hook: int) -> bool:
        """Whether count and total of a hook in a process are lower bounds."""
        return any(hooks is None or hook in hooks for p in (None, proc) for hooks in self.blind.get(p, ()))


def account(state: State) -> Accounting:
    """Balance the counters against the records."""
    processes = list(state.processes.table.values())
    rows = [row for p in processes for row in p.counts.values()]
    balances = _balances(state, processes)
    events = state.events.total + state.flight.unrecorded().total()
    lost, sampled_out = sum(r.lost for r in rows), sum(r.sampled_out for r in rows)
    filtered, calls = sum(r.filtered for r in rows), sum(r.calls for r in rows)
    missing = calls - events - lost - sampled_out - filtered
    ended = state.complete and state.dropped is None
    return Accounting(
        events=events,
        lost=lost,
        sampled_out=sampled_out,
        filtered=filtered,
        history=sum(row.filtered for p in processes if p.source == SHIM for row in p.counts.values()),
        told_before=sum(row.filtered for p in processes if p.source != SHIM for row in p.counts.values()),
        calls=calls,
        events_bounded=not ended or missing > 0,
        blind=_blind(state, balances, ended),
        notes=tuple(_notes(state, missing, balances)),
    )


def _balances(state: State, processes: list[Process]) -> dict[int, int]:
    """By process: calls without an account."""
    unrecorded = state.flight.unrecorded()
    told = {p.proc: sum(r.lost + r.sampled_out + r.filtered for r in p.counts.values()) for p in processes}
    return {p.proc: p.calls() - told[p.proc] - p.events - unrecorded[p.proc] for p in processes}


def _blind(state: State, balances: dict[int, int], ended: bool) -> Blind:
    if not ended or state.capture is None:
        return {None: {None}}
    found: Blind = defaultdict(set)
    for proc, balance in balances.items():
        if balance < 0 or proc in state.processes.backwards:
            found[proc].add(None)
    for owner, hooks in state.blind.items():
        found[owner] |= hooks
    return found


def _notes(state: State, missing: int, balances: dict[int, int]) -> list[str]:
    notes = []
    if state.dropped is not None:
        notes.append(f"the event stream is no longer read: {state.dropped}; counts are lower bounds")
    elif not state.complete:
        is_cut = f"the event stream ended without a farewell ({state.ending})"
        notes.append(f"{is_cut if state.ending else 'the capture goes on'}: counts are lower bounds")
    if missing and state.complete:  # a recording cut short does not have the last records and counters
        notes.append(f"accounting does not close: {_calls(missing)}{_where(state, balances)}")
    if state.events.homeless:
        notes.append(f"{_calls(state.events.homeless)} recorded in no known process")
    for proc in sorted(state.processes.backwards):
        notes.append(f"counters went backwards in process {proc}: its counts are lower bounds")
    return notes


def _calls(count: int) -> str:
    return f"{count} call{'' if abs(count) == 1 else 's'}"


def _where(state: State, balances: dict[int, int]) -> str:
    off = sorted((proc for proc, balance in balances.items() if balance), key=lambda proc: (-abs(balances[proc]), proc))
    named = ", ".join(f"{balances[proc]} in pid {state.processes.table[proc].pid}" for proc in off[:NAMED])
    more = f", {len(off) - NAMED} more processes" if len(off) > NAMED else ""
    return f" ({named}{more})" if named else ""

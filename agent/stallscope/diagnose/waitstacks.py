"""Waits as stacks with a weight, for flame graphs: every wait once, also those whose line is not known."""

from __future__ import annotations

from typing import Any, NamedTuple

from stallscope.aggregate.process import Process
from stallscope.aggregate.state import State
from stallscope.diagnose.stalls import stalls

__all__ = ["WaitStack", "wait_stacks"]


class WaitStack(NamedTuple):
    """Calls of one function from one stack. Frames outermost first; `why`: why there are none."""

    process: Process
    frames: list[dict[str, Any]]
    api: str
    calls: int
    total_ns: int
    why: str | None


def wait_stacks(state: State) -> list[WaitStack]:
    """All of them, by process, the largest total first."""
    found = []
    for number, times in state.sites.times.items():
        site = state.sites.table[number]
        process, api = state.processes.table.get(site.proc), state.hooks.get(site.hook).name
        if process is not None and times.calls:
            why = site.why if not site.frames else None
            found.append(WaitStack(process, site.frames[::-1], api, times.calls, times.total_ns, why))
    for stall in stalls(state):
        if stall.is_rest or not state.sites.of(stall.process.proc, stall.hook.id):
            timing = stall.timing
            found.append(WaitStack(stall.process, [], stall.hook.name, timing.calls, timing.total_ns, stall.why))
    return sorted(found, key=lambda w: (w.process.order, -w.total_ns, w.api, str(w.frames)))

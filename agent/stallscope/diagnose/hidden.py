"""What could not be seen, as far as the counts betray it."""

from __future__ import annotations

from stallscope.aggregate.hooks import Hooks
from stallscope.aggregate.process import Process
from stallscope.aggregate.state import State

__all__ = ["hidden"]


def hidden(state: State) -> list[str]:
    """One sentence for each process whose runtime does not reach the driver where we look."""
    found = []
    for process in state.processes.table.values():
        sentence = _bypass(process, state.hooks)
        if sentence:
            found.append(f"{process.name} (pid {process.pid}): {sentence}")
    return found


def _bypass(process: Process, hooks: Hooks) -> str | None:
    counts = [(hooks.get(number), row) for number, row in process.counts.items()]
    calls = process.runtime_calls(hooks)
    if not calls or not process.has_library("CUDART", hooks):
        return None
    if not process.has_library("CUDA", hooks):
        return "libcuda is not loaded: only calls of the runtime are seen"
    if calls == process.runtime_calls_before_driver:
        return None  # the driver was linked after the last of them: nothing is known
    if any(row.nested for hook, row in counts if hook.library == "CUDA"):
        return None
    return (
        "libcuda's exported functions were not entered by the runtime's calls (private addresses): "
        "driver-level calls of libraries with a static runtime would stay unseen here"
    )

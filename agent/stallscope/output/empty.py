"""An empty report explains itself."""

from __future__ import annotations

from stallscope.aggregate.process import Process
from stallscope.aggregate.state import State
from stallscope.errors import CaptureProblem, ExitCode

__all__ = ["NothingCaptured", "why_empty"]

LIBRARIES = {"CUDART": "libcudart.so", "CUDA": "libcuda.so", "NCCL": "libnccl.so"}
NAMED = 4


class NothingCaptured(CaptureProblem):
    """The capture worked and saw no call (exit 4)."""

    exit_code = ExitCode.NOTHING_CAPTURED


def why_empty(state: State) -> NothingCaptured | None:
    """What to tell when there is nothing to report; None when a call was seen, be it one that never returned."""
    processes = [p for p in state.processes.table.values() if p.traced]
    if state.events.total or state.flight.inferred or state.flight.threads or any(p.calls() for p in processes):
        return None
    return NothingCaptured(
        f"nothing captured from {_whom(processes)}", why=_why(state, processes), hint=_hint(state, processes)
    )


def _whom(processes: list[Process]) -> str:
    named = ", ".join(f"pid {p.pid} ({p.name})" for p in processes[:NAMED])
    more = f" and {len(processes) - NAMED} more" if len(processes) > NAMED else ""
    return named + more or "any process"


def _why(state: State, processes: list[Process]) -> str:
    if state.capture is None:
        return f"the capture sent nothing that can be read{f' ({state.dropped})' if state.dropped else ''}"
    seconds = (state.now_ns - state.capture.start_mono_ns) / 1e9
    wanted = {h.library for h in state.hooks.by_id.values()}
    looked = ", ".join(name for library, name in LIBRARIES.items() if library in wanted)
    linked = sorted({link.path for p in processes for link in p.links})
    uncalled = "none of its functions was called"
    if state.capture.backend == "inject":
        uncalled = (
            "no call came by the library (those of ctypes and others that had fetched addresses before go past it)"
        )
    found = f"{', '.join(linked[:NAMED])} linked, {uncalled}" if linked else "none was mapped"
    return f"in {seconds:.1f} s, looking for {looked}: {found}; {_fate(processes)}"


def _fate(processes: list[Process]) -> str:
    if not processes:
        return "no process was seen"
    ended = [p.exit for p in processes if p.exit]
    if len(ended) < len(processes):
        return "the target was still running" if len(processes) == 1 else f"{len(processes) - len(ended)} still running"
    last = ended[-1]
    how = (
        f"by signal {last.signal}" if last.signal else f"with code {last.code if last.code is not None else 'unknown'}"
    )
    return f"the target ended {how}"


def _hint(state: State, processes: list[Process]) -> str:
    if state.capture is not None and state.capture.sources == ["shim"] and not state.capture.targets:
        return (
            "check that the trainer has LD_PRELOAD=DIR/libstallscope.so and STALLSCOPE_SHIM=dir:VOLUME, and that it "
            "and the sidecar have the same volume there, which the trainer may write to; see docs/sidecar.md"
        )
    if state.capture is not None and state.capture.backend == "inject" and any(p.links for p in processes):
        return "attach while the job computes; probes (as root, --method bpf) and `stallscope run` see such calls, too"
    if state.capture is not None and state.capture.sources == ["shim"]:
        return "check that CUDA is used by a program that is linked dynamically, and what ld.so says above"
    if any(p.links for p in processes):
        return "attach while the job computes, or for longer (--duration)"
    pid = processes[0].pid if processes else "PID"
    return f"check that this is the process that uses the GPU; `stallscope doctor {pid}` says what can be seen of it"

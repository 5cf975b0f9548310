"""Carries out a fault inside the rank that has it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from stallscope.sim.job.communicators import Communicator
from stallscope.sim.job.cuda import Runtime
from stallscope.sim.job.faults import Fault
from stallscope.sim.job.layout import WORLD, Layout
from stallscope.sim.job.schedule import Item, altered

FOREVER_S = 1e6
FOLLOWS = {"transport-stuck": "never_completes", "in-abort": "abort_hangs"}  # lines of the fault file


def fault_file_line(fault: Fault) -> str | None:
    """What the simulated NCCL of the rank at fault must be told from its start."""
    if fault.kind not in FOLLOWS:
        return None
    operation = f" op={fault.step}" if fault.kind == "transport-stuck" else ""
    return f"nccl.{FOLLOWS[fault.kind]} name={WORLD}{operation}\n"


class Injector:
    """Of one rank; does nothing in those without a part in the fault."""

    def __init__(self, fault: Fault | None, layout: Layout, rank: int, folder: Path, runtime: Runtime) -> None:
        self._folder, self._rank, self._runtime = folder, rank, runtime
        self._active = fault if fault and rank in {fault.rank, *fault.culprits(layout)} else None
        self._layout = layout
        self._spent = False
        self._record: dict[str, Any] = {}

    @property
    def kind(self) -> str:
        return self._active.kind if self._active else ""

    def _begin(self, step: int, kind: str = "", operation: int = -1) -> None:
        """What the truth says of the start; only the first counts, and only of the rank that the plan names."""
        if self._active is None or self._rank != self._active.rank or self._record:
            return
        self._record = {"start_ns": time.monotonic_ns(), "step": step, "kind": kind, "operation": operation}
        self._save()

    def _save(self) -> None:
        fresh = self._folder / "fault.new"
        fresh.write_text(json.dumps(self._record), encoding="utf-8")
        fresh.rename(self._folder / "fault.json")

    def before_communicator(self, kind: str, is_split: bool) -> None:
        wanted = {"in-init": False, "in-split": True}.get(self.kind)
        if self._active and wanted is is_split and self._active.comm == kind:
            self._begin(-1, kind)
            time.sleep(FOREVER_S)

    def at_load(self, step: int, communicators: dict[str, Communicator]) -> None:
        """At the beginning of a step, where the host waits for a batch."""
        fault = self._active
        if fault is None or step < fault.step:
            return
        if fault.kind == "many-short":
            nth = step - fault.step
            seconds = fault.values["ms"] / 1e3 if nth < fault.values["times"] else fault.values["last"]
            self._pause(step, seconds, seconds > 0 and nth <= fault.values["times"])
        elif step == fault.step:
            self._once(fault, step, communicators)

    def _pause(self, step: int, seconds: float, wanted: bool) -> None:
        if not wanted:
            return
        self._begin(step)
        start_ns = time.monotonic_ns()
        time.sleep(seconds)
        end_ns = time.monotonic_ns()
        self._record["end_ns"] = end_ns
        self._record.setdefault("pauses", []).append([start_ns, end_ns])
        self._save()

    def _once(self, fault: Fault, step: int, communicators: dict[str, Communicator]) -> None:
        if fault.kind in ("late", "never"):
            self._pause(step, fault.values["seconds"] if fault.kind == "late" else FOREVER_S, True)
        elif fault.kind == "io":
            self._begin(step)
            self._read_for_ever()
        elif fault.kind == "die":
            self._begin(step)
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "in-abort":
            self._begin(step, fault.comm, communicators[fault.comm].operations)
            self._runtime.nccl("ncclCommAbort", communicators[fault.comm].handle)

    def _read_for_ever(self) -> None:
        """A batch that comes through a named pipe, and does not come."""
        path = self._folder / "batches"
        os.mkfifo(path)
        file = os.open(path, os.O_RDWR)  # a writer of its own: the read blocks, not the open
        os.read(file, 1)

    def items(self, step: int, usual: list[Item]) -> list[Item]:
        """What this rank does in that step."""
        fault = self._active
        return altered(usual, fault, self._layout, self._rank) if fault and step == fault.step else usual

    def mark(self, step: int, communicator: Communicator) -> None:
        """Where the first altered call stands."""
        self._begin(step, communicator.group.kind, communicator.operations)

    def next_kernel_ns(self, step: int, usual_ns: int) -> int:
        fault = self._active
        if fault is None or step < fault.step:
            return usual_ns
        if fault.kind == "slow":
            self._begin(step)
            return int(usual_ns * fault.values["factor"])
        if fault.kind == "gpu-stuck" and not self._spent:
            self._spent = True
            self._begin(step)
            return (1 << 64) - 1
        return usual_ns

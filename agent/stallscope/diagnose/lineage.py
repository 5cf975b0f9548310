"""Who is whose child, what part each process plays in the job, and what it was told of the job and lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from stallscope.aggregate.process import Process
from stallscope.aggregate.state import State
from stallscope.wire.kinship import (
    is_forkserver,
    is_launcher,
    is_service,
    is_shell,
    is_spawned,
    is_system,
    looks_python,
)

__all__ = ["HELPER", "LAUNCHER", "TRAINER", "WORKER", "Lineage", "Told"]

LAUNCHER, TRAINER, WORKER, HELPER = "launcher", "trainer", "loader_worker", "helper"
PLACES = ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
DEPTH = 64


class Told(NamedTuple):
    """A variable that came to a process: from whose environment (`proc`), and whether the process has it no longer.

    `lost` None: unknown. `now`: the value that the process gave the variable instead.
    """

    value: str
    proc: int
    lost: bool | None
    now: str | None = None


class Lineage:
    """The family tree of one state; roles are decided once, at the first question."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._table = state.processes.table
        self._children: dict[int | None, list[int]] = defaultdict(list)
        for process in sorted(self._table.values(), key=lambda p: p.order):
            self._children[process.parent].append(process.proc)
        self._roles: dict[int, str] | None = None

    def children(self, proc: int | None) -> list[int]:
        """Keys of its children in the order in which they were met; of None: those whose parents are not known."""
        return self._children.get(proc, [])

    def ancestors(self, proc: int) -> Iterator[Process]:
        """The nearest first."""
        process = self._table.get(proc)
        for _ in range(DEPTH):
            process = self._table.get(process.parent) if process and process.parent is not None else None
            if process is None:
                return
            yield process

    def role(self, proc: int) -> str:
        """launcher, trainer, loader_worker or helper."""
        if self._roles is None:
            self._roles = _Roles(self._state, self).decide()
        return self._roles.get(proc, HELPER)

    def rank(self, proc: int) -> int | None:
        """Its rank in the job; of a trainer's workers and helpers the trainer's."""
        own = self._table[proc].global_rank
        if own is not None or self.role(proc) in (TRAINER, LAUNCHER):
            return own
        return next((one.global_rank for one in self.ancestors(proc) if one.global_rank is not None), None)

    def context(self, proc: int) -> dict[str, Told]:
        """What the environment said of the job, at its exec or at that of the nearest ancestor that had it."""
        found = self._of_itself(proc)
        own = self._state.contexts.table.get(proc)
        is_known = own is not None and own.env is not None and not own.overwritten
        for ancestor in self.ancestors(proc):
            theirs = self._state.contexts.table.get(ancestor.proc)
            if theirs is not None:
                for name, value in {**theirs.own, **(theirs.env or {})}.items():
                    found.setdefault(name, Told(value, ancestor.proc, True if is_known else None))
        return dict(sorted(found.items()))

    def _of_itself(self, proc: int) -> dict[str, Told]:
        own = self._state.contexts.table.get(proc)
        if own is None:
            return {}
        found = {name: Told(value, proc, None if own.overwritten else False) for name, value in own.own.items()}
        is_known = own.seen and not own.overwritten
        for name, value in (own.env or {}).items():
            now = own.own.get(name)
            found[name] = Told(value, proc, (name in own.gone or now is not None) if is_known else None, now)
        return found


class _Roles:
    """Decides by evidence, the strongest first: a communicator, CUDA calls, command lines, the place in the tree."""

    def __init__(self, state: State, lineage: Lineage) -> None:
        self._state, self._lineage = state, lineage
        self._table = state.processes.table
        self._members = {m.proc for c in state.communicators.table.values() for m in c.members}
        self._trainers: set[int] = set()
        self._workers: set[int] = set()

    def decide(self) -> dict[int, str]:
        """By process."""
        processes = sorted(self._table.values(), key=lambda p: p.order)
        self._workers = {p.proc for p in processes if self._is_worker_by_name(p)}
        self._trainers = {p.proc for p in processes if self._computes(p)}
        above = self._above()
        self._trainers |= {p.proc for p in processes if p.proc not in above and self._is_placed(p)}
        self._trainers |= {p.proc for p in processes if self._is_nominated(p)}
        above = self._above()
        return {p.proc: self._role(p, above) for p in processes}

    def _above(self) -> set[int]:
        return {one.proc for proc in self._trainers for one in self._lineage.ancestors(proc)}

    def _parent(self, process: Process) -> Process | None:
        return self._table.get(process.parent) if process.parent is not None else None

    def _is_worker_by_name(self, process: Process) -> bool:
        parent = self._parent(process)
        if is_forkserver(process):  # the first of them is the server
            return parent is not None and is_forkserver(parent)
        return is_spawned(process)

    def _computes(self, process: Process) -> bool:
        if process.proc in self._members:
            return True
        is_using = process.calls() > 0 or process.events > 0 or process.first_cuda_ns is not None
        is_workers = process.proc in self._workers or self._is_forked(process)
        return is_using and not (
            is_workers and any(a.proc in self._members for a in self._lineage.ancestors(process.proc))
        )

    def _is_forked(self, process: Process) -> bool:
        """Python that runs its parent's program on."""
        parent = self._parent(process)
        return parent is not None and looks_python(process) and process.cmdline == parent.cmdline

    def _is_placed(self, process: Process) -> bool:
        """Whether it was given a place in the job that its parent does not have, and has not come to CUDA yet."""
        parent, own = self._parent(process), self._place(process)
        if own is None or is_shell(process) or is_launcher(process) or self._below_trainer(process):
            return False
        if parent is None:  # what is above is out of sight
            return looks_python(process)
        if process.proc in self._workers:  # ranks of torch.multiprocessing: siblings with other places
            return len({self._place(self._table[proc]) for proc in self._lineage.children(parent.proc)} - {None}) > 1
        return own != self._place(parent)

    def _place(self, process: Process) -> tuple[str, ...] | None:
        context = self._state.contexts.table.get(process.proc)
        known = {**(context.env or {}), **context.own} if context else {}
        place = tuple(known.get(name, "") for name in PLACES)
        return place if any(place) else None

    def _is_nominated(self, process: Process) -> bool:
        """Whether workers are its children, and nobody else would be their trainer."""
        if not any(child in self._workers for child in self._lineage.children(process.proc)):
            server = (c for c in self._lineage.children(process.proc) if is_forkserver(self._table[c]))
            if not any(self._lineage.children(one) for one in server):
                return False
        if is_launcher(process) or is_shell(process) or process.proc in self._workers or is_forkserver(process):
            return False
        below = {
            one for child in self._lineage.children(process.proc) for one in (child, *self._lineage.children(child))
        }
        return not below & self._trainers and not self._below_trainer(process)

    def _below_trainer(self, process: Process) -> bool:
        return any(one.proc in self._trainers for one in self._lineage.ancestors(process.proc))

    def _role(self, process: Process, above: set[int]) -> str:
        if process.proc in self._trainers:
            return TRAINER
        if self._below_trainer(process):
            return WORKER if self._works(process) and not is_service(process) else HELPER
        if is_launcher(process) or (is_shell(process) and (process.proc in above or not self._trainers)):
            return LAUNCHER
        starts = any(child in self._trainers for child in self._lineage.children(process.proc))
        return LAUNCHER if starts and not is_system(process) else HELPER

    def _works(self, process: Process) -> bool:
        """Whether a process below a trainer is one of its workers; a title in place of the command line is theirs."""
        if process.proc in self._workers or (self._is_forked(process) and not is_forkserver(process)):
            return True
        context = self._state.contexts.table.get(process.proc)
        return context is not None and context.overwritten and process.parent in self._trainers

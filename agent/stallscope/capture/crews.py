"""Trainers and their workers, as names and the tree tell them while they run, and which pipes are theirs.

What a process is for good, the report decides (diagnose/lineage.py); a crew that is none costs a few looks.
"""

from __future__ import annotations

from collections import deque

from stallscope.capture.target import Target
from stallscope.capture.whereabouts import pipes_of, standard_pipes_of
from stallscope.wire.kinship import is_forkserver, is_launcher, is_service, is_shell, is_spawned, looks_python

__all__ = ["Crew", "Crews"]

MAX_CREWS, MAX_WORKERS = 8, 64
MAX_PIPES = 4096
LET_GO_NS = 60_000_000_000
A_LOOK = 4


class Crew:
    """One trainer.

    `workers`: those that live; `holders`: pipe -> keys of the workers that were seen to hold it. Those that died since
    count, too: their end of it is what tells whom the trainer waits for. So do those that
    closed it up to LET_GO_NS before their end: who ends by himself closes queues first, then runs at-exit handlers.
    """

    def __init__(self, trainer: Target) -> None:
        self.trainer = trainer
        self.workers: dict[int, Target] = {}
        self.holders: dict[int, set[int]] = {}
        self.pipes: set[int] = set()
        self._let_go: dict[int, dict[int, int]] = {}  # worker -> pipe -> when it was first seen without it, ns

    def learn(self, target: Target, now: int) -> None:
        """Which pipes the trainer or a worker holds now."""
        found = pipes_of(target.pid)
        if target is self.trainer:
            # What comes by its standard streams is nobody's data, though spawned workers hold them for a moment.
            self.pipes = found - standard_pipes_of(target.pid)
            return
        if not found:
            return  # it has ended: what it held counts on
        for pipe, procs in self.holders.items():
            if target.proc in procs and pipe not in found:
                procs.discard(target.proc)
                self._let_go.setdefault(target.proc, {})[pipe] = now
        for pipe in found:
            if pipe in self.holders or len(self.holders) < MAX_PIPES:
                self.holders.setdefault(pipe, set()).add(target.proc)

    def ended(self, proc: int, now: int) -> None:
        """A worker is gone."""
        del self.workers[proc]
        for pipe, at_ns in self._let_go.pop(proc, {}).items():
            if now - at_ns < LET_GO_NS and pipe in self.holders:
                self.holders[pipe].add(proc)

    def drop(self, proc: int) -> None:
        """It runs another program now: a forked child that was on the way to its exec."""
        del self.workers[proc]
        self._let_go.pop(proc, None)
        for procs in self.holders.values():
            procs.discard(proc)

    def forget_closed(self) -> None:
        """Pipes that the trainer no longer holds: their numbers may be others' soon."""
        self.holders = {pipe: procs for pipe, procs in self.holders.items() if pipe in self.pipes}


class Crews:
    """`find` at every tick.

    Attributes:
        turned_away: workers that were not looked at because there were too many, by the largest such number.
    """

    def __init__(self) -> None:
        self.by_trainer: dict[int, Crew] = {}
        self.turned_away = 0
        self._next: deque[tuple[int, Target]] = deque()

    def find(self, targets: list[Target], now: int) -> None:
        """Who belongs together now; and look at the pipes of a few, of new ones first."""
        table = {target.proc: target for target in targets}
        pairs = [(trainer, one) for one in targets if (trainer := _trainer_of(one, table)) is not None]
        left_out = 0
        still = {one.proc for _, one in pairs}
        for crew in self.by_trainer.values():
            for proc in [proc for proc in crew.workers if proc not in still]:
                crew.drop(proc) if proc in table else crew.ended(proc, now)
        for trainer, one in pairs:
            left_out += not self._add(trainer, one, now)
        self.turned_away = max(self.turned_away, left_out)
        self.by_trainer = {proc: crew for proc, crew in self.by_trainer.items() if proc in table}
        self._learn(table, now)

    def _add(self, trainer: Target, one: Target, now: int) -> bool:
        crew = self.by_trainer.get(trainer.proc)
        if crew is None:
            if len(self.by_trainer) >= MAX_CREWS:
                return False
            crew = self.by_trainer[trainer.proc] = Crew(trainer)
            crew.learn(trainer, now)
        if one.proc not in crew.workers:
            if len(crew.workers) >= MAX_WORKERS:
                return False
            crew.workers[one.proc] = one
            self._next.appendleft((trainer.proc, one))
        return True

    def _learn(self, table: dict[int, Target], now: int) -> None:
        if not self._next:
            self._next.extend(
                (proc, one) for proc, crew in self.by_trainer.items() for one in (crew.trainer, *crew.workers.values())
            )
        for _ in range(min(A_LOOK, len(self._next))):
            proc, one = self._next.popleft()
            crew = self.by_trainer.get(proc)
            if crew is not None and one.proc in table:
                crew.learn(one, now)
                if one is crew.trainer:
                    crew.forget_closed()


def _trainer_of(one: Target, table: dict[int, Target]) -> Target | None:
    """Whose worker a process may be: by multiprocessing's command lines, or forked to run its parent's program on."""
    parent = table.get(one.parent) if one.parent is not None else None
    if parent is None or is_service(one.facts):
        return None
    if is_forkserver(one.facts):  # the first of them is the server
        server = parent if is_forkserver(parent.facts) else None
        above = table.get(server.parent) if server is not None and server.parent is not None else None
        return above
    is_forked = looks_python(one.facts) and one.facts.cmdline == parent.facts.cmdline
    if not (is_spawned(one.facts) or is_forked) or is_launcher(parent.facts) or is_shell(parent.facts):
        return None
    return parent

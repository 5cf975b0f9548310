"""What workers do and what their trainer waits for, by looks: 50 a second at trainers, 10 at workers, a few at a time.

A look stands for the time since the look before at the same process. Only the main thread counts. A worker is idle
while it waits in a pipe that its trainer holds too, or in a lock; blocked while it waits in anything else. A trainer
starves while it reads or polls a pipe that a worker holds, or waits in a lock while another of its threads does so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from stallscope.capture.crews import Crew, Crews
from stallscope.capture.procfs import threads_of
from stallscope.capture.target import Target
from stallscope.capture.whereabouts import BUSY, Whereabouts, where_is
from stallscope.wire.frames import Kind

__all__ = ["Workers"]

TRAINER_EVERY_NS, WORKER_EVERY_NS = 20_000_000, 100_000_000
# Longer than this between two looks nobody knows what was meanwhile.
MOST_NS = 500_000_000
A_STEP = 32  # looks at workers at a time
MAX_THREADS = 16
MAX_PLACES = 32
LOCKS = ("futex", "futex_waitv", "semop", "semtimedop", "restart_syscall")
READS = ("read", "readv", "poll", "ppoll", "recvfrom", "recvmsg")
BUSY_STATE, IDLE, BLOCKED = "busy", "idle", "blocked"
Send = Callable[[Kind, dict[str, Any]], None]
Place = tuple[str | None, str | None]


class _Seen:
    """Sums over the looks at one process.

    `here`: where it was at the newest one; `places`: by ns, of workers only while their trainer starved.
    """

    def __init__(self, now: int) -> None:
        self.last_ns = self.since_ns = now
        self.looks = self.watched_ns = 0
        self.state = ""
        self.times: Counter[str] = Counter()
        self.charged_ns = 0
        self.here: Place = (None, None)
        self.places: Counter[Place] = Counter()
        self.told: list[Any] | None = None

    def elapsed(self, now: int) -> int:
        """Time that this look stands for, ns."""
        passed, self.last_ns = now - self.last_ns, now
        if not self.looks or passed > MOST_NS:
            passed = 0
        self.looks += 1
        self.watched_ns += passed
        return passed

    def enter(self, state: str, now: int) -> None:
        """`since_ns` is when this state was first seen in a row."""
        if state != self.state:
            self.state, self.since_ns = state, now

    def note(self, place: Place, ns: int) -> None:
        if place in self.places or len(self.places) < MAX_PLACES:
            self.places[place] += ns

    def place(self) -> Place:
        """Where it was longest."""
        return max(self.places, key=lambda place: self.places[place], default=(None, None))


class _Trainer(_Seen):
    """`starved_ns` in `waits` waits or more, the longest of them, and the one under way: whose pipe it is in."""

    def __init__(self, now: int) -> None:
        super().__init__(now)
        self.starved_ns = self.waits = self.longest_ns = 0
        self.wait_ns: int | None = None
        self.waits_for: set[int] = set()
        self.by_thread = False
        self.lock_ns = 0
        self.in_lock = False

    def starve(self, now: int, passed: int) -> None:
        if self.wait_ns is None:
            self.waits += 1
            self.wait_ns = now
            passed //= 2  # it began at any time since the look before
        self.starved_ns += passed
        self.longest_ns = max(self.longest_ns, now - self.wait_ns)

    def sated(self, passed: int) -> None:
        if self.wait_ns is not None:
            self.starved_ns += passed // 2  # it ended at any time since then
        self.wait_ns, self.waits_for = None, set()


class Workers:
    """`find` at every tick, `step` at every look of the loop.

    Args:
        inside: threads (proc, tid) that are inside a hooked call now.
    """

    def __init__(self, send: Send, clock: Callable[[], int], inside: Callable[[], set[tuple[int, int]]]) -> None:
        self._send, self._clock, self._inside = send, clock, inside
        self.crews = Crews()
        self._trainers: dict[int, _Trainer] = {}
        self._workers: dict[int, _Seen] = {}
        self._next_ns = 0

    def find(self, targets: list[Target], now: int) -> None:
        """Whom to look at, and tell what was seen since the tick before."""
        self._tell(now)
        self.crews.find(targets, now)
        there = {target.proc for target in targets}
        self._trainers = {proc: seen for proc, seen in self._trainers.items() if proc in self.crews.by_trainer}
        self._workers = {proc: seen for proc, seen in self._workers.items() if proc in there}

    def step(self) -> None:
        """Look at who is due."""
        now = self._clock()
        if now < self._next_ns or not self.crews.by_trainer:
            return
        self._next_ns = now + TRAINER_EVERY_NS
        left = A_STEP
        for crew in self.crews.by_trainer.values():
            self._look_at_trainer(crew, now)
            for one in crew.workers.values():
                seen = self._workers.setdefault(one.proc, _Seen(now))
                if left and (not seen.looks or now - seen.last_ns >= WORKER_EVERY_NS):
                    left -= 1
                    self._look_at_worker(crew, one, seen, now)

    def _look_at_trainer(self, crew: Crew, now: int) -> None:
        seen = self._trainers.setdefault(crew.trainer.proc, _Trainer(now))
        where = where_is(crew.trainer.pid, crew.trainer.pid)
        if where is None:
            return
        passed = seen.elapsed(now)
        if not self._is_starving(crew, seen, where, now):
            seen.sated(passed)
            return
        seen.starve(now, passed)
        for proc in crew.workers:
            worker = self._workers.get(proc)
            if worker is not None and worker.state in (BUSY_STATE, BLOCKED):
                worker.charged_ns += passed
                worker.note(worker.here, passed)

    def _is_starving(self, crew: Crew, seen: _Trainer, where: Whereabouts, now: int) -> bool:
        if where.syscall in READS:
            seen.waits_for = _holders(crew, where)
            seen.by_thread = False
            if seen.waits_for:
                seen.note((where.syscall, next(iter(where.files), None)), 1)
            return bool(seen.waits_for)
        if where.syscall not in LOCKS:
            return False
        if now - seen.lock_ns >= WORKER_EVERY_NS:  # dear: asked ten times a second
            seen.lock_ns = now
            seen.waits_for = self._by_thread(crew)
            seen.in_lock = bool(seen.waits_for)
        seen.by_thread = True
        return seen.in_lock

    def _by_thread(self, crew: Crew) -> set[int]:
        """Whose pipe another thread of the trainer is in, while no hooked call holds the main thread up."""
        pid, found = crew.trainer.pid, set()
        if (crew.trainer.proc, pid) in self._inside():
            return set()
        for tid in threads_of(pid)[:MAX_THREADS]:
            where = where_is(pid, tid) if tid != pid else None
            if where is not None and where.syscall in READS:
                found |= _holders(crew, where)
        return found

    def _look_at_worker(self, crew: Crew, one: Target, seen: _Seen, now: int) -> None:
        where = where_is(one.pid, one.pid)
        if where is None:
            return
        passed = seen.elapsed(now)
        seen.enter(_state_of(crew, where), now)
        seen.times[seen.state] += passed
        seen.here = where.syscall, next(iter(where.files), None)

    def _tell(self, now: int) -> None:
        trainers, workers = [], []
        for crew in self.crews.by_trainer.values():
            trainer = self._trainers.get(crew.trainer.proc)
            if trainer is not None and trainer.looks:
                trainers.append(_trainer_row(crew.trainer.proc, trainer))
            for proc in crew.workers:
                seen = self._workers.get(proc)
                row = _worker_row(proc, crew.trainer.proc, seen) if seen is not None and seen.looks else None
                if seen is not None and row is not None and row != seen.told:
                    seen.told = row
                    workers.append(row)
        if trainers or workers:
            self._send(Kind.CREW, {"at_ns": now, "trainers": trainers, "workers": workers})


def _holders(crew: Crew, where: Whereabouts) -> set[int]:
    return {proc for pipe in where.pipes & crew.pipes for proc in crew.holders.get(pipe, ())}


def _state_of(crew: Crew, where: Whereabouts) -> str:
    if where.syscall == BUSY:
        return BUSY_STATE
    return IDLE if where.syscall in LOCKS or where.pipes & crew.pipes else BLOCKED


def _trainer_row(proc: int, seen: _Trainer) -> list[Any]:
    syscall, file = seen.place()
    return [proc, seen.looks, seen.watched_ns, seen.starved_ns, seen.waits, seen.longest_ns, seen.wait_ns,
            sorted(seen.waits_for), seen.by_thread, syscall, file]  # fmt: skip


def _worker_row(proc: int, trainer: int, seen: _Seen) -> list[Any]:
    syscall, file = seen.place()
    times = [seen.times[state] for state in (BUSY_STATE, IDLE, BLOCKED)]
    return [proc, trainer, seen.looks, *times, seen.charged_ns, seen.state, seen.since_ns, syscall, file]

"""Our own capture without its session: programs, maps and links of one backend, and the thread that drains."""

from __future__ import annotations

import os
import select
import struct
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

from stub_library import StubLibrary

from stallscope.capture.links import RawTracepoint, UprobeLink, close_all
from stallscope.capture.loader import load
from stallscope.capture.loop import POLL_MS, ROUNDS
from stallscope.capture.session import BATCH_RECORDS, Settings
from stallscope.capture.sharing import program_of
from stallscope.capture.tables import Tables
from stallscope.wire.hook_table import BY_NAME, Hook

__all__ = ["Counted", "Drainer", "Tracer", "Use", "program_times", "records_of"]

_COUNT = struct.Struct("<8Q")
_LIMIT_SECONDS = 60.0


class Use(NamedTuple):
    """One function of the stub library probed as if it were this hook.

    `threshold` is the sampling threshold of the hook: 0 = no records, 2**32 - 1 = all.
    """

    function: int
    hook: str
    threshold: int


class Counted(NamedTuple):
    """Of one hook."""

    calls: int
    lost: int
    sampled_out: int


class Tracer:
    """Programs and maps of one backend, for one process.

    Args:
        backend: "bcc" or "object".
        pid: the process that is traced.
    """

    def __init__(self, backend: str, pid: int) -> None:
        self.loaded = load(backend, seconds=_LIMIT_SECONDS)
        self.tables = Tables(self.loaded.maps, Settings([pid]))
        self.pid = pid
        slot = self.tables.slots.claim(pid)
        assert slot is not None
        self.slot = slot
        self.tables.procs.add(pid, slot, follow=False)
        self._entries: list[UprobeLink] = []
        self._returns: list[UprobeLink] = []
        self._tracepoints: list[RawTracepoint] = []

    def link(self, library: StubLibrary, uses: Sequence[Use]) -> None:
        """Link as the product does: one link for each program, returns first."""
        hooks = [(BY_NAME[use.hook], library.offsets[use.function]) for use in uses]
        for use in uses:
            self.tables.conf.set(BY_NAME[use.hook].id, use.threshold)
        pairs = [x for x in hooks if x[0].mode == "PAIR"]
        if pairs:
            self._returns.append(self._attach("pair_return", library, pairs, is_return=True))
        for name in ("launch", "enter"):
            chosen = [x for x in hooks if program_of(x[0]) == name]
            if chosen:
                self._entries.append(self._attach(name, library, chosen, is_return=False))

    def _attach(
        self, name: str, library: StubLibrary, points: list[tuple[Hook, int]], *, is_return: bool
    ) -> UprobeLink:
        program = self.loaded.programs[name]
        offsets, cookies = [at for _, at in points], [hook.cookie for hook, _ in points]
        return UprobeLink.attach(program, str(library.path), offsets, cookies, self.pid, is_return)

    def link_tracepoints(self) -> None:
        """Forks, execs and exits, as a session has them."""
        for program, tracepoint in self.loaded.tracepoints.items():
            self._tracepoints.append(RawTracepoint.attach(self.loaded.programs[program], tracepoint))

    def unlink(self) -> None:
        """Take all probes away."""
        close_all(self._entries, self._returns)
        close_all(self._tracepoints, [])
        self._entries, self._returns, self._tracepoints = [], [], []

    def counted(self) -> dict[int, Counted]:
        """By hook id, what changed since the last look; cumulative values."""
        changes = self.tables.counters.changed(self.slot)
        rows = _COUNT.iter_unpack(changes.counts)
        return {hook: Counted(row[0], row[3], row[4]) for hook, row in zip(changes.hooks, rows, strict=True)}

    def close(self) -> None:
        """Unlink and let everything go."""
        self.unlink()
        self.tables.close()
        self.loaded.close()

    def __enter__(self) -> Tracer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def records_of(tables: Tables) -> int:
    """Drain both rings as a session's look does; how many records came."""
    total = 0
    for ring in (tables.vital, tables.bulk):
        for _ in range(ROUNDS):
            drained = ring.drain(BATCH_RECORDS)
            if not drained.n_recs and not drained.n_uids:
                break
            total += drained.n_recs + drained.n_uids
    return total


class Drainer:
    """Drains the rings of some tracers in a thread, in the rhythm of a session.

    Args:
        core: the CPU the thread runs on; None = any.
    """

    def __init__(self, tracers: Sequence[Tracer], core: int | None) -> None:
        self._tracers = tracers
        self._core = core
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.records = 0

    def _run(self) -> None:
        if self._core is not None:
            os.sched_setaffinity(0, {self._core})
        poller = select.poll()
        for tracer in self._tracers:
            poller.register(tracer.tables.vital.fileno(), select.POLLIN)
        while not self._stop.is_set():
            poller.poll(POLL_MS)
            self.records += sum(records_of(tracer.tables) for tracer in self._tracers)

    def __enter__(self) -> Drainer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self.records += sum(records_of(tracer.tables) for tracer in self._tracers)


def _run_stats(fd: int) -> tuple[int, int]:
    with open(f"/proc/self/fdinfo/{fd}") as file:
        found = dict(line.split(":", 1) for line in file if ":" in line)
    return int(found["run_time_ns"]), int(found["run_cnt"])


def program_times(programs: dict[str, int], action: Callable[[], object]) -> dict[str, float]:
    """Mean ns per run of each program that ran during the action; needs kernel.bpf_stats_enabled=1."""
    before = {name: _run_stats(fd) for name, fd in programs.items()}
    action()
    after = {name: _run_stats(fd) for name, fd in programs.items()}
    deltas = {name: (after[name][0] - before[name][0], after[name][1] - before[name][1]) for name in programs}
    return {name: time / runs for name, (time, runs) in deltas.items() if runs}

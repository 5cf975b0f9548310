"""The steps of a job without its help: how many, how long, which of them were not as usual, and in what."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.issuer import Issuer
from stallscope.aggregate.process import Process
from stallscope.aggregate.state import State
from stallscope.aggregate.tape import NCCL, THROTTLES
from stallscope.diagnose.stepledger import Ledger, Run, Slow
from stallscope.diagnose.steptrack import LOG, Track
from stallscope.diagnose.stepwords import differences, named, slow_words

__all__ = ["Part", "Range", "SlowStep", "Steps", "StepsFound"]

Array = NDArray[Any]
MOST_RANGES = 32
MOST_SLOW = 8
RECURS = 3
IDLE_TIMES = 3
LEAST_MARKS = 6
MOST_MARKS = 2048
OTHER_SHARE = 0.07
BEFORE, BEFORE_SHARE = 4, 0.05
POLLS = ("cudaEventQuery", "cuEventQuery", "cudaStreamQuery", "cuStreamQuery")


class Range(NamedTuple):
    """Steps that were not as usual.

    Attributes:
        first, last: numbers, from 1 on; every: they come back after so many steps, one at a time, else None.
        number: how many of them are meant.
        launches: kernels launched a step, about; None where not known.
        says: in words, e.g. "no ncclAllReduce"; procs: whose.
    """

    first: int
    last: int
    number: int
    every: int | None
    from_ns: int
    to_ns: int
    says: str
    launches: float | None
    procs: tuple[int, ...]


class SlowStep(NamedTuple):
    """One of the slowest steps, and why."""

    proc: int
    step: int
    at_ns: int
    duration_ns: int
    usual_ns: int
    says: str


class Part(NamedTuple):
    """The steps of one process.

    Attributes:
        number_is: None where it is exact, else "lower_bound" or "estimated".
        mark: the call that each has one of.
        launches: kernels launched in a usual step, about.
        edges_sure: whether it is certain with which call they end; else ranges may be off by one.
        before: kernels launched before the first step, about, where they are so many that there may have been others.
        unclassified: steps that were counted, but of which nobody can say any more what was done in them.
    """

    proc: int
    number: int
    number_is: str | None
    p50_ns: int | None
    p99_ns: int | None
    first_ns: int
    last_ns: int
    mark: str
    from_start: bool
    launches: float | None
    edges_sure: bool
    before: int
    unclassified: int


@dataclass
class StepsFound:
    """What the report says of steps: of one process that stands for the job (`parts[0]`), then of all."""

    parts: list[Part]
    ranges: list[Range] = field(default_factory=list)
    ranges_left_out: int = 0
    slow: list[SlowStep] = field(default_factory=list)


class Steps:
    """Call `step` after each tick. Never reads a clock: a replay finds the same."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._tracks: dict[int, Track] = {}
        hooks = state.hooks
        self._launch = {h.id for h in hooks.by_id.values() if h.kind == "launch"}
        self._marks: dict[int, list[tuple[int, int]]] = defaultdict(list)
        often = (*THROTTLES, *POLLS)
        self._wait = {h.id for h in hooks.by_id.values() if h.kind == "wait" and h.name not in often}
        self._copy = {h.id for h in hooks.by_id.values() if h.kind == "copy"}

    def step(self, now: int) -> None:
        """Take what was done up to now; fold one long track, or those that are far too long."""
        has_folded = False
        for proc, issuer in self._state.operations.issuers.items():
            if len(issuer.tape):
                self._take(proc, issuer, now)
            track = self._tracks.get(proc)
            if track is None:
                continue
            self._mark(issuer.process, now)
            if track.is_full() and (not has_folded or len(track) > 2 * LOG):
                track.fold(self._host_calls(issuer))
                has_folded = True

    def _take(self, proc: int, issuer: Issuer, now: int | None) -> None:
        tokens = issuer.tape.take(now)
        if proc not in self._tracks:
            if self._state.overflow.full("processes with steps", len(self._tracks)):
                return
            self._tracks[proc] = Track()
        track = self._tracks[proc]
        track.from_start = self._from_start(issuer)
        track.add(tokens)

    def _from_start(self, issuer: Issuer) -> bool:
        """Whether nothing of the process's loop can have been before the capture."""
        capture, process = self._state.capture, issuer.process
        if capture is None or process.start_ns >= capture.start_mono_ns:
            return capture is not None
        places = [*issuer.places.values(), *issuer.old_places]
        return bool(places) and all(place.how == "exact" for place in places)

    def _mark(self, process: Process, now: int) -> None:
        """How many kernels had been launched by now: the counters are exact, however few launches are recorded."""
        marks, calls = self._marks[process.proc], self._calls(process, self._launch)
        if marks and marks[-1][1] == calls:
            return
        marks.append((now, calls))
        if len(marks) >= MOST_MARKS:
            del marks[1::2]

    def _launched(self, proc: int) -> tuple[Array, Array]:
        """Instants, and launches by then."""
        found = np.array(self._marks[proc], np.int64).reshape(-1, 2)
        return found[:, 0], found[:, 1]

    def _host_calls(self, issuer: Issuer) -> int:
        """Waits, and copies from or to the host, about."""
        copies = issuer.tape.host_copies(self._calls(issuer.process, self._copy))
        return self._calls(issuer.process, self._wait) + copies

    def _calls(self, process: Process, hooks: set[int]) -> int:
        """Outermost calls of some functions."""
        return sum(row.calls - row.nested for hook, row in process.counts.items() if hook in hooks)

    def found(self) -> StepsFound | None:
        """What is known by now; None where no process has steps."""
        whole: dict[int, Track] = {}
        for proc, track in self._tracks.items():
            issuer = self._state.operations.issuers[proc]
            self._take(proc, issuer, None)
            closed = track.closed(self._host_calls(issuer), is_end=self._is_over(issuer.process, track))
            if closed.anchor is not None and closed.ledger.count:
                whole[proc] = closed
        if not whole:
            return None
        parts = [self._part(proc, track) for proc, track in whole.items()]
        parts.sort(key=self._stands_for_all)
        found = StepsFound(parts)
        self._ranges(found, whole)
        slow = [(one, proc, track.ledger) for proc, track in whole.items() for one in track.ledger.slow]
        # Ranks wait for one another: who was slow without having waited comes first.
        slow.sort(key=lambda row: (row[0].key is not None, -row[0].ns, row[1]))
        by_step = {one.step: (one, proc, ledger) for one, proc, ledger in reversed(slow)}
        longest = sorted(by_step.values(), key=lambda row: (-row[0].ns, row[0].step))[:MOST_SLOW]
        found.slow = [self._slow(proc, ledger, one) for one, proc, ledger in longest]
        return found

    def _is_over(self, process: Process, track: Track) -> bool:
        if process.exit is not None:
            return True
        last, p50 = track.newest_ns(), track.ledger.percentile_ns(0.5)
        return p50 is not None and last is not None and self._state.now_ns - last > IDLE_TIMES * p50

    def _stands_for_all(self, part: Part) -> tuple[object, ...]:
        process = self._state.processes.table[part.proc]
        rank = process.global_rank
        return (-part.number, part.number_is is not None, rank is None, rank or 0, process.order)

    def _part(self, proc: int, track: Track) -> Part:
        ledger, anchor = track.ledger, track.anchor
        assert anchor is not None and ledger.first_ns is not None and ledger.last_ns is not None
        issuer = self._state.operations.issuers[proc]
        launches = self._launches(proc, [run for run in ledger.runs if run.what == ledger.usual()])
        before = self._before(proc, ledger)
        number_is = self._count_is(issuer, track) or ("lower_bound" if before else None)
        return Part(
            proc, ledger.count, number_is, ledger.percentile_ns(0.5), ledger.percentile_ns(0.99),
            ledger.first_ns, ledger.last_ns, self._mark_name(issuer, track), track.from_start,
            launches, anchor.edges_sure and not track.eras and not track.unsure, before, ledger.left_out,
        )  # fmt: skip

    def _before(self, proc: int, ledger: Ledger) -> int:
        """Kernels launched before the first step, about; 0 where they are not more than some steps launch."""
        at_ns, calls = self._launched(proc)
        assert ledger.first_ns is not None and ledger.last_ns is not None
        at_ns = np.minimum(at_ns, ledger.last_ns)  # hardly anything is launched behind the last step
        inside = np.flatnonzero((at_ns >= ledger.first_ns) & (at_ns <= ledger.last_ns))
        if len(inside) < 2:
            return 0
        stamps = [ns for run in ledger.runs for ns in (run.from_ns, run.to_ns)]
        numbers = [number for run in ledger.runs for number in (run.first - 1, run.last)]
        steps = np.interp(at_ns[inside[[0, -1]]], stamps, numbers)
        first, last = calls[inside[[0, -1]]].tolist()
        in_a_step = (last - first) / max(1.0, float(steps[1] - steps[0]))
        before = int(first - in_a_step * float(steps[0]))
        return before if before > max(BEFORE * in_a_step, BEFORE_SHARE * (last - before)) else 0

    def _mark_name(self, issuer: Issuer, track: Track) -> str:
        assert track.anchor is not None
        meaning = issuer.tape.meaning.get(track.anchor.key)
        return named(self._state, meaning) if meaning else "a call"

    def _count_is(self, issuer: Issuer, track: Track) -> str | None:
        places = [*issuer.places.values(), *issuer.old_places]
        is_lost = issuer.missing or issuer.tape.dropped or track.dropped or any(place.missed for place in places)
        ended = self._state.complete and self._state.dropped is None
        waits = sum(
            row.lost + row.filtered for hook, row in issuer.process.counts.items() if hook in self._wait | self._copy
        )
        is_blind = track.in_front or track.anchor is None or track.anchor.kind != NCCL
        if is_blind and self._linked_late(issuer.process.proc):
            return "lower_bound"
        if is_lost or not ended or (waits and track.anchor is not None and track.anchor.kind != NCCL):
            return "lower_bound"
        return "estimated" if track.unsure else None

    def _linked_late(self, proc: int) -> bool:
        """Whether waits may have been made before their functions were linked: nobody counted those."""
        gaps = [*self._state.blind.get(proc, ()), *self._state.blind.get(None, ())]
        return any(hooks is None or hooks & self._wait for hooks in gaps)

    def _launches(self, proc: int, runs: list[Run]) -> float | None:
        """Kernels launched in a step of some runs, where they were long enough to tell."""
        at_ns, calls = self._launched(proc)
        if not len(at_ns):
            return None
        begins, ends = (np.array([run[index] for run in runs], np.int64) for index in (3, 4))
        from_ns, to_ns = np.maximum(begins, at_ns[0]), np.minimum(ends, at_ns[-1])
        seen = to_ns > from_ns
        if (np.searchsorted(at_ns, to_ns) - np.searchsorted(at_ns, from_ns))[seen].sum() < LEAST_MARKS:
            return None
        steps = np.array([run.last - run.first + 1 for run in runs]) * (
            (to_ns - from_ns) / np.maximum(1, ends - begins)
        )
        made = np.interp(to_ns, at_ns, calls) - np.interp(from_ns, at_ns, calls)
        return round(float(made[seen].sum()) / float(steps[seen].sum()), 1)

    def _ranges(self, found: StepsFound, whole: dict[int, Track]) -> None:
        merged: dict[tuple[object, ...], Range] = {}
        for part in found.parts:
            for one in self._ranges_of(part, whole[part.proc].ledger):
                key = (one.first, one.last, one.number, one.every, one.says)
                known = merged.get(key, one)
                merged[key] = known._replace(procs=tuple(dict.fromkeys((*known.procs, *one.procs))))
        ranges = sorted(merged.values(), key=lambda one: (-one.number, one.first, one.procs))
        found.ranges_left_out = max(0, len(ranges) - MOST_RANGES)
        found.ranges = sorted(ranges[:MOST_RANGES], key=lambda one: (one.first, -one.last, one.procs))

    def _ranges_of(self, part: Part, ledger: Ledger) -> list[Range]:
        usual = ledger.usual()
        blocks = _blocks([run for run in ledger.runs if run.what != usual])
        alone: dict[int, list[Run]] = defaultdict(list)
        for block in blocks:
            if len(block) == 1 and block[0].first == block[0].last:
                alone[block[0].what].append(block[0])
        found = []
        for what, runs in alone.items():
            if len(runs) >= RECURS:
                every = int(np.median(np.diff([run.first for run in runs])))
                found.append(self._range(part, ledger, [runs[0], runs[-1]], what, len(runs), every))
        again = {what for what, runs in alone.items() if len(runs) >= RECURS}
        for block in blocks:
            if len(block) > 1 or block[0].what not in again or block[0].first != block[0].last:
                largest = max(block, key=lambda run: sum(r.last - r.first + 1 for r in block if r.what == run.what))
                found.append(self._range(part, ledger, block, largest.what, block[-1].last - block[0].first + 1, None))
        return found

    def _range(
        self, part: Part, ledger: Ledger, runs: list[Run], what: int, count: int, every: int | None
    ) -> Range:  # fmt: skip
        first, last = runs[0], runs[-1]
        whole = first._replace(last=last.last, to_ns=last.to_ns)
        launches = self._launches(part.proc, [whole]) if every is None else None
        issuer = self._state.operations.issuers[part.proc]
        usual = ledger.usual()
        assert usual is not None
        says = differences(self._state, issuer.tape.meaning, ledger.kinds.get(what), ledger.kinds[usual])
        if (
            launches is not None
            and part.launches is not None
            and abs(launches - part.launches) > OTHER_SHARE * part.launches
        ):
            says += f", about {launches:g} kernels launched a step instead of {part.launches:g}"
        return Range(first.first, last.last, count, every, first.from_ns, last.to_ns, says, launches, (part.proc,))

    def _slow(self, proc: int, ledger: Ledger, one: Slow) -> SlowStep:
        issuer = self._state.operations.issuers[proc]
        usual = ledger.usual()
        assert usual is not None
        says = slow_words(self._state, issuer.tape.meaning, one, ledger.kinds.get(one.what), ledger.kinds[usual])
        return SlowStep(proc, one.step, one.at_ns, one.ns, one.usual_ns, says)


def _blocks(runs: list[Run]) -> list[list[Run]]:
    """Runs that follow one another directly, together."""
    blocks: list[list[Run]] = []
    for run in runs:
        if blocks and blocks[-1][-1].last + 1 == run.first:
            blocks[-1].append(run)
        else:
            blocks.append([run])
    return blocks

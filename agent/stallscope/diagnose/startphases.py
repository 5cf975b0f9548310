"""What a trainer did between its exec and its first steady step, as far as frames tell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from stallscope.aggregate.hooks import COMM_CREATORS
from stallscope.aggregate.process import Link, Process
from stallscope.aggregate.state import State
from stallscope.diagnose.spans import Span, covered
from stallscope.diagnose.steps import StepsFound
from stallscope.wire.kinship import looks_python

__all__ = ["Phase", "phases", "steady_ns"]

MOST_TRAINERS = 16


class Phase(NamedTuple):
    """One part of a trainer's start-up.

    Attributes:
        what: imports, first_cuda_call, context, communicators, first_launch, warm_up, first_steady_step.
        at_ns, ns: begin and duration, None where not known; `why` says why not, or what the number means.
        ns_is: None where exact, else "estimated" or "lower_bound"; at_is: the same of the begin.
    """

    proc: int
    what: str
    at_ns: int | None
    ns: int | None
    at_is: str | None = None
    ns_is: str | None = None
    why: str | None = None


class Steady(NamedTuple):
    """Steps 1 to `before` are warm-up; it ends at `at_ns`."""

    before: int
    at_ns: int
    is_exact: bool
    step_ns: int | None


def steady_ns(trainers: Iterable[Process], steps: StepsFound | None) -> int | None:
    """When the last trainer with steps reached its steady state; None where that was not seen."""
    found = [one.at_ns for p in trainers if (one := _steady(p, steps)) is not None]
    return max(found, default=None)


def _steady(process: Process, steps: StepsFound | None) -> Steady | None:
    part = next((one for one in steps.parts if one.proc == process.proc), None) if steps else None
    if steps is None or part is None or not part.from_start:
        return None
    before, at_ns = 1, part.first_ns  # of the first step only the end is known
    moved = True
    while moved:
        moved = False
        for one in steps.ranges:
            if process.proc in one.procs and one.every is None and one.first <= before + 1 and one.last > before:
                before, at_ns, moved = one.last, one.to_ns, True
        for slow in steps.slow:
            if slow.proc == process.proc and slow.step == before + 1:
                before, at_ns, moved = slow.step, slow.at_ns, True
    return Steady(before, at_ns, part.edges_sure and part.number_is is None, part.p50_ns)


def phases(state: State, trainers: list[Process], steps: StepsFound | None) -> list[Phase]:
    """Of the first trainers, each in the order of time."""
    chosen = sorted(trainers, key=lambda p: (p.global_rank is None, p.global_rank or 0, p.order))[:MOST_TRAINERS]
    return [row for p in chosen for row in _Phases(state, p, _steady(p, steps)).rows()]


class _Phases:
    def __init__(self, state: State, process: Process, steady: Steady | None) -> None:
        self._state, self._process, self._steady = state, process, steady
        programs = state.beginnings.programs.get(process.proc, [])
        self._exec_ns = programs[-1].at_ns if programs else process.start_ns
        start = state.capture.start_mono_ns if state.capture else 0
        firsts = [link for link in process.links if link.library != "NCCL"]
        first = min(firsts, key=lambda link: link.at_ns, default=None)
        # A library that was there already appears, by its frame, when it is linked.
        self._was_seen = self._exec_ns >= start or (first is not None and first.appeared_ns < first.at_ns)
        self._is_whole = self._exec_ns >= start
        self._sure = not any(gap.proc in (None, process.proc) for gap in state.gaps)

    def rows(self) -> list[Phase]:
        """All of them; what the capture came too late for has no numbers."""
        if not self._was_seen:
            why = "CUDA was there before the capture began"
            names = ("imports", "first_cuda_call", "context", "communicators", "first_launch")
            return [Phase(self._process.proc, name, None, None, why=why) for name in names] + self._steps()
        return [self._imports(), *self._first_call(), self._communicators(), self._first_launch(), *self._steps()]

    def _row(self, what: str, at_ns: int | None, ns: int | None, *, at_is: str | None = None, ns_is: str | None = None,
             why: str | None = None) -> Phase:  # fmt: skip
        return Phase(self._process.proc, what, at_ns, ns, at_is, ns_is, why)

    def _mapped_ns(self) -> int | None:
        """When the first CUDA library was mapped; a shim only tells of its first call."""
        links: list[Link] = [link for link in self._process.links if link.library != "NCCL" and not link.by_shim]
        return min((link.appeared_ns for link in links), default=None)

    def _imports(self) -> Phase:
        name = "imports" if looks_python(self._process) else "loading"
        mapped, first = self._mapped_ns(), self._process.first_cuda_ns
        end = mapped if mapped is not None else first
        if end is None:
            return self._row(name, self._exec_ns, None, why="no CUDA library has been mapped")
        why = "until the first CUDA library was mapped" if mapped is not None else "until the first CUDA call"
        # Under `run` an exec is noticed at the next look at /proc.
        is_late = self._process.source != "bpf" and len(self._state.beginnings.programs.get(self._process.proc, [])) > 1
        about = "estimated" if is_late or not self._is_whole else None
        return self._row(name, self._exec_ns, max(0, end - self._exec_ns), at_is=about, ns_is=about, why=why)

    def _first_call(self) -> list[Phase]:
        at_ns, call = self._process.first_cuda_ns, self._process.first_cuda_call
        if at_ns is None or call is None:
            return [self._row("first_cuda_call", None, None, why="no CUDA call was seen")]
        hook, is_exact = self._state.hooks.get(call[0]), None if self._sure else "estimated"
        took = call[1] if self._sure and hook.timed and call[1] else None
        unseen = None if self._sure else "there may have been calls before, which were not seen"
        first = self._row("first_cuda_call", at_ns, took, at_is=is_exact, why=unseen or hook.name)
        why = f"made inside the first call ({hook.name})" if took else unseen or f"{hook.name} is not timed"
        return [first, self._row("context", at_ns, took, at_is=is_exact, ns_is="estimated" if took else None, why=why)]

    def _communicators(self) -> Phase:
        """Creations of all threads together; of many the longest ones are known one by one."""
        spans, calls, total = [], 0, 0
        for number, facts in self._state.hooks.by_id.items():
            if facts.name in COMM_CREATORS and number in self._process.counts:
                calls += self._process.counts[number].calls
                longest = self._process.longest.get(number, [])
                spans += [Span(at, at + ns) for ns, at in longest]
                total += len(longest)
        if not spans:
            members = (m.proc for comm in self._state.communicators.table.values() for m in comm.members)
            unseen = "created before they could be seen" if self._process.proc in members else "none was created"
            return self._row("communicators", None, None, why="none has returned" if calls else unseen)
        is_all = total == calls
        why = f"{calls} created" if calls > 1 else "1 created"
        at_ns = min(span.from_ns for span in spans)
        return self._row(
            "communicators", at_ns, covered(spans), at_is=None if is_all else "estimated",
            ns_is=None if is_all else "lower_bound", why=why,
        )  # fmt: skip

    def _first_launch(self) -> Phase:
        at_ns = self._process.first_launch_ns
        if at_ns is None:
            return self._row("first_launch", None, None, why="no launch was seen")
        return self._row("first_launch", at_ns, None, at_is=None if self._sure else "estimated",
                         why="launches are not timed")  # fmt: skip

    def _steps(self) -> list[Phase]:
        steady, launch = self._steady, self._process.first_launch_ns
        if steady is None:
            why = "no first step was seen"
            return [self._row("warm_up", launch if self._was_seen else None, None, why=why),
                    self._row("first_steady_step", None, None, why=why)]  # fmt: skip
        about = None if steady.is_exact else "estimated"
        known = launch is not None and self._was_seen
        took = steady.at_ns - launch if known and launch is not None else None
        words = "step 1" if steady.before == 1 else f"steps 1 to {steady.before}"
        return [
            self._row("warm_up", launch if known else None, took, ns_is=about, why=f"{words}, since the first launch"),
            self._row("first_steady_step", steady.at_ns, steady.step_ns, at_is=about, ns_is="estimated",
                      why=f"step {steady.before + 1}"),
        ]  # fmt: skip

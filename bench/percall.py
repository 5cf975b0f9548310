"""Cost of one probed call, as a multiple of what bpftrace's latency histogram costs on the same function.

Every variant sits on a function of its own; all are attached at once and called in rounds, forward and then backward.
What counts is the median over the rounds of (variant - bare) / (bpftrace - bare): the machine's speed cancels out.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bpftrace import Bpftrace
from driver import Driver
from figures import Figure, of
from stub_library import StubLibrary
from tracer import Counted, Drainer, Tracer, Use, program_times

from stallscope.wire.hook_table import BY_NAME

__all__ = ["BARE", "BPFTRACE", "Effort", "Variant", "measure", "program_ns", "rounds_of", "variants"]

ALL, NONE, ONE_IN_100 = 0xFFFFFFFF, 0, (1 << 32) // 100
BARE, BPFTRACE = 0, 1
# Each hook has one sampling threshold, so that variants of one shape need hooks of their own.
SHAPES = (
    ("launch, counted only", "cudaLaunchKernel_ptsz", NONE, 0.45),
    ("launch, record 1 in 100", "cudaLaunchCooperativeKernel", ONE_IN_100, None),
    ("launch, a record a call", "cudaLaunchKernel", ALL, None),
    ("driver launch, counted only", "cuLaunchKernel", NONE, None),
    ("wait pair, counters only", "cudaStreamSynchronize_ptsz", NONE, None),
    ("wait pair, a record a call", "cudaStreamSynchronize", ALL, 0.85),
    ("NCCL pair, 2 records", "ncclAllReduce", ALL, 0.95),
)


class Effort(NamedTuple):
    """How long to measure: rounds, windows a visit, calls a window."""

    rounds: int
    windows: int
    calls: int


class Variant(NamedTuple):
    """One shape with one backend."""

    name: str
    backend: str
    use: Use
    bar: float | None


def variants(backends: Sequence[str]) -> list[Variant]:
    """All that is measured beside bare and bpftrace."""
    found: list[Variant] = []
    for name, hook, threshold, bar in SHAPES:
        for backend in backends:
            use = Use(2 + len(found), hook, threshold)
            found.append(Variant(f"{name} [{backend}]", backend, use, bar))
    return found


@contextlib.contextmanager
def _attached(driver: Driver, library: StubLibrary, chosen: Sequence[Variant]) -> Iterator[dict[str, Tracer]]:
    with contextlib.ExitStack() as stack:
        tracers = {b: stack.enter_context(Tracer(b, driver.pid)) for b in dict.fromkeys(v.backend for v in chosen)}
        for backend, tracer in tracers.items():
            tracer.tables.ranges.set(tracer.slot, [(0x1000, 0x2000)])  # there is a runtime, and it is not the caller
            tracer.link(library, [v.use for v in chosen if v.backend == backend])
        for variant in chosen:
            if not driver.wait_probed(variant.use.function, 1):
                raise RuntimeError(f"{variant.name}: no breakpoint in the driver")
        yield tracers


def rounds_of(driver: Driver, functions: Sequence[int], effort: Effort) -> Iterator[dict[int, float]]:
    """ns per call by function, for each round; the first one warms up and is not given out."""
    for index in range(effort.rounds + 1):
        forward = {f: driver.measure(f, effort.calls, effort.windows) for f in functions}
        backward = {f: driver.measure(f, effort.calls, effort.windows) for f in reversed(functions)}
        if index:
            yield {f: (forward[f] + backward[f]) / 2 for f in functions}


def measure(driver: Driver, library: StubLibrary, backends: Sequence[str], effort: Effort, core: int) -> list[Figure]:
    """The figures of all variants; bare and bpftrace first. `core`: where bpftrace and the draining thread run."""
    chosen = variants(backends)
    functions = [BARE, BPFTRACE, *(v.use.function for v in chosen)]
    with _attached(driver, library, chosen) as tracers, Bpftrace(driver, library, BPFTRACE, core) as other:
        if driver.probed(BARE):
            raise RuntimeError("something is on the function that shall be bare")
        with Drainer(list(tracers.values()), core):
            rounds = list(rounds_of(driver, functions, effort))
        counted = {backend: tracer.counted() for backend, tracer in tracers.items()}
        figures = _references(rounds, other.stop(), driver.calls[BPFTRACE])
    for v in chosen:
        got = counted[v.backend].get(BY_NAME[v.use.hook].id, Counted(0, 0, 0))
        figures.append(_figure(v, rounds, _faults(v, got, driver.calls[v.use.function])))
    return figures


def _faults(variant: Variant, got: Counted, made: int) -> list[str]:
    """Why the figure would be of something else than it says."""
    faults = []
    if got.calls != made:
        faults.append(f"{got.calls} of {made} calls were counted")
    if got.lost:
        faults.append(f"{got.lost} records were lost: a ring was full")
    left_out = {ALL: 0.0, NONE: 1.0, ONE_IN_100: 0.99}[variant.use.threshold] * made
    if abs(got.sampled_out - left_out) > made / 100:
        faults.append(f"{got.sampled_out} of {made} calls were left out by sampling, not {left_out:.0f}")
    return faults


def _references(rounds: Sequence[dict[int, float]], seen: int, made: int) -> list[Figure]:
    # bpftrace puts the return probe in after the entry probe, while the calls of the warm-up already run.
    faults = [] if made * 0.99 <= seen <= made else [f"bpftrace counted {seen} of {made} calls"]
    return [
        of("bare call", "ns", [r[BARE] for r in rounds], note="ns"),
        of(
            "bpftrace uprobe+uretprobe hist",
            "ns",
            [r[BPFTRACE] - r[BARE] for r in rounds],
            note="ns over bare = 1",
            faults=faults,
        ),
    ]


def _figure(variant: Variant, rounds: Sequence[dict[int, float]], faults: list[str]) -> Figure:
    function = variant.use.function
    ratios = [(r[function] - r[BARE]) / (r[BPFTRACE] - r[BARE]) for r in rounds]
    over = statistics.median(r[function] - r[BARE] for r in rounds)
    return of(variant.name, "of bpftrace", ratios, bar=variant.bar, note=f"{over:.0f} ns over bare", faults=faults)


def program_ns(driver: Driver, library: StubLibrary, backends: Sequence[str], calls: int, core: int) -> list[Figure]:
    """By variant: mean ns of each BPF program in it, by the kernel's statistics (whose own cost is in all of them)."""
    found = []
    chosen = variants(backends)
    with _attached(driver, library, chosen) as tracers, Drainer(list(tracers.values()), core):
        for v in chosen:
            call = functools.partial(driver.measure, v.use.function, calls, 1)
            times = [program_times(tracers[v.backend].loaded.programs, call) for _ in range(9)]
            found += [of(f"{v.name} {name}", "ns", [t[name] for t in times], note="ns") for name in times[0]]
    return found

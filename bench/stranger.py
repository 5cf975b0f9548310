"""What a process pays that maps the same library and is not traced, while another one is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from driver import Driver
from figures import Figure, confidence
from percall import Effort, variants
from stub_library import StubLibrary
from tracer import Tracer

from stallscope.capture.discovery import Discovery

__all__ = ["measure"]

BAR = 1.02
FUNCTION = 2


def _faults(traced: Driver, stranger: Driver) -> list[str]:
    faults = []
    if not traced.wait_probed(FUNCTION, 1):
        faults.append("no breakpoint in the traced process: nothing was measured")
    if stranger.probed(FUNCTION):
        faults.append("a breakpoint stands in the process that is not traced")
    return faults


def _call(stranger: Driver, effort: Effort) -> float:
    # What went before (a link, an unlink) has left other caches behind: the first windows are thrown away.
    stranger.measure(FUNCTION, effort.calls, effort.windows)
    return stranger.measure(FUNCTION, effort.calls, effort.windows)


def measure(program: Path, core: int, libraries: Sequence[StubLibrary], backend: str, effort: Effort) -> list[Figure]:
    """Calls of a stranger with us attached elsewhere and detached, in pairs whose order alternates."""
    before: list[float] = []
    during: list[float] = []
    faults: list[str] = []
    uses = [v.use for v in variants([backend])]
    with (
        Driver(program, core, libraries) as traced,
        Driver(program, core, libraries) as stranger,
        Tracer(backend, traced.pid) as tracer,
    ):
        for index in range(2 * effort.rounds):
            if index % 4 in (0, 3):
                before.append(_call(stranger, effort))
                continue
            with Discovery():
                tracer.link_tracepoints()
                tracer.link(libraries[0], uses)
                during.append(_call(stranger, effort))
                faults = faults or _faults(traced, stranger)
                tracer.unlink()
    return [_figure(before, during, faults)]


def _figure(before: list[float], during: list[float], faults: list[str]) -> Figure:
    base = statistics.median(before)
    differences = [b - a for a, b in zip(before, during, strict=True)]
    low, high = (1 + d / base for d in confidence(differences))
    note = f"95 % interval; {base:.2f} ns"
    ratio = 1 + statistics.median(differences) / base
    return Figure("untraced process, of before", "ratio", ratio, low, high, BAR, note=note, faults=faults)

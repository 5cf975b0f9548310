"""How long it takes to take all probes of a process with three libraries away."""

from __future__ import annotations

import time
from collections.abc import Sequence

from driver import Driver
from figures import Figure, of
from stub_library import StubLibrary
from tracer import Tracer, Use

from stallscope.wire.hook_table import HOOKS

__all__ = ["measure"]

BAR = 0.3


def _uses(library: str, room: int) -> list[Use]:
    """Every hook of that library, one function each."""
    hooks = [hook for hook in HOOKS if hook.library == library and hook.mode != "SHIM"][:room]
    return [Use(index, hook.name, 0) for index, hook in enumerate(hooks)]


def measure(driver: Driver, libraries: Sequence[StubLibrary], backend: str, rounds: int) -> list[Figure]:
    """Link all hooks of the three libraries, each in its own file; time the attach and the detach."""
    linked, unlinked, faults = [], [], []
    kinds = [
        (lib, _uses(name, len(lib.offsets))) for lib, name in zip(libraries, ("CUDART", "CUDA", "NCCL"), strict=True)
    ]
    with Tracer(backend, driver.pid) as tracer:
        for _ in range(rounds):
            start = time.monotonic()
            tracer.link_tracepoints()
            for library, uses in kinds:
                tracer.link(library, uses)
            middle = time.monotonic()
            if not driver.probed(0):
                faults = ["no breakpoint in the driver after the attach"]
            between = time.monotonic()
            tracer.unlink()
            linked.append(middle - start)
            unlinked.append(time.monotonic() - between)
            if driver.probed(0):
                faults = ["a breakpoint stands in the driver after the detach"]
    count = sum(len(uses) for _, uses in kinds)
    return [
        of("detach, 3 libraries", "s", unlinked, bar=BAR, note=f"s, {count} functions", faults=faults),
        of("link, 3 libraries", "s", linked, note=f"s, {count} functions"),
    ]

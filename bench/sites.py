"""Cost of a wait whose Python line is looked up, as a multiple of bpftrace's latency histogram.

One thread under a Python stack calls byte-identical functions in turn: bare, with bpftrace's uprobe and uretprobe, and
with our wait pair, without and with the walk of the stack. Only the function itself is probed; a real runtime's call
has the driver's inside it, which costs a pair more ("no walk") but no second walk.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import percall
from bpftrace import Bpftrace
from crowd import attached
from driver import Driver
from figures import Figure, of
from percall import ALL, BARE, BPFTRACE, Effort
from stub_library import StubLibrary
from tracer import Drainer, Tracer, Use

from stallscope.capture.causes import cause_word
from stallscope.capture.parser_client import ParserClient
from stallscope.capture.pyconfig import NotYet, Python, PythonFinder
from stallscope.wire.hook_table import BY_NAME

__all__ = ["measure", "measure_slowdown", "pythons"]

CASES = ((2, 20), (20, 20), (20, 0))  # frames, and how often their functions were called before
BAR, RING_BAR, SLOWDOWN_BAR = 2.5, 60, 2.0
WAITS, SETTLE_S = 1500, 0.5
WITHOUT, WITH = Use(2, "cudaStreamSynchronize_ptsz", ALL), Use(3, "cudaStreamSynchronize", ALL)
TARGET = Path(__file__).with_name("pydeep.py")


def pythons() -> list[str]:
    """This interpreter, and of those that pyenv has the newest that numbers its code objects (3.12 on)."""
    found = sorted(Path.home().glob(".pyenv/versions/3.1[2-4].*/bin/python3"))
    return [sys.executable, *map(str, found[-1:])]


def measure(
    driver: Path, libraries: Sequence[StubLibrary], backend: str, effort: Effort, near: int, far: int
) -> list[Figure]:
    """The figures of every interpreter and depth; `driver`: driver.c as a library."""
    found = []
    for python in pythons():
        for depth, passes in CASES:
            words = [python, str(TARGET), str(depth), str(passes), str(driver)]
            with Driver(words, near, libraries) as process:
                name = f"{depth} frames" if passes else f"{depth} frames, called once"
                found += _of_one(process, libraries[0], backend, effort, (depth, name, BAR if passes else None), far)
    return found


def measure_slowdown(library: Path, backend: str, count: int) -> list[Figure]:
    """How much longer 1,500 waits of 300 us with 20 frames take while the product is attached, in %: interleaved."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent), "STALLSCOPE_SIM_LIB": str(library.parent)}
    command = [sys.executable, str(TARGET.with_name("pywaits.py")), str(library)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )  # fmt: skip
    try:
        _answer(process)
        pairs = [(_seconds(process), _seconds_attached(process, backend)) for _ in range(count)]
    finally:
        process.kill()
        process.communicate()
    bare = [WAITS / one for one, _ in pairs]
    more = [100 * (traced / one - 1) for one, traced in pairs]
    slow = statistics.median(bare) < 0.8 * WAITS
    faults = ["the machine was too busy for 1,500 waits a second"] if slow else []
    return [
        of("waits a second, not traced", "1/s", bare),
        of(
            f"a program with such waits, longer by [{backend}]",
            "%",
            more,
            bar=SLOWDOWN_BAR,
            note="% of wall time",
            faults=faults,
        ),
    ]


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the waiting program ended with {process.wait()}")
    return line


def _seconds(process: subprocess.Popen[str]) -> float:
    """The shorter of two windows: what the machine does meanwhile only makes them longer."""
    assert process.stdin is not None
    found = []
    for _ in range(2):
        process.stdin.write("m\n")
        process.stdin.flush()
        found.append(float(_answer(process)))
    return min(found)


def _seconds_attached(process: subprocess.Popen[str], backend: str) -> float:
    with attached(process.pid, backend):
        time.sleep(SETTLE_S)
        return _seconds(process)


@contextlib.contextmanager
def _attached(driver: Driver, library: StubLibrary, backend: str) -> Iterator[Tracer]:
    with Tracer(backend, driver.pid) as tracer:
        tracer.tables.ranges.set(tracer.slot, [(0x1000, 0x2000)])
        without = BY_NAME[WITHOUT.hook]
        tracer.tables.conf.describe(without.id, cause_word(without) & ~1)  # all but the walk
        tracer.tables.sites.configure(tracer.slot, driver.pid, 1, _python(driver.pid))
        tracer.link(library, [WITHOUT, WITH])
        for use in (WITHOUT, WITH):
            if not driver.wait_probed(use.function, 1):
                raise RuntimeError(f"{use.hook}: no breakpoint in the driver")
        yield tracer


def _python(pid: int) -> Python:
    parser = ParserClient()
    try:
        finder = PythonFinder(parser)
        while isinstance(found := finder.find(pid), NotYet):
            pass
        if not isinstance(found, Python):
            raise RuntimeError(f"its Python is not known: {found}")
        return found
    finally:
        parser.close()


def _of_one(
    driver: Driver, library: StubLibrary, backend: str, effort: Effort, case: tuple[int, str, float | None], far: int
) -> list[Figure]:
    """`case`: how many frames, what it is called, and the bar."""
    depth, name, bar = case
    functions = [BARE, BPFTRACE, WITHOUT.function, WITH.function]
    name = f"3.{_python(driver.pid).minor}, {name}"
    with _attached(driver, library, backend) as tracer, Bpftrace(driver, library, BPFTRACE, far) as other:
        with Drainer([tracer], far):
            rounds = list(percall.rounds_of(driver, functions, effort))
        seen = other.stop()
        ring = [_ring_bytes(tracer, driver, use) for use in (WITHOUT, WITH)]
        faults = _faults(tracer, depth) + ([] if seen > 0 else ["bpftrace counted nothing"])
    over = {f: [r[f] - r[BARE] for r in rounds] for f in functions}
    ratios = {f: [a / b for a, b in zip(over[f], over[BPFTRACE], strict=True)] for f in functions}
    ns = {f: statistics.median(over[f]) for f in functions}
    return [
        of(f"bpftrace [{name}]", "ns", over[BPFTRACE], note="ns over bare = 1"),
        of(f"wait, no walk [{name}]", "of bpftrace", ratios[2], note=f"{ns[2]:.0f} ns over bare"),
        of(f"wait [{name}]", "of bpftrace", ratios[3], bar=bar, note=f"{ns[3]:.0f} ns over bare", faults=faults),
        of(f"more of the ring [{name}]", "bytes", [ring[1] - ring[0]], bar=RING_BAR, note="bytes a call"),
    ]


def _ring_bytes(tracer: Tracer, driver: Driver, use: Use, calls: int = 1000) -> float:
    """Bytes a call that both rings took."""
    rings = (tracer.tables.vital, tracer.tables.bulk)
    before = sum(ring.consumed_bytes + ring.pending_bytes for ring in rings)
    driver.measure(use.function, calls, 1)
    return (sum(ring.consumed_bytes + ring.pending_bytes for ring in rings) - before) / calls


def _faults(tracer: Tracer, depth: int) -> list[str]:
    """Why the figure would be of another stack."""
    table = tracer.tables.sites
    rows = [site for row in table.used() if (site := table.site(row))]
    if [len(site.frames) for site in rows] != [depth]:
        return [f"the stacks that were seen have {[len(site.frames) for site in rows]} frames"]
    made, counted = driver_calls(tracer), table.times(rows[0].row).calls
    return [] if made == counted else [f"{counted} of {made} waits were counted at their site"]


def driver_calls(tracer: Tracer) -> int:
    """How many waits with a stack there were."""
    return tracer.counted()[BY_NAME[WITH.hook].id].calls

"""Cost of libstallscope.so: `bench/shim.py [--quick]`; without privileges. Exit code 0 = all bars met.

All ways are called in turn, round by round, in one process; what counts is the smallest of the rounds, because
everything that disturbs a call makes it longer. Medians stand beside. Ratios carry over to other machines.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from figures import Figure, confidence, facts, not_measured, print_table
from shim_peers import Peer, bpftrace_peer, lttng_peer

from stallscope.capture.segment import Mode, Segment

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build" / "bench"
SHIM = HERE.parent / "build" / "shim" / "libstallscope.so"
BARE, TWICE, LAUNCH, BARE_WAIT, WAIT, BARE_NCCL, NCCL, COLD_BARE, COLD_TWICE, COLD, PACED_BARE, PACED = range(12)
CALLS, WINDOWS = 20_000, 5
BARS = (
    ("full", "bare", None),
    ("lite", "bare", None),
    ("min", "bare", 5.0),
    ("wait", "bare wait", None),
    ("NCCL", "bare NCCL", None),
    ("cold two readings", "cold bare", None),
    ("cold full", "cold bare", None),
)


class Caller:
    """The calling process with the library preloaded."""

    def __init__(self, core: int) -> None:
        build()
        environment = dict(os.environ, LD_PRELOAD=str(SHIM), LD_LIBRARY_PATH=str(BUILD))
        environment.pop("STALLSCOPE_SHIM", None)
        self._process = subprocess.Popen(
            [str(BUILD / "shimcall"), str(core)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.pid = int(self._process.stdout.readline())
        self.segment = Segment(self._find())

    def _find(self) -> int:
        for path in Path(f"/proc/{self.pid}/fd").iterdir():
            if "stallscope-segment" in os.readlink(path):
                return os.open(path, os.O_RDWR)
        raise RuntimeError("the calling process made no segment")

    def ns(self, way: int, calls: int = CALLS, windows: int = WINDOWS) -> float:
        """Least ns per call over the windows."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{way} {calls} {windows}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def build() -> None:
    """Compile both. Raises CalledProcessError."""
    BUILD.mkdir(parents=True, exist_ok=True)
    flags = ["gcc", "-O2", "-std=gnu11", "-Wall", "-Wextra", "-falign-functions=64"]
    stub = BUILD / "libcudart.so.12"
    shared = ["-fno-ipa-icf", "-fPIC", "-shared", "-Wl,-soname,libcudart.so.12"]
    subprocess.run([*flags, *shared, str(HERE / "shimstubs.c"), "-o", str(stub)], check=True)
    subprocess.run([*flags, str(HERE / "shimcall.c"), "-o", str(BUILD / "shimcall"), str(stub)], check=True)


@contextmanager
def caller(core: int) -> Iterator[Caller]:
    """A calling process that ends with the context."""
    found = Caller(core)
    try:
        yield found
    finally:
        found.close()


def rounds(c: Caller, count: int) -> dict[str, list[float]]:
    """ns per call of every way, by round."""
    found: dict[str, list[float]] = {}
    for _ in range(count):
        for name, way, mode, one_in in (
            ("bare", BARE, Mode.FULL, 1), ("two readings", TWICE, Mode.FULL, 1), ("full", LAUNCH, Mode.FULL, 1),
            ("lite", LAUNCH, Mode.LITE, 1), ("min", LAUNCH, Mode.MIN, 1000), ("bare wait", BARE_WAIT, Mode.FULL, 1),
            ("wait", WAIT, Mode.FULL, 1), ("bare NCCL", BARE_NCCL, Mode.FULL, 1), ("NCCL", NCCL, Mode.FULL, 1),
        ):  # fmt: skip
            c.segment.set_mode(mode, one_in)
            found.setdefault(name, []).append(c.ns(way))
        for name, way in (("cold bare", COLD_BARE), ("cold two readings", COLD_TWICE), ("cold full", COLD)):
            c.segment.set_mode(Mode.FULL)
            found.setdefault(name, []).append(c.ns(way, 100, 3))
    return found


def paced(c: Caller, count: int, mode: Mode, one_in: float) -> list[float]:
    """Throughput with the library of that without, in pairs whose order changes."""
    c.segment.set_mode(mode, one_in)
    ratios = []
    for index in range(count):
        order = (PACED_BARE, PACED) if index % 2 else (PACED, PACED_BARE)
        ns = {way: c.ns(way, 300, 20) for way in order}  # windows that the scheduler seldom cuts
        ratios.append(ns[PACED_BARE] / ns[PACED])
    return ratios


def over(found: dict[str, list[float]], name: str, bare: str = "bare") -> tuple[float, float]:
    """ns over bare: smallest, median."""
    median = statistics.median(a - b for a, b in zip(found[name], found[bare], strict=True))
    return min(found[name]) - min(found[bare]), median


def figures_of(found: dict[str, list[float]]) -> list[Figure]:
    """With their bars."""
    two, two_median = over(found, "two readings")
    full, full_median = over(found, "full")
    out = [
        Figure("two readings of the counter", "ns", two, min(two, two_median), max(two, two_median), note="over bare")
    ]
    ratio = full / two
    out.append(
        Figure("full: of two readings", "", ratio, ratio, full_median / two_median, bar=1.25, note="median: high")
    )
    for name, bare, bar in BARS:
        least, median = over(found, name, bare)
        out.append(Figure(name, "ns", least, min(least, median), max(least, median), bar=bar, note="ns over bare"))
    return out


def paced_figure(name: str, ratios: list[float], bar: float) -> Figure:
    """Its range is the 95 % interval of the median."""
    low, high = confidence(ratios)
    return Figure(name, "", statistics.median(ratios), low, high, bar=bar, at_least=True, note="95 % interval")


def against(c: Caller, name: str, peer: Peer, count: int, bar: float) -> Figure:
    """How many times ours a peer costs, both over bare: the least of the rounds; the median stands beside."""
    c.segment.set_mode(Mode.FULL)
    rows = [(peer(0), peer(1), c.ns(BARE), c.ns(LAUNCH)) for _ in range(count)]
    bare, traced, ours_bare, ours = zip(*rows, strict=True)
    least = (min(traced) - min(bare)) / (min(ours) - min(ours_bare))
    median = statistics.median((b - a) / (d - c) for a, b, c, d in rows if d > c)
    note = f"{min(traced) - min(bare):.0f} ns over bare"
    return Figure(name, "", least, min(least, median), max(least, median), bar=bar, at_least=True, note=note)


def peers(c: Caller, core: int, quick: bool) -> list[Figure]:
    """Those that can run here; each other one is named with the reason."""
    found = []
    for name, peer, bar in (
        ("LTTng-UST entry + exit: times ours", lttng_peer, 8.0),
        ("bpftrace histogram: times ours", bpftrace_peer, 60.0),
    ):
        try:
            with peer(core) as ns:
                found.append(against(c, name, ns, 5 if quick else 20, bar))
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            found.append(not_measured(name, error))
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measures the cost of libstallscope.so.")
    parser.add_argument("--quick", action="store_true", help="few rounds: for a look, not for the record")
    quick = parser.parse_args().quick
    machine = facts()
    print(f"{machine['cpu']}, {machine['cpus']} CPUs, load {machine['load'][0]:.2f}")
    with caller(max(os.sched_getaffinity(0))) as c:
        out = figures_of(rounds(c, 10 if quick else 60))
        out.append(paced_figure("2 us a launch, full: throughput", paced(c, 20 if quick else 100, Mode.FULL, 1), 0.97))
        out.append(
            paced_figure("2 us a launch, min: throughput", paced(c, 20 if quick else 100, Mode.MIN, 1000), 0.995)
        )
        out += peers(c, max(os.sched_getaffinity(0)), quick)
    print_table("Cost of the preloaded library", out)
    return 0 if all(figure.met for figure in out) else 1


if __name__ == "__main__":
    sys.exit(main())

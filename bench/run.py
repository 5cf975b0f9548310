"""The promised figures, measured: `make bench`, as root. Exit code 0 = all bars met, 1 = not.

Usage: bench/run.py [--quick] [--only PART] [--stats] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bpftrace
import crowd
import detaching
import draining
import endtoend
import forks
import percall
import sites
import stranger
from driver import Driver
from figures import Figure, facts, not_measured, print_table
from stub_library import StubLibrary, build_libraries, build_program

from stallscope.capture.loader import load
from stallscope.errors import StallscopeError

PARTS = ("percall", "sites", "stranger", "drain", "detach", "attach", "crowd", "forks")
OUTPUT = Path(__file__).resolve().parents[1] / "build" / "bench.json"
STATS_SWITCH = Path("/proc/sys/kernel/bpf_stats_enabled")


@dataclass
class Bench:
    """What all parts need."""

    quick: bool
    backends: list[str]
    missing: list[Figure]  # in place of backends that don't load
    libraries: list[StubLibrary]
    driver: Path
    caller: Path
    near: int  # the CPU of the calling program
    far: int  # the CPU of everything else

    def rounds(self, full: int, quick: int) -> int:
        """How many."""
        return quick if self.quick else full

    def run_driver(self) -> Driver:
        """A calling process with all libraries."""
        return Driver(self.driver, self.near, self.libraries)


def percall_part(bench: Bench) -> list[Figure]:
    """Cost of a probed call against bpftrace."""
    if why := bpftrace.missing():
        raise RuntimeError(why)
    effort = percall.Effort(bench.rounds(15, 3), 5, 4000)
    with bench.run_driver() as driver:
        return percall.measure(driver, bench.libraries[0], bench.backends, effort, bench.far)


def sites_part(bench: Bench) -> list[Figure]:
    """Cost of a wait whose Python line is looked up."""
    if why := bpftrace.missing():
        raise RuntimeError(why)
    driver = build_program("driver", as_library=True)
    effort = percall.Effort(bench.rounds(15, 5), 5, 2000)
    found = sites.measure(driver, bench.libraries, bench.backends[-1], effort, bench.near, bench.far)
    library = endtoend.cudart()
    if library is None:
        return [*found, not_measured("slowdown", "there is no libcudart to call (make build makes a simulated one)")]
    return [*found, *sites.measure_slowdown(library, bench.backends[-1], bench.rounds(11, 3))]


def stranger_part(bench: Bench) -> list[Figure]:
    """Cost for a process that is not traced."""
    effort = percall.Effort(bench.rounds(41, 9), 25, 200_000)
    return stranger.measure(bench.driver, bench.near, bench.libraries, bench.backends[-1], effort)


def drain_part(bench: Bench) -> list[Figure]:
    """Speed of the drain."""
    with bench.run_driver() as driver:
        return draining.measure(driver, bench.libraries[0], bench.backends[-1], bench.rounds(15, 5), bench.far)


def detach_part(bench: Bench) -> list[Figure]:
    """Time of the detach."""
    with bench.run_driver() as driver:
        return detaching.measure(driver, bench.libraries, bench.backends[-1], bench.rounds(9, 3))


def attach_part(bench: Bench) -> list[Figure]:
    """The command as a whole."""
    library = endtoend.cudart()
    if library is None:
        raise RuntimeError("there is no libcudart to call (make build makes a simulated one)")
    found = []
    for backend in bench.backends:
        found += endtoend.measure(bench.caller, library, backend, bench.rounds(5, 2))
        found += endtoend.measure_busy(bench.caller, library, backend, bench.rounds(2, 1))
    return found


def crowd_part(bench: Bench) -> list[Figure]:
    """A call when many traced processes share the library."""
    library = endtoend.cudart()
    if library is None:
        raise RuntimeError("there is no libcudart to call (make build makes a simulated one)")
    return crowd.measure(build_program("crowd"), library, bench.backends[-1], bench.rounds(7, 2))


def forks_part(bench: Bench) -> list[Figure]:
    """The capture while a job forks 200 processes a second."""
    library = endtoend.cudart()
    if library is None:
        raise RuntimeError("there is no libcudart to call (make build makes a simulated one)")
    return forks.measure(library, bench.backends[-1], bench.rounds(3, 1))


def stats_part(bench: Bench) -> list[Figure]:
    """Time in each BPF program; the switch adds its own cost to each run."""
    before = STATS_SWITCH.read_text()
    STATS_SWITCH.write_text("1")
    try:
        with bench.run_driver() as driver:
            return percall.program_ns(driver, bench.libraries[0], bench.backends, 20_000, bench.far)
    finally:
        STATS_SWITCH.write_text(before)


MEASURES: dict[str, Callable[[Bench], list[Figure]]] = {
    "percall": percall_part,
    "sites": sites_part,
    "stranger": stranger_part,
    "drain": drain_part,
    "detach": detach_part,
    "attach": attach_part,
    "crowd": crowd_part,
    "forks": forks_part,
    "stats": stats_part,
}


def usable_backends() -> tuple[list[str], list[Figure]]:
    """Those that load here, and in place of each other one its reason."""
    found, missing = [], []
    for backend in ("bcc", "object"):
        try:
            load(backend).close()
            found.append(backend)
        except StallscopeError as error:
            missing.append(not_measured(f"backend {backend}", f"{error.what}: {error.why}"))
    return found, missing


def prepare(quick: bool) -> Bench:
    """Compile and look around. Raises RuntimeError when nothing can be measured."""
    if os.geteuid() != 0:
        raise RuntimeError(
            "nothing can be measured without root: probes need CAP_BPF, CAP_PERFMON, and bpftrace all of it"
        )
    cores = sorted(os.sched_getaffinity(0))
    backends, missing = usable_backends()
    if not backends:
        raise RuntimeError(f"no backend loads here (see `stallscope doctor`): {missing[0].faults[0]}")
    programs = build_program("driver"), build_program("caller")
    return Bench(quick, backends, missing, build_libraries(3), *programs, cores[-1], cores[0])


def measured(bench: Bench, parts: list[str]) -> Iterator[tuple[str, list[Figure]]]:
    """The parts that can run here; the others are named with the reason, and count as not met."""
    if bench.missing:
        print_table("Backends", bench.missing)
        yield "backends", bench.missing
    for part in parts:
        title = (MEASURES[part].__doc__ or part).splitlines()[0].rstrip(".")
        try:
            figures = MEASURES[part](bench)
        except (RuntimeError, OSError, StallscopeError, subprocess.SubprocessError) as error:
            figures = [not_measured(part, error)]
        print_table(title, figures)
        sys.stdout.flush()
        yield part, figures


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measures the promised figures.")
    parser.add_argument("--quick", action="store_true", help="few rounds: for a look, not for the record")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part (may be repeated)")
    parser.add_argument("--stats", action="store_true", help="also the time in each BPF program")
    parser.add_argument("--json", type=Path, default=OUTPUT, metavar="FILE", help="default build/bench.json")
    return parser.parse_args()


def print_facts(found: dict[str, Any]) -> None:
    """Two lines, and a third when the figures deserve less trust."""
    load_average = " ".join(f"{x:.2f}" for x in found["load"])
    print(f"{found['cpu']}, {found['cpus']} CPUs, Linux {found['kernel']}, {found['bpftrace']}")
    print(f"load average {load_average}")
    if found["load"][0] > 1:
        print("note: other jobs run here; the NCCL pair suffers most from them")


def finish(figures: list[Figure], quick: bool) -> int:
    """The last lines and the exit code."""
    failed = [f for f in figures if not f.met]
    bars = sum(f.bar is not None for f in figures)
    print(f"\nload average at the end {' '.join(f'{x:.2f}' for x in os.getloadavg())}")
    for f in failed:
        print(f"NOT MET: {f.name}: {'; '.join(f.faults) or f'{f.median:.3f}, bar {f.bar:g}'}")
    print(f"{bars - len(failed)} of {bars} bars met{' (quick run)' if quick else ''}")
    return 1 if failed else 0


def main() -> int:
    """Measure, print, write JSON."""
    options = arguments()
    machine = facts()
    print_facts(machine)
    try:
        bench = prepare(options.quick)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    parts = [*(options.only or PARTS), *(["stats"] if options.stats else [])]
    results = dict(measured(bench, parts))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    body = {part: [figure.as_json() for figure in figures] for part, figures in results.items()}
    report = {"machine": machine, "load_at_end": list(os.getloadavg()), "quick": options.quick, "parts": body}
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    return finish([f for figures in results.values() for f in figures], options.quick)


if __name__ == "__main__":
    sys.exit(main())

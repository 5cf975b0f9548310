"""What the capture costs while a traced job forks 2,000 processes in 10 s, every second one with an exec."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from figures import Figure, of

__all__ = ["measure"]

COUNT, SECONDS = 2000, 10
BAR_PERCENT = 20.0
BAR_MB = 64.0
PROGRAM = Path(__file__).resolve().parents[1] / "tests" / "targets" / "forks.py"
_TICKS = os.sysconf("SC_CLK_TCK")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _peak_mb(pid: int) -> float:
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def _once(library: Path, backend: str) -> tuple[float, float, int]:
    """(percent of a core, peak resident MB, processes seen or turned away) of one capture."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent)}
    words = [sys.executable, str(PROGRAM), "storm", str(COUNT), str(SECONDS)]
    program = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert program.stdin and program.stdout
    program.stdout.readline()
    command = [sys.executable, "-m", "stallscope.cli.main", "attach", str(program.pid), "--backend", backend, "--json"]
    tracer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert tracer.stdout and tracer.stderr
    tracer.stderr.readline()  # attached
    before = _cpu_s(tracer.pid)
    program.stdin.write("go\n")
    program.stdin.flush()
    took = json.loads(program.stdout.readline())["seconds"]
    used, peak = _cpu_s(tracer.pid) - before, _peak_mb(tracer.pid)
    report = json.loads(tracer.communicate()[0])
    program.communicate()
    seen = sum(p["traced"] for p in report["processes"]) - 1
    refused = (n.split()[0] for n in report["capture"]["notes"] if "forked processes are not traced" in n)
    return 100 * used / took, peak, seen + sum(map(int, refused))


def measure(library: Path, backend: str, rounds: int) -> list[Figure]:
    """Share of a core, memory, and whether all were counted."""
    found = [_once(library, backend) for _ in range(rounds)]
    faults = [f"{counted} of {COUNT} processes counted" for *_, counted in found if counted != COUNT]
    what = f"{COUNT} forks in {SECONDS} s, {backend}"
    return [
        of(f"capture, {what}", "% core", [share for share, *_ in found], bar=BAR_PERCENT, faults=faults),
        of(f"memory, {what}", "MB", [peak for _, peak, _ in found], bar=BAR_MB),
    ]

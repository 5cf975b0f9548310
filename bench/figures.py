"""Figures, their bars, and how they are printed."""

from __future__ import annotations

import math
import os
import platform
import random
import re
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Figure", "confidence", "facts", "not_measured", "of", "print_table"]

_BOOTSTRAPS = 2000


@dataclass
class Figure:
    """One measured figure.

    Attributes:
        low, high: smallest and largest of the rounds (a confidence interval where the note says so).
        bar: what was promised, None = for information.
        at_least: whether the bar is a lower limit.
        note: how to read it.
        faults: why it does not count; a figure with faults never meets its bar.
    """

    name: str
    unit: str
    median: float
    low: float
    high: float
    bar: float | None = None
    at_least: bool = False
    note: str = ""
    faults: list[str] = field(default_factory=list)

    @property
    def met(self) -> bool:
        """Whether the bar, if there is one, is met."""
        if self.bar is None:
            return True
        reached = self.median >= self.bar if self.at_least else self.median <= self.bar
        return reached and not self.faults

    @property
    def verdict(self) -> str:
        """One word or two."""
        if self.bar is None:
            return "FAULTY" if self.faults else ""
        return "met" if self.met else "NOT MET"

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        plain = {key: None if value != value else value for key, value in asdict(self).items()}  # JSON has no NaN
        return {**plain, "met": self.met}


def of(name: str, unit: str, values: Sequence[float], **rest: Any) -> Figure:
    """Median and range of the values of all rounds."""
    return Figure(name, unit, statistics.median(values), min(values), max(values), **rest)


def not_measured(name: str, why: object) -> Figure:
    """In place of a figure that this machine does not give; its bar counts as not met."""
    return Figure(name, "", math.nan, math.nan, math.nan, math.nan, faults=[f"not measured: {why}"])


def confidence(values: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """Bootstrap interval of the median."""
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(_BOOTSTRAPS))
    cut = int(_BOOTSTRAPS * (1 - share) / 2)
    return medians[cut], medians[-1 - cut]


def _cpu() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found.group(1) if found else platform.machine()


def _bpftrace() -> str:
    try:
        return subprocess.run(["bpftrace", "--version"], capture_output=True, text=True).stdout.strip()
    except OSError:
        return "none"


def facts() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "bpftrace": _bpftrace(),
        "load": list(os.getloadavg()),
    }


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _line(figure: Figure, width: int) -> str:
    if math.isnan(figure.median):
        return f"{figure.name:<{width}}{'-':>8}  {'':<24}{figure.verdict}"
    spread = f"{_number(figure.low)}..{_number(figure.high)}"
    bar = "" if figure.bar is None else f"{'>=' if figure.at_least else '<='} {figure.bar:g}"
    cells = f"{figure.name:<{width}}{_number(figure.median):>8}  {spread:<15}{bar:<9}{figure.verdict:<8} {figure.note}"
    return cells.rstrip()


def print_table(title: str, figures: Sequence[Figure]) -> None:
    """At most 100 columns, if names and notes keep to 36 and 20."""
    width = max(36, *(len(figure.name) + 1 for figure in figures))
    print(f"\n{title}")
    print(f"{'':<{width}}{'median':>8}  {'min..max':<15}{'bar':<9}".rstrip())
    for figure in figures:
        print(_line(figure, width))
        for fault in figure.faults:
            print(f"    ! {fault}"[:100])

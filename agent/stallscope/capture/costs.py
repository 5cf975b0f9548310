"""What stallscope itself costs: CPU time and resident memory of its processes."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["Costs"]

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def _one(pid: int) -> tuple[int, int] | None:
    """(CPU ns, resident bytes) of a process; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read(4096).rpartition(b")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) * _TICK_NS, int(fields[21]) * _PAGE


class Costs:
    """Measured by capture, since the aggregator must not look at clocks."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids

    def set(self, name: str, pid: int) -> None:
        """That process was started again."""
        self._pids[name] = pid

    def measure(self, at_ns: int) -> dict[str, Any]:
        """Body of a COST frame."""
        found = {name: _one(pid) for name, pid in self._pids.items()}
        known = {name: list(cost) for name, cost in found.items() if cost is not None}
        return {
            "at_ns": at_ns,
            "cpu_ns": sum(cost[0] for cost in known.values()),
            "rss_bytes": sum(cost[1] for cost in known.values()),
            "processes": known,
        }

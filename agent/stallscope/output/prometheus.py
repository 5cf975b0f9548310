"""/metrics of a daemon: few numbers with few labels, whose values are all from fixed sets.

Sums are over the processes that the aggregator knows; when it begins anew, what it knew of those that had ended is
added here, so that counters never go back while it lives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from stallscope.aggregate.process import Process
from stallscope.aggregate.state import State
from stallscope.diagnose.incident import Findings
from stallscope.diagnose.timing import outermost
from stallscope.output.notify import Receiver

__all__ = ["Ledger", "Metrics", "serve"]

Sums = Counter[tuple[str, str]]
KINDS = ("launch", "wait", "copy", "alloc", "event", "graph", "collective", "p2p", "group", "comm")
FAMILIES = {
    "calls": ("calls of hooked functions", "kind"),
    "wait_seconds": ("time inside outermost timed calls that returned", "kind"),
    "collectives": ("collectives that all ranks seen here executed", ""),
    "collective_wait_seconds": ("time that ranks waited for late ones, as far as known", ""),
    "incidents": ("incidents", "class"),
    "episodes": ("waits for a late rank", ""),
    "episode_seconds": ("time in waits for a late rank", ""),
    "lost": ("records lost, by place", "place"),
    "gaps": ("times in which something was not seen", ""),
    "processes_ended": ("processes that have ended or were let go", ""),
}
OF_PROCESS = ("calls", "wait_seconds")


class Ledger:
    """What streams that are over amount to."""

    def __init__(self) -> None:
        self.closed: Sums = Counter()

    def close(self, state: State, findings: Findings) -> None:
        """A stream is over. Those that live on are told again with all that they counted; losses, too."""
        dead = [process for process in state.processes.table.values() if process.exit is not None]
        found = _of_processes(state, dead) + _of_stream(state, findings)
        self.closed += Counter({key: value for key, value in found.items() if key[0] != "lost"})

    def sums(self, state: State, findings: Findings) -> Sums:
        """Everything so far."""
        return self.closed + _of_processes(state, state.processes.table.values()) + _of_stream(state, findings)


def _of_processes(state: State, processes: Iterable[Process]) -> Sums:
    found: Sums = Counter()
    for process in processes:
        for number, counts in process.counts.items():
            hook = state.hooks.get(number)
            kind = hook.kind if hook.kind in KINDS else "other"
            found["calls", kind] += counts.calls
            timing = outermost(process, hook)
            if timing is not None and timing.total_ns:
                found["wait_seconds", kind] += timing.total_ns / 1e9  # type: ignore[assignment]
    return found


def _of_stream(state: State, findings: Findings) -> Sums:
    found: Sums = Counter()
    for incident in findings.incidents:
        found["incidents", incident.kind] += 1
    for episode in findings.episodes:
        found["episodes", ""] += episode.count
        found["episode_seconds", ""] += episode.total_ns / 1e9  # type: ignore[assignment]
    for row in findings.collectives:
        found["collectives", ""] += row.calls
        found["collective_wait_seconds", ""] += (row.wait_ns or 0) / 1e9  # type: ignore[assignment]
    for place, count in state.lost_by.items():
        found["lost", place[:64]] += count
    found["gaps", ""] = len(state.gaps)
    found["processes_ended", ""] = sum(p.exit is not None for p in state.processes.table.values())
    return found


class Metrics(Collector):
    """Shows what the newest `update` said: whoever asks does so in a thread of its own."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._families: list[Any] = []

    def update(self, state: State, findings: Findings, receivers: Iterable[Receiver]) -> None:
        """Take the numbers as they are now."""
        self._families = [*_counters(self.ledger.sums(state, findings)), *_gauges(state, findings), _hooks(receivers)]

    def collect(self) -> Iterator[Any]:
        """For the registry."""
        yield from self._families


def _counters(sums: Sums) -> Iterator[Any]:
    for name, (about, label) in FAMILIES.items():
        family = CounterMetricFamily(f"stallscope_{name}", about, labels=[label] if label else [])
        for (own, value), count in sorted(sums.items()):
            if own == name:
                family.add_metric([value] if label else [], count)
        yield family


def _gauges(state: State, findings: Findings) -> Iterator[Any]:
    live = sum(p.exit is None and p.traced for p in state.processes.table.values())
    yield GaugeMetricFamily("stallscope_processes", "traced processes that live", value=live)
    running = sum(incident.end_ns is None for incident in findings.incidents)
    yield GaugeMetricFamily("stallscope_incidents_running", "incidents that are not over", value=running)
    cpu = CounterMetricFamily("stallscope_cost_cpu_seconds", "processor time of stallscope itself", labels=["process"])
    rss = GaugeMetricFamily("stallscope_cost_resident_bytes", "its resident memory", labels=["process"])
    for name, (cpu_ns, rss_bytes) in sorted(state.cost.processes.items() if state.cost else ()):
        cpu.add_metric([name[:32]], cpu_ns / 1e9)
        rss.add_metric([name[:32]], rss_bytes)
    yield cpu
    yield rss


def _hooks(receivers: Iterable[Receiver]) -> Any:
    family = CounterMetricFamily("stallscope_notifications", "messages to hooks", labels=["hook", "outcome"])
    for receiver in receivers:
        for outcome in ("sent", "dropped", "failed"):
            family.add_metric([receiver.name, outcome], receiver.counts[outcome])
    return family


def serve(metrics: Metrics, address: str, port: int) -> int:
    """Answer on /metrics, in a thread; the port. Raises OSError where it is taken."""
    from prometheus_client import start_http_server

    registry = CollectorRegistry()
    registry.register(metrics)
    server, _thread = start_http_server(port, address, registry)
    return int(server.server_address[1])

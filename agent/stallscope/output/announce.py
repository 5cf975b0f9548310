"""Incidents at once, while the capture runs: a line when one is found, what to do, and a line when it is over."""

from __future__ import annotations

from typing import TextIO

from stallscope.diagnose.incident import Findings, Incident
from stallscope.output.stdout import discard, printable
from stallscope.output.words import clean, duration

__all__ = ["OUTCOMES", "Announcer"]

OUTCOMES = {"timed_out": "timed out", "died": "ended with a death"}


class Announcer:
    """Tells each incident once; remembers only which it has told."""

    def __init__(self, err: TextIO | None) -> None:
        self._err = err
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    def look(self, findings: Findings) -> None:
        """Print what is new. Nothing more once nobody reads: the report is still to come."""
        lines: list[str] = []
        for incident in findings.incidents:
            lines += self._news(incident)
        if not lines or self._err is None:
            return
        try:
            self._err.write(printable("".join(f"{line}\n" for line in lines), self._err))
            self._err.flush()
        except OSError:
            discard(self._err)
            self._err = None

    def _news(self, incident: Incident) -> list[str]:
        lines = []
        if incident.id not in self._begun:
            self._begun.add(incident.id)
            label = f", {incident.label}" if incident.label else ""
            lines.append(f"incident {incident.id} ({incident.kind}{label}): {clean(incident.summary)}")
            lines.append(f"  next: {clean(incident.next)}")
        lasted = None if incident.end_ns is None else incident.end_ns - incident.start_ns
        if lasted and incident.id not in self._ended:  # nothing ends that was but a moment
            self._ended.add(incident.id)
            how = OUTCOMES.get(incident.outcome, incident.outcome)
            lines.append(f"incident {incident.id} {how} after {duration(lasted)}")
        return lines

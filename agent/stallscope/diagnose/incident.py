"""Incidents, episodes and the like: what the diagnosis hands to the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from stallscope.diagnose.steps import StepsFound

__all__ = ["Collective", "Culprit", "Episode", "Findings", "Found", "Incident", "Longest", "Place"]

Frames = list[dict[str, Any]]


class Place(NamedTuple):
    """A rank as people know it. `rank` is its rank in the incident's communicator."""

    rank: int | None
    global_rank: int | None
    proc: int
    pid: int


@dataclass
class Culprit:
    """A rank at fault, and where its host was during the block.

    `stack`: innermost first, as in the report; `waiting_in`: {syscall, file, wchan}, None where nobody looked.
    """

    place: Place
    stack: Frames | None = None
    waiting_in: dict[str, str | None] | None = None


@dataclass
class Incident:
    """One root of a block that lasted beyond the threshold. Instants are CLOCK_MONOTONIC ns of the capture.

    Attributes:
        kind: the class, see `Verdict.kind`; also STRAGGLER, SILENT_MISMATCH.
        comm: id of the communicator, the key into `State.communicators`.
        op: the function, e.g. "ncclAllReduce"; seq: its number in the communicator.
        outcome: running, resolved, timed_out, aborted or died.
        label: checkpoint, eval, warm_up or None.
        summary: one English line; next: what to do now.
        gpu: what NVML says of the devices of all concerned, e.g. "utilisation 99 %, power 78 W of 700 W on 7 of 8 GPUs:
            spinning in NCCL, not computing"; None where it said nothing.
        numbers: what a STRAGGLER measured: {"last_in_percent": 97, "own_ns": 2400000}.
        since_before: the block was there when the capture began: `start_ns` is the latest instant that it can have.
    """

    id: int
    kind: str
    label: str | None
    comm: str | None
    op: str | None
    seq: int | None
    culprits: list[Culprit]
    victims: list[Place]
    cascade: list[str]
    start_ns: int
    reported_ns: int
    end_ns: int | None
    outcome: str
    evidence: str
    confidence: str
    summary: str
    next: str
    numbers: dict[str, int] = field(default_factory=dict)
    gpu: str | None = None
    since_before: bool = False


class Longest(NamedTuple):
    """One long wait of an episode row; `culprit_stack` was taken during it."""

    at_ns: int
    duration_ns: int
    op: str
    seq: int
    culprit_stack: Frames | None


@dataclass
class Episode:
    """Waits for one late rank in one communicator. `exact`: whether the durations are measured, else estimated."""

    comm: str
    place: Place
    count: int
    total_ns: int
    max_ns: int
    p99_ns: int
    longest: list[Longest]
    exact: bool = True


class Collective(NamedTuple):
    """What a communicator executed. `wait_ns`: for late ranks, summed over operations; None where not known."""

    comm: str
    op: str
    dtype: str
    calls: int
    bytes: int
    calls_per_step: float | None
    wait_ns: int | None
    bounded: bool


class Findings(Protocol):
    """What the report asks of a diagnosis."""

    @property
    def incidents(self) -> list[Incident]:
        """Blocks, in the order of their report."""

    @property
    def episodes(self) -> list[Episode]:
        """Waits for late ranks."""

    @property
    def collectives(self) -> list[Collective]:
        """What the communicators executed."""

    @property
    def steps(self) -> StepsFound | None:
        """What the trainers' steps were; None where nothing repeats."""


@dataclass
class Found:
    """Findings that are just there: of nobody who watched, or made up."""

    incidents: list[Incident] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    steps: StepsFound | None = None

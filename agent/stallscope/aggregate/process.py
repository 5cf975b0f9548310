"""What is known of each traced process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stallscope.aggregate.checks import (
    BadField,
    integer,
    items,
    mapping,
    maybe_boolean,
    maybe_integer,
    maybe_text,
    raw,
    text,
    texts,
)
from stallscope.aggregate.hooks import WIRE_HOOKS, WIRE_TIMES, Hooks
from stallscope.aggregate.identity import Version, version_of
from stallscope.aggregate.limits import Overflow
from stallscope.wire.columns import COUNT, TIME
from stallscope.wire.frames import Body

__all__ = ["SHIM", "Counts", "Exit", "Link", "Process", "Processes", "Sender"]

RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
SHIM = "shim"  # the method in LINK frames, and the source in reports


class Counts(NamedTuple):
    """Exact counters of one hook in one process (wire_count)."""

    calls: int = 0
    nested: int = 0
    errors: int = 0
    lost: int = 0
    sampled_out: int = 0
    filtered: int = 0


class Link(NamedTuple):
    """A library that was linked in a process; `version` of an NCCL, where its file tells; `by_shim`: not by BPF."""

    library: str
    path: str
    hooks: frozenset[int]
    at_ns: int
    appeared_ns: int
    version: Version | None = None
    by_shim: bool = False


class Sender(NamedTuple):
    """Who sent a signal: `pid` 0: a process out of sight; None: the kernel."""

    signal: int
    at_ns: int
    pid: int | None
    name: str


class Exit(NamedTuple):
    """How a process ended. `sender` of the signal that it died of, or else that asked it to end, None: none is known.

    `exiting_ns`: the instant at which it began to end; `oom`: whether for want of memory. None: not known.
    """

    at_ns: int
    code: int | None
    signal: int | None
    sender: Sender | None = None
    exiting_ns: int | None = None
    oom: bool | None = None


@dataclass
class Process:
    """One process; `order` is its place in the stream, `events` the call events that it sent as records.

    The first call of each hook is always recorded; `first_cuda_call`: (hook, ns that it took, 0 where it is not timed).
    `traced`: False for an ancestor of what is traced; `parent`: only one that was told before it.
    `env`: what its environment said at the exec of its place in the job. `entry_only`: hooks whose returns were not
    probed in some library of it, so that nothing is known of durations.
    """

    proc: int
    order: int
    pid: int
    ns_pid: int | None
    parent: int | None
    name: str
    cmdline: list[str]
    container_id: str | None
    start_ns: int
    links: list[Link] = field(default_factory=list)
    exit: Exit | None = None
    counts: dict[int, Counts] = field(default_factory=dict)
    times: dict[int, bytes] = field(default_factory=dict)
    longest: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    events: int = 0
    first_cuda_ns: int | None = None
    first_cuda_call: tuple[int, int] | None = None
    first_launch_ns: int | None = None
    untimed: bool = False
    entry_only: set[int] = field(default_factory=set)
    runtime_calls_before_driver: int = 0
    env: dict[str, str] = field(default_factory=dict)
    traced: bool = True

    @property
    def nccl_version(self) -> Version | None:
        """Of its NCCL, where it has exactly one and that one's file tells."""
        versions = {link.version for link in self.links if link.library == "NCCL"}
        return versions.pop() if len(versions) == 1 else None

    def runtime_calls(self, hooks: Hooks) -> int:
        """Launches and waits of the CUDA runtime: each makes a driver call somewhere."""
        rows = ((hooks.get(number), row) for number, row in self.counts.items())
        return sum(row.calls for hook, row in rows if hook.library == "CUDART" and hook.kind in ("launch", "wait"))

    @property
    def global_rank(self) -> int | None:
        """Its rank in the job, from the environment it was started with."""
        return next((int(self.env[n]) for n in RANKS if n in self.env and self.env[n].isdecimal()), None)

    def learn_place(self, now: dict[str, str]) -> None:
        """Of variables that it has now and that its exec does not show: it wrote over them, or set them itself."""
        self.env |= {name: now[name] for name in RANKS if name in now and name not in self.env and len(now[name]) < 10}

    def has_library(self, library: str, hooks: Hooks) -> bool:
        """Whether hooks of that library are linked; a static runtime lives in the program's own file."""
        return any(hooks.get(h).library == library for link in self.links for h in link.hooks)

    @property
    def source(self) -> str:
        """Who sees its calls: where the shim does, BPF is not linked."""
        return SHIM if any(link.by_shim for link in self.links) else "bpf"

    def calls(self) -> int:
        """Calls made into linked hooks."""
        return sum(row.calls for row in self.counts.values())


class Processes:
    """The process table: filled by PROCESS, IMAGE, EXIT, LINK and COUNTS frames."""

    def __init__(self, overflow: Overflow) -> None:
        self.table: dict[int, Process] = {}
        self.unknown_frames = 0
        self._overflow = overflow
        self._rows = self._times = 0
        self.backwards: set[int] = set()

    def get(self, body: Body) -> Process | None:
        """The process that a frame is about; None (counted) when it was never announced or turned away."""
        process = self.table.get(integer(body, "proc"))
        self.unknown_frames += process is None
        return process

    def add(self, body: Body) -> None:
        """A PROCESS frame. A second one for the same key changes nothing."""
        proc = integer(body, "proc")
        if proc in self.table or self._overflow.full("processes", len(self.table)):
            return
        self.table[proc] = Process(
            proc=proc,
            order=len(self.table),
            pid=integer(body, "pid"),
            ns_pid=maybe_integer(body, "ns_pid", 0),
            parent=self._parent(body),
            name=text(body, "name"),
            cmdline=texts(body, "cmdline"),
            container_id=maybe_text(body, "container_id"),
            start_ns=integer(body, "start_ns"),
            env=_environment(body),
            traced=body.get("traced") is not False,
        )

    def _parent(self, body: Body) -> int | None:
        """One that is known already: so nobody is his own ancestor."""
        parent = maybe_integer(body, "parent", 0)
        return parent if parent in self.table else None

    def image(self, body: Body) -> None:
        """An IMAGE frame: the process runs another program now."""
        process = self.get(body)
        if process:
            process.name, process.cmdline = text(body, "name"), texts(body, "cmdline")
            process.env = _environment(body) if "env" in body else process.env

    def end(self, body: Body) -> None:
        """An EXIT frame."""
        process = self.get(body)
        if process:
            process.exit = Exit(
                integer(body, "at_ns"), maybe_integer(body, "code"), maybe_integer(body, "signal"), _sender(body),
                maybe_integer(body, "exiting_ns", 0), maybe_boolean(body, "oom"),
            )  # fmt: skip

    def link(self, body: Body) -> tuple[Process, Link] | None:
        """A LINK frame; what it says, None when the process is unknown."""
        process = self.get(body)
        hooks = items(body, "hooks", WIRE_HOOKS)
        if not all(type(h) is int and 0 <= h < WIRE_HOOKS for h in hooks):
            raise BadField("hooks holds something else than hook ids")
        library, path = text(body, "library"), text(body, "path")
        version = version_of(maybe_text(body, "version"))
        by_shim = body.get("method") == SHIM
        at_ns, appeared_ns = integer(body, "at_ns"), integer(body, "appeared_ns")
        link = Link(library, path, frozenset(hooks), at_ns, appeared_ns, version, by_shim)
        if process is None:
            return None
        if body.get("untimed") is True:
            process.entry_only |= link.hooks
        if not self._overflow.full("links of a process", len(process.links)):
            process.links.append(link)
        return process, link

    def count(self, body: Body) -> None:
        """A COUNTS frame: cumulative rows, the newest one counts."""
        hooks, times = _ids(body, "hooks", WIRE_HOOKS), _ids(body, "times", WIRE_TIMES)
        counts = raw(body, "counts", COUNT.itemsize)
        timed = raw(body, "timed", TIME.itemsize)
        if len(counts) != len(hooks) * COUNT.itemsize or len(timed) != len(times) * TIME.itemsize:
            raise BadField("counts and ids differ in number")
        process = self.get(body)
        if process is None:
            return
        for hook, row in zip(hooks, count_rows(counts), strict=True):
            self._set_count(process, hook, row)
        for i, number in enumerate(times):
            self._set_time(process, number, timed[i * TIME.itemsize : (i + 1) * TIME.itemsize])

    def _set_count(self, process: Process, hook: int, row: Counts) -> None:
        old = process.counts.get(hook)
        if old is None:
            if self._overflow.full("counter rows", self._rows):
                return
            self._rows += 1
        elif row.calls < old.calls:
            self.backwards.add(process.proc)
        process.counts[hook] = row

    def _set_time(self, process: Process, number: int, row: bytes) -> None:
        if number not in process.times:
            if self._overflow.full("histograms", self._times):
                process.untimed = True
                return
            self._times += 1
        process.times[number] = row


def _sender(body: Body) -> Sender | None:
    row = body.get("sender")
    if row is None:
        return None
    if not isinstance(row, list) or len(row) != 4 or not isinstance(row[3], str):
        raise BadField("sender is no signal")
    if not all(type(row[i]) is int and row[i] >= 0 for i in (0, 1)) or not (row[2] is None or type(row[2]) is int):
        raise BadField("sender holds something else than numbers")
    return Sender(row[0], row[1], row[2], row[3][:64])


def _environment(body: Body) -> dict[str, str]:
    found = mapping(body, "env")
    if not all(isinstance(value, str) for value in found.values()):
        raise BadField("env holds something else than strings")
    return {name: value[:64] for name, value in found.items()}


def count_rows(data: bytes) -> list[Counts]:
    """The rows of wire_count in `data`."""
    rows = np.frombuffer(data, dtype=COUNT)
    columns = [rows[name].tolist() for name in Counts._fields]
    return [Counts(*row) for row in zip(*columns, strict=True)]


def _ids(body: Body, key: str, limit: int) -> list[int]:
    numbers = items(body, key, limit)
    if not all(type(n) is int and 0 <= n < limit for n in numbers):
        raise BadField(f"{key} holds something else than ids")
    return numbers

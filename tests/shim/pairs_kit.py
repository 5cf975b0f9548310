"""Pairs of events alone, from Python: calls as wrappers make them, a driver that does what a test says, and what is told."""

from __future__ import annotations

import ctypes
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from gpu_kit import ROOT, Figures, Told

from stallscope.wire.hook_table import BY_NAME

TICK_S, OLD_S, RATE, FEW = 0.004, 0.03, 10_000_000, 100
SHORT = [f"-DPAIR_TICK_NS={TICK_S * 1e9:.0f}", f"-DPAIR_OLD_NS={OLD_S * 1e9:.0f}"]
FLAGS = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-pthread"]
SHARED = ("-shared", "-fPIC", "-fvisibility=hidden")
PLACES, REFUSALS, DEADLINE_S = 512, 256, 10.0
COMM, OTHER, STREAM, SIDE, CONTEXT = 0x7000, 0x8000, 0x100, 0x200, 0xC0
UNTRIED, EVENTS, NO_EVENTS = 0, 8, 9
IN_PROGRESS, NOT_READY = 7, 600
NAMES = {hook.id: name for name, hook in BY_NAME.items()}


class Kit(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("depth", "capturing", "capture_status", "record_status", "query_status",
                                            "create_status", "device", "comm_device", "ranks", "reaches_at_once",
                                            "has_no_driver")),
        *((name, ctypes.c_uint64) for name in ("current", "created", "destroyed", "wrong", "records", "watchers")),
        ("figures", Figures),
    ]  # fmt: skip


class Record(NamedTuple):
    event: int
    stream: int


class Pairs:
    """The library, loaded; calls as the wrappers make them."""

    def __init__(self, library: Path) -> None:
        self.lib = ctypes.CDLL(str(library), use_errno=True)
        self.lib.kit_told.restype = self.lib.kit_records.restype = self.lib.kit_queries.restype = ctypes.c_uint64
        self.kit = Kit.in_dll(self.lib, "kit")
        self.kit.ranks, self.kit.current = 2, CONTEXT
        self.lib.kit_open()
        self._told, self._records = (Told * (1 << 16))(), (ctypes.c_uint64 * (1 << 17))()
        self._numbers: dict[int, int] = {}

    def enter(self, name: str, **values: int) -> int:
        """With the next number of its communicator; that number."""
        words = BY_NAME[name].arguments.split()
        given = {"count": 8, "comm": COMM, "stream": STREAM, **values}
        a = (ctypes.c_uint64 * 8)(*(given.get(word, 0) for word in [*words, *[""] * 8][:8]))
        comm = given["comm"] if "comm" in words else 0
        n = self._numbers.get(comm, 0)
        self._numbers[comm] = n + ("stream" in words)
        self.kit.depth += name == "ncclGroupStart"
        place = {word: words.index(word) + 1 if word in words else 0 for word in ("comm", "count")}
        self.lib.kit_entered(BY_NAME[name].id, place["comm"], place["count"], a, n)
        return n

    def leave(self, name: str, status: int = 0) -> None:
        self.kit.depth -= name == "ncclGroupEnd"
        self.lib.kit_returned(BY_NAME[name].id, status)

    def call(self, name: str = "ncclAllReduce", status: int = 0, **values: int) -> int:
        n = self.enter(name, **values)
        self.leave(name, status)
        return n

    def records(self) -> list[Record]:
        """Since the last time."""
        count = self.lib.kit_records(self._records)
        return [Record(*self._records[2 * i : 2 * i + 2]) for i in range(count)]

    def pair(self, **values: int) -> tuple[int, int]:
        """The events of one call."""
        self.records()
        self.call(**values)
        begin, done = self.records()
        return begin.event, done.event

    def reach(self, *events: int) -> None:
        """The GPU comes to them."""
        for event in events:
            self.lib.kit_reach(ctypes.c_uint64(event))

    def told(self, least: int = 0) -> list[tuple[int, str, int, int]]:
        """(kind, function, number, communicator) since the last time: at least so many, and what comes with them."""
        end, found = time.monotonic() + DEADLINE_S, []
        while time.monotonic() < end and (len(found) < least or not self._rests()):
            count = self.lib.kit_told(self._told)
            assert all(t.flags == 0 for t in self._told[:count]), "no plugin told it"
            found += [(t.kind, NAMES[t.hook], t.n, t.comm) for t in self._told[:count]]
        return found

    def _rests(self) -> bool:
        """Whether nothing comes for a while."""
        time.sleep(OLD_S + 10 * TICK_S)
        return bool(self.lib.kit_has_told() == 0)

    def kinds(self, least: int = 0) -> list[tuple[int, int]]:
        """(kind, number) of COMM."""
        return [(kind, n) for kind, _, n, comm in self.told(least) if comm == COMM]

    @property
    def figures(self) -> dict[str, int]:
        """Those that are not 0."""
        return {name: v for name, _ in Figures._fields_ if (v := getattr(self.kit.figures, name))}


def build(folder: Path, *more: str, rate: int = RATE) -> Path:
    shim, out = ROOT / "native/shim", folder / "pairs"
    sources = [*map(str, sorted(shim.glob("pairs*.c"))), str(Path(__file__).parent / "pairs_kit.c")]
    command = [
        "gcc",
        *FLAGS,
        *SHORT,
        f"-DPAIR_RATE={rate}",
        f"-I{shim}",
        f"-I{ROOT}/native",
        "-o",
        str(out),
        *sources,
        "-ldl",
        *more,
    ]
    subprocess.run(command, check=True)
    return out

"""What others say of the job: NVML of the devices (GPU frames), NCCL's RAS (WITNESS frames). Never the judge."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stallscope.aggregate.checks import BadField, integer, items, mapping, maybe_text, text
from stallscope.aggregate.limits import Overflow
from stallscope.wire.frames import Body

__all__ = ["HISTORY_NS", "Gpu", "Sample", "Witness", "Witnesses"]

HISTORY_NS = 120_000_000_000
MAX_SAMPLES = 256
MAX_SAYS = 1024
MAX_PIDS = 1024
_NUMBERS = slice(2, 9)
_COLUMNS = 10


class Sample(NamedTuple):
    """One look at a device; None where NVML did not say. `throttle`: NVML's bits; `pids`: as the host sees them."""

    at_ns: int
    util_percent: int | None
    power_mw: int | None
    power_limit_mw: int | None
    sm_mhz: int | None
    sm_max_mhz: int | None
    memory_used_bytes: int | None
    throttle: int | None
    pids: frozenset[int]


@dataclass
class Gpu:
    """One device; `samples` are those of the last 120 s, oldest first."""

    index: int
    uuid: str | None
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))

    def latest(self, pids: Iterable[int] = ()) -> Sample:
        """The newest look at which one of these processes used it; where there is none, the newest at all."""
        wanted = frozenset(pids)
        return next((s for s in reversed(self.samples) if s.pids & wanted), self.samples[-1])


class Witness(NamedTuple):
    """`pids`: the processes that it names, in their own pid namespace."""

    source: str
    at_ns: int
    says: str
    pids: frozenset[int]


class Witnesses:
    """Filled by GPU and WITNESS frames.

    They come from a process that reads what strangers say, so a bad one does not end the source: it is the last that
    is taken.
    """

    def __init__(self, overflow: Overflow) -> None:
        self.gpus: dict[int, Gpu] = {}
        self.table: list[Witness] = []
        self.notes: list[str] = []
        self.refused = False
        self._overflow = overflow

    def look(self, body: Body) -> None:
        """A GPU frame."""
        self._guarded(self._look, body)

    def add(self, body: Body) -> None:
        """A WITNESS frame."""
        self._guarded(self._add, body)

    def _guarded(self, take: Callable[[Body], None], body: Body) -> None:
        if self.refused:
            return
        try:
            take(body)
        except BadField as error:
            self.refused = True
            self._note(f"what was said of GPUs and by NCCL's RAS makes no sense, the rest of it is left out: {error}")

    def _note(self, note: str) -> None:
        if note not in self.notes and not self._overflow.full("notes on GPUs", len(self.notes)):
            self.notes.append(note)

    def _look(self, body: Body) -> None:
        at_ns = integer(body, "at_ns")
        note = maybe_text(body, "note")
        rows = [_row(row) for row in items(body, "devices", 256)]
        if note:
            self._note(note)
        for row in rows:
            index, uuid = row[0], row[1]
            if index not in self.gpus and self._overflow.full("gpus", len(self.gpus)):
                continue
            gpu = self.gpus.setdefault(index, Gpu(index, uuid))
            gpu.uuid = uuid or gpu.uuid
            gpu.samples.append(Sample._make([at_ns, *row[_NUMBERS], frozenset(row[9])]))
            while gpu.samples[0].at_ns < at_ns - HISTORY_NS:
                gpu.samples.popleft()

    def _add(self, body: Body) -> None:
        detail = mapping(body, "detail")
        pids = items(detail, "pids", MAX_PIDS)
        if not all(type(pid) is int for pid in pids):
            raise BadField("pids holds something else than pids")
        witness = Witness(text(body, "source"), integer(body, "at_ns"), text(body, "says")[:MAX_SAYS], frozenset(pids))
        if not self._overflow.full("witnesses", len(self.table)):
            self.table.append(witness)


def _row(row: Any) -> list[Any]:
    """A device of a GPU frame, checked. Raises BadField."""
    if not isinstance(row, list) or len(row) != _COLUMNS:
        raise BadField(f"devices holds a row that has not {_COLUMNS} columns")
    index, uuid, pids = row[0], row[1], row[9]
    if type(index) is not int or not 0 <= index < 256:
        raise BadField("devices holds an impossible index")
    if uuid is not None and (not isinstance(uuid, str) or len(uuid) > 128):
        raise BadField("devices holds an impossible uuid")
    if not all(n is None or (type(n) is int and 0 <= n < 1 << 64) for n in row[_NUMBERS]):
        raise BadField("devices holds something else than numbers")
    if not isinstance(pids, list) or len(pids) > MAX_PIDS or not all(type(pid) is int for pid in pids):
        raise BadField("devices holds something else than pids")
    return row

"""What threads have done, and what processes know of pinned memory, as the kernel keeps it."""

from __future__ import annotations

from typing import Any, NamedTuple

from stallscope.capture._drain import ffi, lib
from stallscope.capture.rings import Rows, Table

__all__ = ["Deeds", "Flows", "RowsOfDeeds"]

_ARMED, _SINCE, _USED = 0, 1, 3  # words of struct wire_flow


class Deeds(NamedTuple):
    """What one thread has done: outermost calls by enum wire_deed, launches at their entry, others at their return."""

    tid: int
    lives: bool
    wait_ns: int
    deeds: tuple[int, ...]


class RowsOfDeeds(Rows):
    """The thread table, also for threads that have ended and whose row nobody has taken since."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._deeds: Any = None

    def deeds(self, tgid: int, last: bool) -> list[Deeds]:
        """Of one process. `last`: it has ended, and nothing is known of its threads any more after that."""
        if self._deeds is None:
            self._deeds = ffi.new("struct rows_deeds[]", lib.WIRE_ROWS)
        count = lib.rows__deeds(self._c, tgid, last, self._deeds, lib.WIRE_ROWS)
        return [Deeds(d.tid, bool(d.lives), d.wait_ns, tuple(d.deeds)) for d in self._deeds[0:count]]


class Flows(Table):
    """What each process slot knows of pinned memory and of its dry device (native/wire.h, wire_flow)."""

    def __init__(self, fd: int) -> None:
        self._words = ffi.sizeof("struct wire_flow") // 8
        super().__init__(fd, self._words, lib.WIRE_PROCS)

    def clear(self, slot: int) -> None:
        """Forget a process that has ended; most have left nothing there."""
        if not any(self.word(slot, word) for word in (_ARMED, _SINCE, _USED)):
            return
        for word in range(self._words):
            self.set_word(slot, word, 0)

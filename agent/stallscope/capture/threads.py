"""What each thread of a process does: THREADS frames. Counted in the kernel, so that sampling takes nothing away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stallscope.capture.deeds import Deeds
from stallscope.capture.procfs import clean
from stallscope.capture.pyconfig import Python, thread_states, u64
from stallscope.capture.pystack import PTHREAD_TID
from stallscope.capture.target import Target
from stallscope.wire.frames import Kind

__all__ = ["Threads"]

MAX_KNOWN, MAX_SENT = 4096, 512
MAX_NAME = 64
LAUNCH, TO_DEVICE = 0, 2  # enum wire_deed
Send = Callable[[Kind, dict[str, Any]], None]


class _Thread:
    """What was told of one. `is_python` None: nobody knows."""

    def __init__(self, now: int) -> None:
        self.since_ns = now
        self.name = ""
        self.is_python: bool | None = None
        self.told: Deeds | None = None


class Threads:
    """`look` once a second, and `bury` before the counters of a process that has ended go.

    Args:
        deeds: of a process, and whether it has ended.
        python_of: how a process's Python keeps its threads, None where there is none or it is not known.
    """

    def __init__(
        self, deeds: Callable[[int, bool], list[Deeds]], python_of: Callable[[int], Python | None], send: Send
    ) -> None:  # fmt: skip
        self._deeds, self._python_of, self._send = deeds, python_of, send
        self._known: dict[tuple[int, int], _Thread] = {}
        self._looked_ns: dict[int, int] = {}

    def look(self, targets: Sequence[Target], now: int) -> None:
        """Tell what changed."""
        live = {target.proc for target in targets}
        self._known = {key: thread for key, thread in self._known.items() if key[0] in live}
        for target in targets:
            if not target.preloaded:
                self._tell(target, now)
        self._looked_ns = dict.fromkeys(live, now)

    def bury(self, target: Target, now: int) -> None:
        """The last numbers of a process that has ended."""
        self._tell(target, now, has_ended=True)

    def is_fed(self, proc: int) -> bool:
        """Whether threads that are none of Python's have given the device work."""
        return any(
            owner == proc and thread.is_python is False and thread.told is not None and _feeds(thread.told)
            for (owner, _), thread in self._known.items()
        )

    def _tell(self, target: Target, now: int, *, has_ended: bool = False) -> None:
        rows = [row for row in self._deeds(target.pid, has_ended) if any(row.deeds)]
        pythons = self._pythons(target, rows)
        told = []
        for row in rows[:MAX_SENT]:
            key = target.proc, row.tid
            if key not in self._known and len(self._known) >= MAX_KNOWN:
                continue
            thread = self._known.setdefault(key, _Thread(self._looked_ns.get(target.proc, now)))
            if thread.told is not None and thread.told.deeds == row.deeds:
                continue
            thread.told = row
            thread.name = _name(target.pid, row.tid) or thread.name
            if pythons is not None and thread.is_python is not True and row.lives:
                thread.is_python = row.tid in pythons
            told.append([row.tid, thread.name, thread.is_python, thread.since_ns, row.wait_ns, list(row.deeds)])
        if told:
            self._send(Kind.THREADS, {"at_ns": now, "proc": target.proc, "rows": told})

    def _pythons(self, target: Target, rows: list[Deeds]) -> set[int] | None:
        """Threads that Python knows, as the process's own pid namespace numbers them; None where nobody can say."""
        python = self._python_of(target.proc)
        if python is None or not rows or target.facts.ns_pid not in (None, target.pid):
            return None
        found, native = set(), python.layout.native_id
        for state, thread in thread_states(target.pid, python):
            found.add(u64(target.pid, state + native) if native else u64(target.pid, thread + PTHREAD_TID) & 0xFFFFFFFF)
        return found


def _feeds(row: Deeds) -> int:
    return row.deeds[LAUNCH] + row.deeds[TO_DEVICE]


def _name(pid: int, tid: int) -> str:
    try:
        return clean(Path(f"/proc/{pid}/task/{tid}/comm").read_text(errors="replace").rstrip("\n"))[:MAX_NAME]
    except OSError:
        return ""

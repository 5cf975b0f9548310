"""Processes of a daemon: found one by one, and let go while they run on."""

from __future__ import annotations

import contextlib
from typing import Any

from stallscope.capture.population import Population
from stallscope.capture.target import Target

__all__ = ["NodePopulation"]


class NodePopulation(Population):
    """As Population; `admits` is asked about the children that a process has when it is found."""

    def __init__(self, *parts: Any, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self._released: dict[int, int] = {}

    def adopt_found(self, pid: int, since_ns: int | None) -> Target | None:
        """Trace a process that was found to use CUDA, and its descendants; None when it is gone or there is no room.

        Args:
            since_ns: since when it may have made calls unseen, None for what ran before the capture did.
        """
        self.ancestors.find([pid])
        self.ancestors.forget(pid)
        before = set(self._by_pid)
        self._adopt_one(pid, self._parent_proc(pid), given=False)
        target = self._by_pid.get(pid)
        if target is None:
            return None
        if since_ns is not None:
            target.appeared_ns = since_ns
        if self._follow:
            self._adopt_descendants([pid])
        for other in [other for other in self.live() if other.pid not in before]:
            self._tables.procs.add(other.pid, other.slot, follow=self._follow)
            self._linker.link_process(other, since_ns)
        return target

    def release(self, target: Target) -> None:
        """Let a process go that runs on. Its slot stays taken until it ends: the rows of its threads name it."""
        self._by_pid.pop(target.pid, None)
        self._by_slot.pop(target.slot, None)
        target.ended = True
        self._young.drop(target)
        self._shims.forget(target)
        self._forget_links_later(target)
        self._released[target.pid] = target.slot
        with contextlib.suppress(OSError):  # ended
            self._tables.procs.add(target.pid, target.slot, follow=False)

    def _forget_links_later(self, target: Target) -> None:
        entries, returns = target.links()
        for linked in target.linked.values():
            self._sharing.forget(linked)
        self._reaper.close_later(entries, returns)
        target.close()

    def _claim(self, pid: int) -> int | None:
        return self._released.pop(pid, None) or super()._claim(pid)

    def _uses_cuda(self, target: Target) -> bool:
        return True

    def _exited(self, pid: int, code: int, ts_ns: int) -> None:
        slot = self._released.pop(pid, None)
        if slot is not None:
            self._free_slot(slot)
        super()._exited(pid, code, ts_ns)

    def _unknown_slots(self) -> set[tuple[int, int]]:
        let_go = set(self._released.values())
        return {(slot, pid) for slot, pid in super()._unknown_slots() if slot not in let_go}

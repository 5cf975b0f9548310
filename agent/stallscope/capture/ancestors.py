"""Who started the traced processes: shown, asked for their environment, and not traced."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from stallscope.capture.announcing import tell_process
from stallscope.capture.exits import exit_code_of, has_ended
from stallscope.capture.procfs import facts_of, parent_of
from stallscope.capture.target import Target
from stallscope.wire.frames import Kind

__all__ = ["Ancestors", "chain_of", "parents_first"]

MOST = 32
Send = Callable[[Kind, dict[str, Any]], None]


def chain_of(pid: int) -> list[int]:
    """Its ancestors as they are now, the nearest first, as far as this pid namespace shows them."""
    chain: list[int] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        while (pid := parent_of(pid)) > 0 and pid not in chain and len(chain) < MOST:
            chain.append(pid)
    return chain


def parents_first(pids: list[int]) -> list[int]:
    """In the order given, but for one whose ancestor is given, too."""
    return sorted(pids, key=lambda pid: len(set(chain_of(pid)) & set(pids)))


class Ancestors:
    """Told before those whose ancestors they are.

    Args:
        number: gives the next key of a process in the report.

    Attributes:
        on_image: called for each one that is found.
    """

    def __init__(self, send: Send, clock: Callable[[], int], number: Callable[[], int]) -> None:
        self._send, self._clock, self._number = send, clock, number
        self._by_pid: dict[int, Target] = {}
        self.on_image: Callable[[Target], None] = lambda target: None

    def find(self, pids: list[int]) -> None:
        """Tell the ancestors of processes that are about to be traced. This process and its own are left out."""
        for pid in pids:
            chain = chain_of(pid)
            if os.getpid() in chain:
                chain = chain[: chain.index(os.getpid())]
            for one in reversed(chain):
                if one not in pids and one not in self._by_pid:
                    self._add(one)

    def _add(self, pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return
        try:
            facts = facts_of(pid)
        except OSError:
            os.close(pidfd)
            return
        target = Target(self._number(), 0, facts, self.proc_of(facts.ppid), pidfd, self._clock())
        self._by_pid[pid] = target
        tell_process(self._send, target, traced=False)
        self.on_image(target)

    def proc_of(self, pid: int) -> int | None:
        """Report key of the ancestor that has this pid now."""
        target = self._by_pid.get(pid)
        return None if target is None or has_ended(target.pidfd) else target.proc

    def live(self) -> list[Target]:
        """Those that have not ended."""
        return list(self._by_pid.values())

    def check(self) -> None:
        """Tell which have ended; once a second."""
        for pid, target in list(self._by_pid.items()):
            if not has_ended(target.pidfd):
                continue
            code = exit_code_of(pid, target.pidfd)
            signal = (code & 0x7F) or None if code is not None else None
            plain = None if code is None or signal else code >> 8 & 0xFF
            body = {"proc": target.proc, "at_ns": self._clock(), "code": plain, "signal": signal}
            self._send(Kind.EXIT, body)
            self.forget(pid)

    def forget(self, pid: int) -> None:
        """It has ended, or is traced from now on."""
        target = self._by_pid.pop(pid, None)
        if target is not None:
            target.ended = True
            target.close()

    def close(self) -> None:
        """Give the descriptors back."""
        for pid in list(self._by_pid):
            self.forget(pid)

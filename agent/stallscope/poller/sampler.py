"""Looks at the devices once a second, in a thread that may hang without harm."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from stallscope.poller.nvml import Look

__all__ = ["HANG_NS", "Sampler"]

PERIOD_NS = 1_000_000_000
HANG_NS = 3_000_000_000
HANGS = "NVML does not answer: a call has not returned for over 3 s"


class Sampler:
    """One thread, ever: while a call hangs there is no other look.

    Args:
        look: may block for ever.
        clock: CLOCK_MONOTONIC in ns.
    """

    def __init__(self, look: Callable[[], Look], clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._look = look
        self._clock = clock
        self._since_ns: int | None = None
        self._latest: tuple[int, Look] | None = None

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._work, name="nvml", daemon=True).start()

    def latest(self) -> tuple[int, Look] | None:
        """When the newest look began, and what it saw; nothing while a call hangs, and before the first."""
        now, since = self._clock(), self._since_ns
        if since is not None and now - since > HANG_NS:
            return now, Look([], HANGS)
        return self._latest

    def _work(self) -> None:
        while True:
            begin = self._clock()
            self._since_ns = begin
            self._latest = begin, self._careful_look()
            self._since_ns = None
            time.sleep(max(0, PERIOD_NS - (self._clock() - begin)) / 1e9)

    def _careful_look(self) -> Look:
        try:
            return self._look()
        except Exception as error:  # a thread that ends here would look like devices that stand still
            return Look([], f"NVML could not be read: {type(error).__name__}: {error}"[:200])

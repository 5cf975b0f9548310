"""Loader processes of a rank: each makes batches and hands them over through a pipe."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

BATCH_BYTES = 4096  # a token of the batch; a pipe holds some of them, so that loaders work ahead
LOAD_S = 0.001


class Loaders:
    """Forked before the rank has anything to do with CUDA; they end when the rank does, however it does."""

    def __init__(self, count: int, seed: int) -> None:
        self._pipes: list[int] = []
        self._next = 0
        self.pids = [self._start(seed + number) for number in range(count)]
        self._random = random.Random(seed)  # noqa: S311

    def _start(self, seed: int) -> int:
        readable, writable = os.pipe()
        pid = os.fork()
        if pid == 0:
            for other in (*self._pipes, readable):
                os.close(other)
            _load(writable, random.Random(seed))  # noqa: S311
            os._exit(0)
        os.close(writable)
        self._pipes.append(readable)
        return pid

    def next_batch(self) -> None:
        """From the loaders in turn; without any, the rank does the work itself."""
        if not self._pipes:
            time.sleep(LOAD_S * self._random.uniform(0.5, 1.5))
            return
        pipe = self._pipes[self._next % len(self._pipes)]
        self._next += 1
        missing = BATCH_BYTES
        while missing:
            missing -= len(os.read(pipe, missing))

    def close(self) -> None:
        for pipe in self._pipes:
            os.close(pipe)
        for pid in self.pids:
            os.waitpid(pid, 0)


def _load(pipe: int, chance: random.Random) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError):
        while True:
            time.sleep(LOAD_S * chance.uniform(0.5, 1.5))
            os.write(pipe, bytes(BATCH_BYTES))

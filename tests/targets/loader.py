"""A trainer that takes batches from workers as torch's DataLoader does: a queue of indices each, one queue of results.

python loader.py WORKERS BATCHES METHOD [SLOW_FIFO]: worker 1 reads each batch from the named pipe, which a thread here feeds a
little late. Says "ready" and the pids of the workers as JSON; at "go" it takes the batches, then says what it waited
for (JSON), and waits for the end of its stdin.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import Any

from deaths import FATES

FETCH_S, SLOW_S, STEP_S = 0.01, 0.6, 0.1


def worker(number: int, fifo: str, indices: Any, results: Any) -> None:
    results.put((number, os.getpid()))
    slow = os.open(fifo, os.O_RDONLY) if fifo and number == 1 else None
    while (order := indices.get()) is not None:
        if isinstance(order, str):  # in the midst of a batch
            FATES[order]()
            return
        if slow is not None:
            os.read(slow, 1)
        else:
            time.sleep(FETCH_S)
        results.put((order, bytes(1000)))


def feed(fifo: str, batches: int, go: threading.Event) -> None:
    with contextlib.suppress(BrokenPipeError):
        fd = os.open(fifo, os.O_WRONLY)
        go.wait()
        for _ in range(batches):
            time.sleep(SLOW_S)
            os.write(fd, b"x")


class Loader:
    """Batches in order, one a worker ahead."""

    def __init__(self, workers: int, method: str, fifo: str) -> None:
        context = multiprocessing.get_context(method)
        self._results = context.Queue()
        self.indices = [context.Queue() for _ in range(workers)]
        self._workers = [
            context.Process(target=worker, args=(number, fifo, queue, self._results), daemon=True)
            for number, queue in enumerate(self.indices)
        ]
        for one in self._workers:
            one.start()
        self.pids = dict(self._results.get() for _ in self._workers)
        self._held: dict[int, Any] = {}

    def take(self, batch: int) -> float:
        """Wait for a batch; how long that took, in seconds."""
        begin = time.monotonic()
        while batch not in self._held:
            number, data = self._results.get()
            self._held[number] = data
        del self._held[batch]
        return time.monotonic() - begin

    def order(self, batch: int) -> None:
        self.indices[batch % len(self.indices)].put(batch)

    def end(self) -> None:
        for queue in self.indices:
            queue.put(None)
        for one in self._workers:
            one.join()


def main() -> None:
    workers, batches, method = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    fifo = sys.argv[4] if len(sys.argv) > 4 else ""
    cudart = ctypes.CDLL("libcudart.so.12")
    go = threading.Event()
    if fifo:
        threading.Thread(target=feed, args=(fifo, batches, go), daemon=True).start()
    loader = Loader(workers, method, fifo)
    cudart.cudaDeviceSynchronize()
    print("ready", json.dumps(loader.pids), flush=True)
    sys.stdin.readline()
    cudart.cudaDeviceSynchronize()
    go.set()
    begin, waited = time.monotonic(), 0.0
    for batch in range(workers):
        loader.order(batch)
    for batch in range(batches):
        waited += loader.take(batch)
        loader.order(batch + workers) if batch + workers < batches else None
        stop = time.monotonic() + STEP_S
        while time.monotonic() < stop:
            cudart.cudaDeviceSynchronize()
    print(json.dumps({"waited_s": waited, "total_s": time.monotonic() - begin}), flush=True)
    loader.end()
    sys.stdin.read()


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()

"""A trainer that waits for SECONDS in `train_step`, while readers wait in a queue and one thread sleeps: threads.py SECONDS."""

from __future__ import annotations

import queue
import sys
import threading
import time
from typing import Any

from cuda_calls import Runtime, ready

READERS = 3


class Reader:
    def __init__(self, items: queue.Queue[int]) -> None:
        self._items = items

    def __next__(self) -> int:
        return self._items.get()


def read(reader: Any) -> None:
    next(reader)


def rest(done: threading.Event) -> None:
    while not done.is_set():
        time.sleep(1)


def train_step(runtime: Runtime, stream: Any, wait_ns: int) -> None:
    runtime.launch(stream, wait_ns)
    runtime.library.cudaStreamSynchronize(stream)


def main() -> None:
    runtime = Runtime()
    stream = runtime.stream()
    items: queue.Queue[int] = queue.Queue()
    done = threading.Event()
    threads = [threading.Thread(target=read, args=(Reader(items),)) for _ in range(READERS)]
    threads.append(threading.Thread(target=rest, args=(done,)))
    for thread in threads:
        thread.start()
    ready()
    train_step(runtime, stream, int(float(sys.argv[1]) * 1e9))
    done.set()
    for number in range(READERS):
        items.put(number)


if __name__ == "__main__":
    main()

"""A trainer whose spawned workers each come to another end, at a line of its stdin.

Says "ready" and fate -> pid as JSON. At "go" the workers meet their fates; at "end" it ends, else it waits.
OOM_CGROUP: folder of a cgroup with little memory, for the worker that is to run out of it.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

TIDY_S = 2.0


def tidy() -> None:
    print("tidy", time.monotonic_ns(), flush=True)
    time.sleep(TIDY_S)


def segv() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(8)


def run_out() -> None:
    (Path(os.environ["OOM_CGROUP"]) / "cgroup.procs").write_text(str(os.getpid()))
    held = []
    while True:
        held.append(bytearray(os.urandom(1 << 10) * (1 << 10)))


def patient(number: int, frame: Any) -> None:
    time.sleep(TIDY_S / 4)
    sys.exit(3)


FATES = {
    "exit7": lambda: sys.exit(7), "clean": lambda: None, "atexit": lambda: atexit.register(tidy) and None,
    "late7": lambda: atexit.register(tidy) and sys.exit(7),
    "segv": segv, "oom": run_out, "killed": lambda: time.sleep(60), "termed": lambda: time.sleep(60),
    "handled": lambda: time.sleep(60), "abort": lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)) or os.abort(),
}  # fmt: skip


def worker(fate: str, ready: Any, go: Any) -> None:
    if fate == "handled":
        signal.signal(signal.SIGTERM, patient)
    ready.put((fate, os.getpid()))
    go.wait()
    FATES[fate]()


def main() -> None:
    cudart = ctypes.CDLL("libcudart.so.12")
    cudart.cudaDeviceSynchronize()
    context = multiprocessing.get_context("spawn")
    ready, go = context.Queue(), context.Event()
    workers = {fate: context.Process(target=worker, args=(fate, ready, go)) for fate in sys.argv[1:]}
    for one in workers.values():
        one.start()
    pids = dict(ready.get() for _ in workers)
    print("ready", json.dumps({**pids, "trainer": os.getpid()}), flush=True)
    for line in sys.stdin:
        if line.strip() != "go":
            break
        go.set()
        time.sleep(0.2)
        for fate, number in (("termed", signal.SIGTERM), ("handled", signal.SIGTERM), ("killed", signal.SIGKILL)):
            if fate in pids:
                os.kill(pids[fate], number)
        for one in workers.values():
            one.join()
        cudart.cudaDeviceSynchronize()
        print("over", flush=True)


if __name__ == "__main__":
    main()

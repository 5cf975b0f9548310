"""A job in small: a trainer that uses CUDA, workers that lose their environment, a chain of filtered ones, a rewritten one.

Says "ready" and the pids as JSON, ends with its stdin. As a worker, says its pid and waits for its parent's end.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKERS, GENERATIONS = 4, 3


def worker(pids: Any, end: Any) -> None:
    """Of multiprocessing; the first it does is to lose its environment."""
    os.environ.clear()
    pids.put(os.getpid())
    end.wait()


def filtered(left: int) -> list[int]:
    """Start a child with PATH alone, that starts a child.. ; their pids."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH")}
    command = [sys.executable, __file__, "filtered", str(left)]
    child = subprocess.Popen(command, env=kept, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout
    below: list[int] = json.loads(child.stdout.readline())
    return [child.pid, *below]


def overwrite() -> None:
    """As setproctitle does: the environment moves away, a title and zeros take its place."""
    libc = ctypes.CDLL(None)
    libc.setenv.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int]
    for name, value in list(os.environ.items()):
        libc.setenv(name.encode(), value.encode(), 1)  # a copy on the heap
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, b"tle of a process", 16)


def rewritten() -> int:
    child = subprocess.Popen(
        [sys.executable, __file__, "title"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout
    child.stdout.readline()
    return child.pid


def train() -> None:
    """The trainer."""
    cudart = ctypes.CDLL("libcudart.so.12")
    context = multiprocessing.get_context("spawn")
    queue, end = context.Queue(), context.Event()
    workers = [context.Process(target=worker, args=(queue, end)) for _ in range(WORKERS)]
    for one in workers:
        one.start()
    pids = {"workers": sorted(queue.get() for _ in workers), "chain": filtered(GENERATIONS), "title": rewritten()}
    cudart.cudaDeviceSynchronize()
    print("ready", json.dumps({"trainer": os.getpid(), **pids}), flush=True)
    for _ in sys.stdin:
        cudart.cudaDeviceSynchronize()
    end.set()
    for one in workers:
        one.join()


if __name__ == "__main__":
    if sys.argv[1:2] == ["filtered"]:
        left = int(sys.argv[2]) - 1
        print(json.dumps(filtered(left) if left else []), flush=True)
        sys.stdin.read()
    elif sys.argv[1:2] == ["title"]:
        overwrite()
        print("overwritten", flush=True)
        sys.stdin.read()
    else:
        train()

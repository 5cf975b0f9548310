"""Trainers that each wait for a worker that comes to another end: `python losers.py FATE...`, fates as in deaths.py.

Says "ready" and fate -> [pid of the trainer, of the worker] as JSON. At a line of its stdin the workers meet their fates
in the midst of a batch, which their trainers wait for until the next line. The fate "fork" is SIGKILL for a forked worker.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from loader import Loader

SENT = {"termed": signal.SIGTERM, "killed": signal.SIGKILL, "fork": signal.SIGKILL}


def lose(fate: str) -> None:
    if fate == "oom":  # all of this job; the kernel ends the largest
        (Path(os.environ["OOM_CGROUP"]) / "cgroup.procs").write_text(str(os.getpid()))
    cudart = ctypes.CDLL("libcudart.so.12")
    loader = Loader(2, "fork" if fate == "fork" else "spawn", "")
    cudart.cudaDeviceSynchronize()
    print(json.dumps([os.getpid(), loader.pids[1], loader.pids[0]]), flush=True)
    sys.stdin.readline()
    cudart.cudaDeviceSynchronize()
    loader.order(0)
    loader.take(0)
    loader.indices[1].put("killed" if fate == "fork" else fate)
    if fate in SENT:
        os.kill(loader.pids[1], SENT[fate])
    loader.take(1)


def main() -> None:
    jobs = {
        fate: subprocess.Popen(
            [sys.executable, __file__, "lose", fate], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for fate in sys.argv[1:]
    }
    pids = {fate: json.loads(job.stdout.readline()) for fate, job in jobs.items()}
    print("ready", json.dumps({fate: both[:2] for fate, both in pids.items()}), flush=True)
    sys.stdin.readline()
    for job in jobs.values():
        job.stdin.write("go\n")
        job.stdin.flush()
    sys.stdin.readline()
    for fate, job in jobs.items():
        job.kill()
        os.kill(pids[fate][2], signal.SIGKILL)  # the other worker would wait for its trainer for good


if __name__ == "__main__":
    lose(sys.argv[2]) if sys.argv[1] == "lose" else main()

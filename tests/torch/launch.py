"""Starts the ranks of a job when a line comes on stdin, as torchrun would: launch.py WORLD PROGRAM FOLDER ...

They meet at a store in which the first one waits for all, so that none waits for a slow start inside NCCL.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def main() -> None:
    world, program, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    print("ready", flush=True)
    sys.stdin.readline()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "RENDEZVOUS": f"tcp://127.0.0.1:{port}",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, program, str(folder / f"rank{rank}.json"), *sys.argv[4:]]
        with (folder / f"rank{rank}.log").open("w") as log:
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    print("pids " + " ".join(str(rank.pid) for rank in ranks), flush=True)
    print("codes " + " ".join(str(rank.wait()) for rank in ranks), flush=True)


if __name__ == "__main__":
    main()

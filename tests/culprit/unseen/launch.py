"""``launch.py NAME RANKS FOLDER``: waits for a line on stdin, then starts the ranks as torchrun does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def main() -> int:
    name, ranks, folder = sys.argv[1:]
    if not sys.stdin.readline():
        return 1
    program = str(Path(__file__).with_name("faults.py"))
    started = []
    for rank in range(int(ranks)):
        environment = {**os.environ, "STALLSCOPE_SIM_DEVICES": "8", "RANK": str(rank), "WORLD_SIZE": ranks}
        words = [sys.executable, program, name, str(rank), folder]
        started.append(subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL))
    for process in started:
        process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())

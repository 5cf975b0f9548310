"""crowd.py PROGRAM COUNT GAP_S [ARGUMENT...]: starts COUNT processes one after another, each at work as soon as it is up.

Prints "ready", waits for a line, then one line of JSON: the truth of every process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

SETTLE_S = float(os.environ.get("CROWD_SETTLE_S", "0.15"))  # for the tracer to link before the first call


def main() -> None:
    """Start, let go, collect."""
    program, count, gap_s, *words = sys.argv[1:]
    print("ready", flush=True)
    sys.stdin.readline()
    started = []
    for _ in range(int(count)):
        process = subprocess.Popen([program, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "ready\n"
        time.sleep(SETTLE_S)
        process.stdin.write("go\n")
        process.stdin.flush()
        started.append(process)
        time.sleep(float(gap_s))
    truths = [json.loads(process.communicate()[0]) for process in started]
    print(json.dumps({"pid": os.getpid(), "children": truths}))


main()

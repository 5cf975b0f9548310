"""inside.py LIBRARY COUNT: starts places.py and the tracer beside it, in whatever namespaces it runs itself, and prints
[truth, report]."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    library, count = sys.argv[1], int(sys.argv[2])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    target = subprocess.Popen(["/usr/bin/python3", HERE / "places.py"], **pipes)  # type: ignore[call-overload]

    def do(*step: object, answer: bool = True) -> str:
        target.stdin.write(json.dumps(step) + "\n")
        target.stdin.flush()
        return target.stdout.readline() if answer else ""

    target.stdout.readline()
    do("load", "x", library, "local")
    command = [sys.executable, "-m", "stallscope.cli.main", "attach", str(target.pid), "--json", "--sample", "1/1"]
    tracer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in tracer.stderr:
        sys.stderr.write(line)
        if line.startswith("attached to PID"):
            break
    do("call", "x", count)
    truth = json.loads(do("end"))
    report = json.loads(tracer.communicate(timeout=60)[0])
    print(json.dumps([truth, report]), flush=True)
    os._exit(0)


main()

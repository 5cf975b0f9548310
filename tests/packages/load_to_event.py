"""load_to_event.py: a target that calls all the time, `attach` by auto; prints which backend was used, what the report
counted, and how long after the begin of the load the first event was."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from stallscope.capture import loader
from stallscope.paths import SIM_LIB
from stallscope.wire.columns import records
from stallscope.wire.frames import FILE_HEADER_BYTES, Decoder, Kind

CALLS = (
    "import ctypes, time\n"
    "cuda = ctypes.CDLL('libcudart.so.12')\n"
    "cuda.cudaDeviceSynchronize(); print('ready', flush=True)\n"
    "while True:\n"
    "    cuda.cudaDeviceSynchronize(); time.sleep(0.001)\n"
)


def main() -> None:
    env = {"LD_LIBRARY_PATH": str(SIM_LIB), "STALLSCOPE_SIM_LIB": str(SIM_LIB), "PATH": "/usr/bin"}
    target = subprocess.Popen(["/usr/bin/python3", "-c", CALLS], env=env, stdout=subprocess.PIPE, text=True)
    assert target.stdout is not None
    target.stdout.readline()
    began: list[int] = []
    loading = loader.load

    def load(*args: object, **more: object) -> object:
        began.append(time.monotonic_ns())
        return loading(*args, **more)  # type: ignore[arg-type]

    loader.load = load  # type: ignore[assignment]
    from stallscope.cli.main import main as stallscope

    words = ["attach", str(target.pid), "--duration", "2", "--sample", "1/1", "-o", "/tmp/a.stall", "--json"]
    with open("/tmp/report.json", "w") as out:
        saved, sys.stdout = sys.stdout, out
        code = stallscope(words)
        sys.stdout = saved
    target.kill()
    times, backend = [], None
    for frame in Decoder().feed(Path("/tmp/a.stall").read_bytes()[FILE_HEADER_BYTES:]):
        if frame.kind == Kind.HELLO:
            backend = frame.body["backend"]
        if frame.kind == Kind.EVENTS:
            times.append(records(frame.body["data"])["ts_ns"])
    first = int(np.concatenate(times).min())
    print(
        json.dumps(
            {"code": code, "backend": backend, "events": sum(map(len, times)), "load_to_event_ns": first - began[0]}
        )
    )


main()

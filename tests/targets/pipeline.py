"""pipeline.py BATCHES [PERIOD_US]: iterates over a native pipeline, as a training loop does over DALI's.

Prints "ready" once the pipeline runs, waits for a line, and prints one line of JSON: "driver": waits in the driver,
"waited_ns": time in the condition variable by this program's clock, "lines": {class: line}, "copies": of the producers
so far; ends with another line.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time

PRODUCERS = 2
where = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../build/targets/libpipeline.so")
library = ctypes.CDLL(os.environ.get("STALLSCOPE_TARGET_LIB", where))
library.pipeline_copies.restype = ctypes.c_ulong


class Batches:
    """Waits for each batch on a condition variable, in C++."""

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> None:
        library.pipeline_next()


class Direct(Batches):
    """Waits for each batch in the driver, in its own thread."""

    def __next__(self) -> None:
        assert library.pipeline_next_in_driver() == 0


def main() -> None:
    batches, period_us = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 40_000
    library.pipeline_open(PRODUCERS, period_us)
    print("ready", flush=True)
    sys.stdin.readline()
    indirect, direct = Batches(), Direct()
    waited_ns = 0
    for _ in range(batches):
        asked_ns = time.monotonic_ns()
        next(indirect)
        waited_ns += time.monotonic_ns() - asked_ns
        next(direct)
    lines = {kind.__name__: kind.__next__.__code__.co_firstlineno + 1 for kind in (Batches, Direct)}
    truth = {"target": "pipeline.py", "pid": os.getpid(), "driver": batches, "waited_ns": waited_ns}
    print(json.dumps(truth | {"lines": lines, "copies": library.pipeline_copies()}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()

"""churnsites.py SECONDS: fresh functions that wait once and are gone, among many that only come and go.

As waitsites.py, whose shapes of code four threads go through meanwhile: "ready", a line, one line of JSON with the truth.
Waits are of 0.3, 5 and 20 ms: the longer ones can be read while they last. About 45 fresh functions a second.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import waitsites
from cuda_calls import ready
from waitsites import local, runtime, seen, thread, wait

WAITS_NS = (300_000, 5_000_000, 20_000_000)
BETWEEN = 40


def fresh(number: int) -> None:
    """One function, at another line each time, and at an address where another one was."""
    waitsites.wait_ns = WAITS_NS[number % 3]
    text = "\n" * (number % 997) + f"def fresh_{number}():\n    seen(); wait()()\nfresh_{number}()\n"
    exec(compile(text, "<churn>", "exec"), {"seen": seen, "wait": wait})
    for other in range(BETWEEN):
        exec(compile("\n" * (other % 7) + f"def other_{other}():\n    return {number}\n", "<other>", "exec"), {})


def main() -> None:
    seconds = float(sys.argv[1])
    runtime.library.cudaEventRecord(None, None)
    ready()
    local.stream = runtime.stream()
    threads = [threading.Thread(target=thread, args=(5,)) for _ in range(4)]
    for each in threads:
        each.start()
    number, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        number += 1
        fresh(number)
        time.sleep(0.01)
    for each in threads:
        each.join()
    if "STALLSCOPE_LINGER" in os.environ:
        ready()
    waitsites.tell("churnsites.py")


if __name__ == "__main__":
    main()

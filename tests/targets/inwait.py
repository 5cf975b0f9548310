"""inwait.py [WAIT_MS [AFTER]]: sits in a long cudaStreamSynchronize, called from a function with a telling name.

Prints "waiting" once inside; that call stands under "before_calls". After it come AFTER launches with a 1 ms wait each.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time

from cuda_calls import Runtime

SETTLE_S = 0.05


def sit_in_the_long_wait(runtime: Runtime, stream: ctypes.c_void_p) -> None:
    runtime.call("cudaStreamSynchronize", stream)


def announce(entering: threading.Event) -> None:
    entering.wait()
    time.sleep(SETTLE_S)
    print("waiting", flush=True)


def main() -> None:
    wait_ms = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    after = int(sys.argv[2]) if len(sys.argv) > 2 else 10
    runtime, entering = Runtime(), threading.Event()
    announcer = threading.Thread(target=announce, args=(entering,))
    announcer.start()
    stream = runtime.stream()
    runtime.launch(stream, wait_ms * 1_000_000)
    entering.set()
    sit_in_the_long_wait(runtime, stream)
    announcer.join()
    before = {f"before_{key}": value for key, value in runtime.report().items()}
    runtime.reset()
    for _ in range(after):
        runtime.launch(stream, 1_000_000)
        runtime.call("cudaStreamSynchronize", stream)
    print(json.dumps({"target": "inwait.py", "pid": os.getpid(), **before, **runtime.report()}))


if __name__ == "__main__":
    main()

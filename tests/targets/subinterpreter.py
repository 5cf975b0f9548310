"""subinterpreter.py ROUNDS: waits from the main interpreter and from another one in the same thread.

Prints "ready", waits for a line, and ends with one line of JSON: "sites" {"function:line": count} of the main one's waits,
"others" the number of the other one's, all from the function `other`. For any CPython from 3.9 on.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from cuda_calls import Runtime, ready

runtime = Runtime()
stream = runtime.stream()
OTHERS = 20
TEXT = f"""
import ctypes
library = ctypes.CDLL({runtime.library._name!r})
def other():
    library.cudaStreamSynchronize(ctypes.c_void_p({stream.value}))
for _ in range({OTHERS}): other()
"""


def run_in_another() -> None:
    """The module's name and its functions changed from version to version."""
    if sys.version_info >= (3, 13):
        import _interpreters as interpreters

        interpreters.exec(interpreters.create("legacy"), TEXT)
    else:
        import _xxsubinterpreters as interpreters  # type: ignore[import-not-found, no-redef]

        options: dict[str, Any] = {"isolated": False}
        interpreters.run_string(interpreters.create(**options), TEXT)


def waits() -> None:
    runtime.library.cudaStreamSynchronize(stream)


def main() -> None:
    ready()
    rounds = int(sys.argv[1])
    for _ in range(rounds):
        run_in_another()
        waits()
    line = waits.__code__.co_firstlineno + 1
    print(json.dumps({"target": "subinterpreter.py", "pid": os.getpid(), "calls": dict(runtime.calls),
                      "sites": {f"waits:{line}": rounds}, "others": OTHERS * rounds}))  # fmt: skip


if __name__ == "__main__":
    main()

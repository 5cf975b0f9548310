"""bordersites.py FOLDER ROUNDS: waits below a C extension that lies in FOLDER, and knows its own call sites.

Prints "ready", waits for a line, and ends with one line of JSON: "sites" {"function:line": count}.
For any CPython from 3.9 on.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import Counter
from typing import Any

from cuda_calls import Runtime, ready

sys.path.insert(0, sys.argv[1])
import border  # type: ignore[import-not-found]

runtime = Runtime()
stream = runtime.stream()
truth: Counter[str] = Counter()


def seen() -> None:
    frame = sys._getframe(1)
    truth[f"{getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}:{frame.f_lineno}"] += 1
    runtime.launch(stream, 100_000)


def wait() -> Any:
    return functools.partial(runtime.library.cudaStreamSynchronize, stream)


# What is counted and what waits stand on one line.
# ruff: noqa: E702
# fmt: off
def called_back() -> None:
    seen(); wait()()


def twice() -> None:
    border.call(called_back)
    seen(); wait()()


def generated() -> Any:
    yield border.call(called_back)


def outer() -> None:
    border.call(called_back)
    border.call(twice)
    list(generated())


# fmt: on
def main() -> None:
    ready()
    for _ in range(int(sys.argv[2])):
        outer()
    print(json.dumps({"target": "bordersites.py", "pid": os.getpid(), "calls": dict(runtime.calls),
                      "sites": dict(truth)}))  # fmt: skip


if __name__ == "__main__":
    main()

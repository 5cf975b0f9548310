"""waitsites.py [ROUNDS [WAIT_US [CHURN [WAY]]]]: waits from every kind of Python code, and knows its own call sites.

Prints "ready", waits for a line, and ends with one line of JSON: "sites" {"function:line": count} of this file. `seen()`
stands on the line of the wait, so both see the same frame. CHURN: pieces of code that are made, wait and are gone.
WAY "fork": the rounds are those of a forked child; "exec": of the same program, started anew; "alone": one thread makes
them. With STALLSCOPE_LINGER it says "ready" again before it ends. For any CPython from 3.9 on.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from cuda_calls import Runtime, ready

runtime = Runtime()
truth: Counter[str] = Counter()
lock = threading.Lock()
wait_ns = 300_000
local = threading.local()
held = ctypes.PyDLL(runtime.library._name)  # calls with the GIL held
libc = ctypes.CDLL(None)
COMPARE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def seen() -> None:
    frame = sys._getframe(1)
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)
    with lock:
        truth[f"{name}:{frame.f_lineno}"] += 1
    runtime.launch(local.stream, wait_ns)


def wait() -> Any:
    """Not a frame of its own at the wait: the foreign function is called by who asked for it."""
    return functools.partial(runtime.library.cudaStreamSynchronize, local.stream)


# What is counted and what waits stand on one line.
# ruff: noqa: E702
# fmt: off
def outer() -> None:
    def inner() -> None:
        def innermost() -> None:
            seen(); wait()()

        innermost()

    inner()


class Loader:
    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> int:
        seen(); wait()()
        return 1

    @property
    def ready(self) -> bool:
        seen(); wait()()
        return True

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        seen(); wait()()


def batches(count: int) -> Iterator[int]:
    for number in range(count):
        seen(); wait()()
        yield number


def timed(function: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(function)
    def wrapper() -> None:
        function()
        seen(); wait()()

    return wrapper


@timed
def decorated() -> None:
    seen(); wait()()


in_lambda = lambda: (seen(), wait()())  # noqa: E731


def handler() -> None:
    try:
        raise ValueError
    except ValueError:
        seen(); wait()()
    finally:
        seen(); wait()()


def recursion(depth: int) -> None:
    if depth:
        recursion(depth - 1)
    else:
        seen(); wait()()


def through_c() -> None:
    """libc calls back: C frames between two Python frames of one stack."""

    def compare(_a: int, _b: int) -> int:
        seen(); wait()()
        return 0

    libc.qsort((ctypes.c_int * 2)(1, 2), 2, 4, COMPARE(compare))


def with_gil() -> None:
    seen(); held.cudaStreamSynchronize(local.stream)


def several_lines() -> None:
    seen(); wait()(
    )


def in_comprehension() -> None:
    [(seen(), wait()()) for _ in range(2)]


def sort_key() -> None:
    sorted([1], key=lambda _: (seen(), wait()()))


# fmt: on
def one_round() -> None:
    loader = Loader()
    next(loader)
    _ = loader.ready
    with loader:
        pass
    for _number in batches(2):
        pass
    for shape in (outer, decorated, in_lambda, handler, through_c, with_gil, several_lines, in_comprehension, sort_key):
        shape()
    recursion(3)
    recursion(50)


def thread(rounds: int) -> None:
    local.stream = runtime.stream()
    for _ in range(rounds):
        one_round()


CALLED_OFTEN = """def made():
    seen(); wait()()
for _ in range(12): made()
"""


def churn(rounds: int) -> None:
    """Code that is made, waits, and is gone: another line each time. Every other piece is a function that is called until
    the interpreter has specialised its calls."""
    for number in range(rounds):
        text = "\n" * number + ("seen(); wait()()\n" if number % 2 else CALLED_OFTEN)
        exec(compile(text, "<churn>", "exec"), {"seen": seen, "wait": wait})


def fork_and_wait() -> None:
    """Goes on in the child; its parent waits for it."""
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def tell(target: str) -> None:
    print(json.dumps({"target": target, "pid": os.getpid(), "calls": dict(runtime.calls), "sites": dict(truth)}))


def main() -> None:
    global wait_ns
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    wait_ns = int(sys.argv[2]) * 1000 if len(sys.argv) > 2 else wait_ns
    churned = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    way = sys.argv[4] if len(sys.argv) > 4 else ""
    runtime.library.cudaEventRecord(None, None)  # fails, and makes a shim known before the first wait
    ready()
    if way == "fork":
        fork_and_wait()
    if way == "exec":
        os.execv(sys.executable, [sys.executable, *sys.argv[:4]])
    local.stream = runtime.stream()
    threads = [threading.Thread(target=thread, args=(rounds,)) for _ in range(0 if way == "alone" else 4)]
    for each in threads:
        each.start()
    for _ in range(rounds):
        one_round()
    churn(churned)
    for each in threads:
        each.join()
    if "STALLSCOPE_LINGER" in os.environ:
        ready()
    tell("waitsites.py")


if __name__ == "__main__":
    main()

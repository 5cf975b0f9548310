"""Runs the calling program of bench/driver.c under a Python stack: pydeep.py FRAMES PASSES DRIVER.so CORE LIBRARY...

Every call that the driver makes is then a call of a Python thread, from a stack of FRAMES frames, which stand still
meanwhile. Each is a function of its own, of a usual size, as in a program that does not recurse. PASSES: how often the
functions have called each other before, as in a loop, after which the interpreter has specialised the calls.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

STEP = """
def step_{0}(inner, driver, words):
    name, scale, left = "step_{0}", 1.0, {0}
    if name and scale:
        return inner[-1](inner[:-1], driver, words)
    for word in words:
        left += len(word)
    return left
"""
Step = Callable[[list["Step"], ctypes.CDLL, list[bytes]], int]


def call(_inner: list[Step], driver: ctypes.CDLL, words: list[bytes]) -> int:
    """The innermost frame: run the driver."""
    arguments = (ctypes.c_char_p * (len(words) + 1))(*words, None)
    return int(driver.main(len(words), arguments))


def steps(count: int) -> list[Step]:
    """So many functions that call each other."""
    found: dict[str, Step] = {}
    for number in range(count):
        exec(STEP.format(number), found)
    return [found[f"step_{number}"] for number in range(count)]


if __name__ == "__main__":
    chain = [call, *steps(int(sys.argv[1]) - 2)]
    for _ in range(int(sys.argv[2]) if chain[1:] else 0):
        chain[-1]([lambda *_: 0, *chain[1:-1]], ctypes.CDLL(None), [])
    sys.exit(chain[-1](chain[:-1], ctypes.CDLL(sys.argv[3]), [word.encode() for word in sys.argv[3:]]))

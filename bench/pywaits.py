"""A Python program that waits 1,500 times a second, 300 us each, from a stack of 20 frames: pywaits.py LIBCUDART

Prints "ready". For each line on stdin: the seconds that 1,500 rounds of launch, wait and work took. Ends with stdin.
"""

from __future__ import annotations

import ctypes
import sys
import time

WAITS, WAIT_NS, WORK_S, FRAMES = 1500, 300_000, 340e-6, 20


class Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]


def work(turns: int) -> int:
    """The host's part of a step."""
    total = 0
    for number in range(turns):
        total += number
    return total


def turns_of(seconds: float) -> int:
    """How many turns take so long here."""
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        work(10_000)
        times.append(time.perf_counter() - begin)
    return int(10_000 * seconds / min(times))


def rounds(library: ctypes.CDLL, turns: int) -> None:
    """Launch, wait, work."""
    one = Dim3(1, 1, 1)
    for _ in range(WAITS):
        library.stallscope_sim_set_next_kernel_ns(ctypes.c_uint64(WAIT_NS))
        library.cudaLaunchKernel(ctypes.c_void_p(0x1000), one, one, None, ctypes.c_size_t(0), None)
        library.cudaStreamSynchronize(None)
        work(turns)


def below(frames: int, library: ctypes.CDLL, turns: int) -> None:
    """The rounds under so many frames."""
    if frames > 0:
        below(frames - 1, library, turns)
    else:
        rounds(library, turns)


def main() -> None:
    """Answer lines."""
    library = ctypes.CDLL(sys.argv[1])
    turns = turns_of(WORK_S)
    print("ready", flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        below(FRAMES - 4, library, turns)  # and rounds, below's last one, main, the module
        print(time.perf_counter() - begin, flush=True)


if __name__ == "__main__":
    main()

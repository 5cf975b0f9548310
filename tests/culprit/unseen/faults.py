"""The faults: each a function that one rank runs, and the right answer.

Of another author than the diagnosis. All programs of one fault run the same function, as ranks of one job do.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from rank import COUNT, FLOAT, FOREVER_S, Rank


class Fault(NamedTuple):
    """`kinds`: classes that are right; empty: nothing must be said. `culprits`: all of them, and nobody else.

    `processes`: fewer than ranks where one process has several devices.
    """

    run: Callable[[Rank], None]
    kinds: tuple[str, ...]
    culprits: tuple[int, ...]
    what: str
    processes: int = 4


FAULTS: dict[str, Fault] = {}


def fault(
    kinds: tuple[str, ...], culprits: tuple[int, ...], what: str, processes: int = 4
) -> Callable[[Callable[[Rank], None]], Callable[[Rank], None]]:
    def enter(run: Callable[[Rank], None]) -> Callable[[Rank], None]:
        FAULTS[run.__name__.replace("_", "-")] = Fault(run, kinds, culprits, what, processes)
        return run

    return enter


def _reduce_until(rank: Rank, *culprits: int) -> None:
    """All-reduces in step; returns in the culprits when it is time to go wrong."""
    comm, stream = rank.communicator("world"), rank.stream()
    for _ in rank.steps():
        if rank.is_fault(*culprits):
            return
        rank.all_reduce(comm, stream)
        rank.wait(stream)


@fault(("NOT_ARRIVED",), (2,), "deadlocks on a Python lock between two calls")
def python_lock(rank: Rank) -> None:
    _reduce_until(rank, 2)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@fault(("NOT_ARRIVED",), (1,), "stopped with SIGSTOP")
def stopped(rank: Rank) -> None:
    _reduce_until(rank, 1)
    os.kill(os.getpid(), signal.SIGSTOP)


@fault(("NOT_ARRIVED",), (3,), "its main thread joins a second one, which issues all NCCL and sleeps")
def second_thread(rank: Rank) -> None:
    def work() -> None:
        _reduce_until(rank, 3)
        time.sleep(FOREVER_S)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@fault(("NOT_ARRIVED",), (1,), "spins in Python")
def spins(rank: Rank) -> None:
    _reduce_until(rank, 1)
    while True:
        pass


@fault(("NOT_ARRIVED",), (1, 3), "two ranks stop at once")
def two_stop(rank: Rank) -> None:
    _reduce_until(rank, 1, 3)
    time.sleep(FOREVER_S)


@fault(("DIED", "LEFT"), (2,), "ends with exit code 0 in the middle")
def leaves_quietly(rank: Rank) -> None:
    _reduce_until(rank, 2)


@fault(("NOT_ARRIVED", "GPU_STUCK"), (2,), "waits for a kernel of its own that never ends, before the call")
def own_kernel(rank: Rank) -> None:
    _reduce_until(rank, 2)
    other = rank.stream()
    rank.cudart.stallscope_sim_set_next_kernel_ns(ctypes.c_uint64((1 << 64) - 1))
    one = (ctypes.c_uint * 3)(1, 1, 1)

    class Dim3(ctypes.Structure):
        _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))

    size, none = Dim3(*one), ctypes.c_size_t(0)
    rank.call("cudaLaunchKernel", ctypes.c_void_p(0x1000), size, size, None, none, other)
    rank.wait(other)


@fault(("LEFT", "NOT_ARRIVED"), (0,), "destroys its communicator early and goes on without it")
def destroys_early(rank: Rank) -> None:
    comm, stream = rank.communicator("world"), rank.stream()
    for _ in rank.steps():
        if rank.is_fault(0):
            rank.call("ncclCommDestroy", comm)
            time.sleep(FOREVER_S)
        rank.all_reduce(comm, stream)
        rank.wait(stream)


@fault(("MISMATCH",), (1,), "broadcasts with another root")
def other_root(rank: Rank) -> None:
    comm, stream = rank.communicator("world"), rank.stream()
    for _ in rank.steps():
        rank.broadcast(3 if rank.is_fault(1) else 0, comm, stream)
        rank.wait(stream)


def _all_to_all(rank: Rank, comm: ctypes.c_void_p, stream: ctypes.c_void_p, leave_out: int | None = None) -> None:
    rank.call("ncclGroupStart")
    for peer in range(rank.ranks):
        if peer != leave_out:
            rank.send(peer, comm, stream)
        rank.receive(peer, comm, stream)
    rank.call("ncclGroupEnd")


@fault(("NOT_ARRIVED",), (2,), "does not come to an expert-parallel all-to-all of grouped sends and receives")
def all_to_all_late(rank: Rank) -> None:
    comm, stream = rank.communicator("experts"), rank.stream()
    for _ in rank.steps():
        if rank.is_fault(2):
            time.sleep(FOREVER_S)
        _all_to_all(rank, comm, stream)
        rank.wait(stream)


@fault(("SKIPPED", "NOT_ARRIVED", "MISMATCH"), (2,), "leaves out one send to rank 0 in an all-to-all")
def all_to_all_send_missing(rank: Rank) -> None:
    comm, stream = rank.communicator("experts"), rank.stream()
    for _ in rank.steps():
        _all_to_all(rank, comm, stream, leave_out=0 if rank.is_fault(2) else None)
        rank.all_reduce(comm, stream)  # without it, the send of the next step would take the place of the missing one
        rank.wait(stream)


@fault(("MISMATCH", "SKIPPED", "EXTRA", "NOT_ARRIVED", "ORDER_DEADLOCK"), (1,), "sends around the ring to a wrong peer")
def wrong_peer(rank: Rank) -> None:
    comm, stream = rank.communicator("ring"), rank.stream()
    for _ in rank.steps():
        ahead = 2 if rank.is_fault(1) else 1
        rank.call("ncclGroupStart")
        rank.send((rank.number + ahead) % rank.ranks, comm, stream)
        rank.receive((rank.number - 1) % rank.ranks, comm, stream)
        rank.call("ncclGroupEnd")
        rank.wait(stream)


@fault(("NOT_ARRIVED",), (3,), "two communicators on two streams and threads; one thread sleeps, the other goes on")
def two_streams(rank: Rank) -> None:
    one, other = rank.communicator("one"), rank.communicator("other")

    def work(comm: ctypes.c_void_p, goes_wrong: bool) -> None:
        rank.call("cudaSetDevice", rank.number)
        stream = rank.stream()
        for _ in rank.steps():
            if goes_wrong and rank.is_fault(3):
                time.sleep(FOREVER_S)
            rank.all_reduce(comm, stream)
            rank.wait(stream)

    threads = [threading.Thread(target=work, args=words) for words in ((one, False), (other, True))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@fault(("ORDER_DEADLOCK",), (2,), "two communicators on one stream; one rank takes them in the other order")
def other_order(rank: Rank) -> None:
    comms, stream = [rank.communicator("one"), rank.communicator("other")], rank.stream()
    for _ in rank.steps():
        for comm in reversed(comms) if rank.is_fault(2) else comms:
            rank.all_reduce(comm, stream)
        rank.wait(stream)


@fault(("NOT_ARRIVED",), (1,), "one process, two devices (ncclCommInitAll), a thread each; one thread sleeps", 1)
def two_devices(rank: Rank) -> None:
    comms = (ctypes.c_void_p * 2)()
    rank.call("ncclCommInitAll", comms, 2, (ctypes.c_int * 2)(0, 1))

    def work(number: int) -> None:
        rank.call("cudaSetDevice", number)
        stream, comm = rank.stream(), ctypes.c_void_p(comms[number])
        for _ in rank.steps():
            if number == 1 and rank.is_fault(0):
                time.sleep(FOREVER_S)
            rank.all_reduce(comm, stream)
            rank.wait(stream)

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@fault(("NOT_ARRIVED", "IN_API"), (0,), "stuck inside an open group: GroupStart and its calls, but no GroupEnd")
def open_group(rank: Rank) -> None:
    comm, stream = rank.communicator("world"), rank.stream()
    for _ in rank.steps():
        rank.call("ncclGroupStart")
        rank.all_reduce(comm, stream)
        if rank.is_fault(0):
            time.sleep(FOREVER_S)
        rank.call("ncclGroupEnd")
        rank.wait(stream)


@fault(
    ("SKIPPED", "MISMATCH", "EXTRA"), (3,), "gathers where the others reduce, and reduces where they gather, at once"
)
def crossed(rank: Rank) -> None:
    comm, stream = rank.communicator("world"), rank.stream()
    count = ctypes.c_size_t(COUNT)

    def gather() -> None:
        rank.call("ncclAllGather", rank.buffer, rank.buffer, count, FLOAT, comm, stream)

    for _ in rank.steps():
        calls = [lambda: rank.all_reduce(comm, stream), gather]
        for call in reversed(calls) if rank.is_fault(3) else calls:
            call()
        rank.wait(stream)


@fault((), (), "healthy: jitter, and 6 s in which all of them compute and nobody calls")
def all_compute(rank: Rank) -> None:
    comm, stream = rank.communicator("world"), rank.stream()
    for step in rank.steps():
        if rank.all_at(step):
            time.sleep(6)
        time.sleep(random.uniform(0, 0.003))
        rank.all_reduce(comm, stream)
        rank.wait(stream)


def main() -> int:
    """``faults.py NAME RANK FOLDER``: one rank."""
    from pathlib import Path

    name, number, folder = sys.argv[1:]
    chosen = FAULTS[name]
    chosen.run(Rank(int(number), chosen.processes, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

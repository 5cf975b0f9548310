"""What single ranks do in the tests of waits, faults and deaths; a rank keeps what it made in `nccl.kept`."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import Any

from nccl_kit import FLOAT32, INT32, Comm, Config, Nccl, UniqueId

KEPT: dict[str, Any] = {}


def comm() -> Comm:
    return KEPT["comm"]


def join(nccl: Nccl, uid: bytes, ranks: int, rank: int) -> None:
    KEPT["comm"] = nccl.init(uid, ranks, rank)


def join_named(nccl: Nccl, uid: bytes, blocking: int, name: bytes, ranks: int, rank: int) -> int:
    """Without waiting if not blocking; the state seen first."""
    KEPT["comm"] = nccl.init(uid, ranks, rank, Config(blocking, name))
    return comm().async_error()


def become_ready(nccl: Nccl, seconds: float) -> int:
    end = time.monotonic() + seconds
    while comm().async_error() == 7 and time.monotonic() < end:
        time.sleep(0.005)
    return comm().async_error()


def start(nccl: Nccl, count: int, name: str = "ncclAllReduce") -> float:
    """Enqueues one collective of ones; how long the call took."""
    send, recv = nccl.array(count, FLOAT32), nccl.array(count * 16, FLOAT32)
    send[:], recv[:] = 1, -1
    KEPT["recv"], began = recv, time.monotonic()
    if name == "ncclAllGather":
        comm().call(name, send, recv, ctypes.c_size_t(count), FLOAT32)
    else:
        comm().call(name, send, recv, ctypes.c_size_t(count), FLOAT32, 0)
    return time.monotonic() - began


def start_many(nccl: Nccl, count: int) -> int:
    send, recv = nccl.array(4, INT32), nccl.array(4, INT32)
    for _ in range(count):
        comm().all_reduce(send, recv, INT32)
    return count


def received(nccl: Nccl, count: int) -> list[float]:
    return [float(value) for value in KEPT["recv"][:count]]


def idle(nccl: Nccl, seconds: float) -> bool:
    return nccl.done(seconds)


def abort(nccl: Nccl) -> None:
    comm().abort()


def destroy(nccl: Nccl) -> None:
    comm().destroy()


def async_error(nccl: Nccl) -> int:
    return comm().async_error()


def split(nccl: Nccl, color: int, key: int) -> tuple[int, int] | None:
    child = comm().split(color, key)
    return None if child is None else (child.ranks, child.rank)


def shrink(nccl: Nccl, excluded: list[int], flags: int) -> tuple[int, int, bool]:
    child = ctypes.c_void_p()
    numbers = (ctypes.c_int * len(excluded))(*excluded)
    result = nccl.lib.ncclCommShrink(comm().handle, numbers, len(excluded), ctypes.byref(child), None, flags)
    assert result == 0, result
    small = Comm(nccl, child, *comm().nccl_ranks(child))
    data = nccl.array(4, INT32)
    data[:] = 1
    stream = nccl.new_stream()
    small.all_reduce(data, data, INT32, stream=stream)
    nccl.synchronize(stream)
    return small.ranks, small.rank, bool((data == small.ranks).all())


def send(nccl: Nccl, count: int, peer: int, value: int) -> None:
    data = nccl.array(count, INT32)
    data[:] = value
    comm().send(data, INT32, peer)


def recv(nccl: Nccl, count: int, peer: int) -> None:
    KEPT["recv"] = nccl.array(count, INT32)
    KEPT["recv"][:] = -1
    comm().recv(KEPT["recv"], INT32, peer)


def transfers(nccl: Nccl, sends: list[tuple[int, int]], recvs: list[tuple[int, int]]) -> list[int]:
    """(peer, value) each in one group; what came, in the order of the calls."""
    out = nccl.array(max(len(sends), 1), INT32)
    into = nccl.array(max(len(recvs), 1), INT32)
    with nccl.group():
        for index, (peer, value) in enumerate(sends):
            out[index] = value
            comm().send(out[index : index + 1], INT32, peer)
        for index, (peer, _) in enumerate(recvs):
            comm().recv(into[index : index + 1], INT32, peer)
    nccl.synchronize()
    return [int(value) for value in into[: len(recvs)]]


def held_group(nccl: Nccl, name: str) -> bool:
    """Whether a collective inside an open group has started after a while."""
    nccl.lib.ncclGroupStart()
    start(nccl, 4, name)
    moved = not nccl.done() or float(KEPT["recv"][0]) != -1
    time.sleep(0.1)
    return moved or float(KEPT["recv"][0]) != -1


def close_group(nccl: Nccl) -> None:
    assert nccl.lib.ncclGroupEnd() == 0
    nccl.synchronize()


def two_in_a_group(nccl: Nccl, other: bytes, turned: bool, ranks: int, rank: int) -> list[int]:
    """Two communicators and two streams in one group, named in either order."""
    second = nccl.init(other, ranks, rank)
    streams = [nccl.stream, nccl.new_stream()]
    both = [(comm(), streams[0]), (second, streams[1])]
    arrays = [nccl.array(8, INT32), nccl.array(8, INT32)]
    order = (1, 0) if turned else (0, 1)
    with nccl.group():
        for index in order:
            arrays[index][:] = index + 1
            target, stream = both[index]
            target.all_reduce(arrays[index], arrays[index], INT32, stream=stream)
    for stream in streams:
        nccl.synchronize(stream)
    second.destroy()
    return [int(array[0]) for array in arrays]


def reordered_group(nccl: Nccl, turned: bool) -> list[float]:
    """Two sizes in one group, named in either order."""
    big, small = nccl.array(1000, INT32), nccl.array(10, INT32)
    big[:], small[:] = 1, 2
    with nccl.group():
        for array in (small, big) if turned else (big, small):
            comm().all_reduce(array, array, INT32)
    nccl.synchronize()
    return [int(big[-1]), int(small[-1])]


def abort_in_the_back(nccl: Nccl, uid: bytes, ranks: int, rank: int) -> int:
    """An initialisation that lacks a rank, non-blocking, aborted after a while."""
    one = nccl.init(uid, ranks, rank, Config(0))
    time.sleep(0.1)
    state = one.async_error()
    one.abort()
    return state


def graph(nccl: Nccl, launches: int) -> int:
    """An in-place sum, captured once and launched several times."""
    data = nccl.array(4, INT32)
    data[:] = 1
    handle, executable = ctypes.c_void_p(), ctypes.c_void_p()
    assert nccl.cuda.cudaStreamBeginCapture(nccl.stream, 2) == 0
    comm().all_reduce(data, data, INT32)
    assert nccl.cuda.cudaStreamEndCapture(nccl.stream, ctypes.byref(handle)) == 0
    assert nccl.cuda.cudaGraphInstantiate(ctypes.byref(executable), handle, ctypes.c_ulonglong(0)) == 0
    assert int(data[0]) == 1
    for _ in range(launches):
        assert nccl.cuda.cudaGraphLaunch(executable, nccl.stream) == 0
    nccl.synchronize()
    return int(data[0])


def behind_a_kernel(nccl: Nccl, seconds: float) -> tuple[float, float]:
    """Host time and stream time of a collective behind a long kernel."""
    nccl.cuda.stallscope_sim_set_next_kernel_ns(ctypes.c_uint64(int(seconds * 1e9)))
    one = (ctypes.c_uint * 3)(1, 1, 1)

    class Dim3(ctypes.Structure):
        _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]

    shape = Dim3(*one)
    began = time.monotonic()
    pointer = ctypes.c_void_p(0x1000)
    assert nccl.cuda.cudaLaunchKernel(pointer, shape, shape, None, ctypes.c_size_t(0), nccl.stream) == 0
    start(nccl, 4)
    called = time.monotonic() - began
    nccl.synchronize()
    return called, time.monotonic() - began


def init_all(nccl: Nccl, count: int) -> list[list[int]]:
    """All ranks in this process, one a device."""
    handles = (ctypes.c_void_p * count)()
    assert nccl.lib.ncclCommInitAll(handles, count, None) == 0
    facts, arrays, streams = [], [], []
    nccl.lib.ncclGroupStart()
    for index, handle in enumerate(handles):
        nccl.cuda.cudaSetDevice(index)
        rank, device = ctypes.c_int(), ctypes.c_int()
        nccl.lib.ncclCommUserRank(ctypes.c_void_p(handle), ctypes.byref(rank))
        nccl.lib.ncclCommCuDevice(ctypes.c_void_p(handle), ctypes.byref(device))
        arrays.append(nccl.array(4, INT32))
        arrays[-1][:] = index + 1
        streams.append(nccl.new_stream())
        Comm(nccl, ctypes.c_void_p(handle), count, index).all_reduce(arrays[-1], arrays[-1], INT32, stream=streams[-1])
        facts.append([rank.value, device.value])
    assert nccl.lib.ncclGroupEnd() == 0
    for index, handle in enumerate(handles):
        nccl.synchronize(streams[index])
        facts[index].append(int(arrays[index][0]))
        assert nccl.lib.ncclCommDestroy(ctypes.c_void_p(handle)) == 0
    return facts


def struct_fields(nccl: Nccl) -> dict[str, Any]:
    """What a tracer reads from outside."""
    at = comm().handle.value or 0
    here = {"pid": os.getpid(), "address": at}

    def number(offset: int, kind: Any) -> int:
        return int(kind.from_address(at + offset).value)

    ints = {"rank": 0x1044B8, "nRanks": 0x1044BC, "cudaDev": 0x1044C0, "nvmlDev": 0x1044C4, "localRanks": 0x104578}
    longs = {"start": 0, "magic": 0x1044A8, "hash": 0x1044B0, "opCount": 0x1045C0, "end": 0x107C00 - 8}
    here |= {name: number(offset, ctypes.c_int) for name, offset in ints.items()}
    return here | {name: number(offset, ctypes.c_uint64) for name, offset in longs.items()}


def aborted_by_another_thread(nccl: Nccl, call: str, uid: bytes) -> tuple[bool, int]:
    """Whether the call was blocked until the abort, and what it returned; it lacks a rank."""
    one = Comm(nccl, ctypes.c_void_p(), 2, 0) if call == "init" else comm()
    child, data = ctypes.c_void_p(), nccl.array(4, INT32)
    began, blocked_s = time.monotonic(), 0.15

    def abort_later() -> None:
        time.sleep(blocked_s)
        one.abort()

    thread = threading.Thread(target=abort_later)
    thread.start()
    if call == "init":
        result = nccl.lib.ncclCommInitRank(ctypes.byref(one.handle), 2, UniqueId.from_buffer_copy(uid), 0)
    elif call == "split":
        result = nccl.lib.ncclCommSplit(one.handle, 0, 0, ctypes.byref(child), None)
        assert child.value is None
    else:
        result = one.try_call("ncclSend", data, ctypes.c_size_t(4), INT32, 1)
    blocked = time.monotonic() - began >= blocked_s
    thread.join()
    return blocked, result


def newer_exchanges(nccl: Nccl) -> list[list[int]]:
    """AlltoAll, then Gather to and Scatter from the last rank, of numbers that tell where they come from."""
    size, rank, one = comm().ranks, comm().rank, ctypes.c_size_t(1)
    send, recv = nccl.array(size, INT32), nccl.array(size, INT32)
    results = []
    for name, root in (("ncclAlltoAll", ()), ("ncclGather", (size - 1,)), ("ncclScatter", (size - 1,))):
        send[:], recv[:] = [10 * rank + peer for peer in range(size)], -1
        comm().call(name, send, recv, one, INT32, *root)
        nccl.synchronize()
        results.append([int(value) for value in recv])
    assert nccl.lib.ncclCommGrow(comm().handle) == 5
    return results


def host_blocked_calls(nccl: Nccl, limit: int) -> int:
    """How many calls return before the queue is full."""
    done = 0

    def fill() -> None:
        nonlocal done
        send = nccl.array(4, INT32)
        for _ in range(limit + 5):
            if comm().try_call("ncclAllReduce", send, send, ctypes.c_size_t(4), INT32, 0):
                return
            done += 1

    threading.Thread(target=fill, daemon=True).start()
    time.sleep(0.3)
    return done


def wrong_calls(nccl: Nccl) -> dict[str, int]:
    """Result codes of calls that make no sense."""
    data = nccl.array(4, INT32)
    size = ctypes.c_size_t(4)
    pointer = ctypes.c_void_p(data.ctypes.data)
    lib, results = nccl.lib, {}
    results["null"] = lib.ncclAllReduce(pointer, pointer, size, INT32, 0, None, nccl.stream)
    results["type"] = comm().try_call("ncclAllReduce", data, data, size, 99, 0)
    results["fp8"] = comm().try_call("ncclAllReduce", data, data, size, 10, 0)
    results["op"] = comm().try_call("ncclAllReduce", data, data, size, INT32, 77)
    results["peer"] = comm().try_call("ncclSend", data, size, INT32, 99)
    results["root"] = comm().try_call("ncclBroadcast", data, data, size, INT32, 77)
    results["end"] = lib.ncclGroupEnd()
    lib.ncclGroupStart()
    comm().try_call("ncclSend", data, size, INT32, 99)
    results["group"] = lib.ncclGroupEnd()
    results["zero"] = comm().try_call("ncclAllReduce", data, data, ctypes.c_size_t(0), INT32, 0)
    return results


def use_after_destroy(nccl: Nccl) -> tuple[int, dict[str, Any]]:
    comm().destroy()
    data = nccl.array(4, INT32)
    return comm().try_call("ncclAllReduce", data, data, ctypes.c_size_t(4), INT32, 0), struct_fields(nccl)

"""What the ranks do in the tests of the simulated NCCL: every operation against numpy, and random programs."""

from __future__ import annotations

import ctypes
import functools
import random
from typing import Any

import numpy as np
from nccl_kit import (
    AVG,
    BFLOAT16,
    E4M3,
    E5M2,
    FLOAT16,
    FLOAT32,
    MAX,
    MIN,
    NUMPY,
    PROD,
    SUM,
    Comm,
    Nccl,
    decode,
    encode,
)

REDUCIBLE = range(10)
ALL_TYPES = range(12)
MORE_THAN_A_CHUNK = {
    "all_reduce": 140_001, "reduce": 140_001, "broadcast": 140_001, "all_gather": 140_001, "reduce_scatter": 20_001,
    "all_to_all": 40_001,
}  # fmt: skip
OPS = (SUM, PROD, MAX, MIN, AVG)


@functools.lru_cache(4096)
def data(seed: int, rank: int, count: int, dtype: int) -> np.ndarray:
    """Small whole numbers, so that sums and products are exact in every type."""
    numbers = np.random.default_rng([seed, rank]).integers(0 if dtype in (1, 3, 5) else -1, 3, count)
    return encode(numbers.astype(np.int8 if dtype in (E4M3, E5M2) else np.int64), dtype)


@functools.lru_cache(4096)
def expectation(seed: int, ranks: int, count: int, dtype: int, op: int) -> np.ndarray:
    return reduced([data(seed, rank, count, dtype) for rank in range(ranks)], dtype, op)


def reduced(parts: list[np.ndarray], dtype: int, op: int) -> np.ndarray:
    values = np.stack([decode(part, dtype) for part in parts])
    values = values.astype(np.float64 if dtype >= FLOAT16 else np.int64 if dtype % 2 == 0 else np.uint64)
    if op == AVG:
        total = values.sum(axis=0)
        ranks = len(parts)
        return total / ranks if dtype >= FLOAT16 else np.trunc(total / ranks).astype(np.int64)
    return {SUM: np.sum, PROD: np.prod, MAX: np.max, MIN: np.min}[op](values, axis=0)


def same(got: np.ndarray, expected: np.ndarray, dtype: int, what: object, exact: bool = True) -> None:
    value = decode(got, dtype)
    if exact or dtype < FLOAT16:
        kept = decode(encode(expected, dtype), dtype) if dtype >= FLOAT16 else expected.astype(NUMPY[dtype])
        assert np.array_equal(value, kept), (what, value[:8], kept[:8])
    else:
        tolerance = {FLOAT16: 4e-3, BFLOAT16: 3e-2}.get(dtype, 1e-5)
        assert np.allclose(value.astype(np.float64), expected, rtol=tolerance, atol=tolerance), what


class Check:
    """One operation on one communicator, with numpy beside it; `seed` is the same on all ranks."""

    def __init__(self, comm: Comm, seed: int, count: int, dtype: int) -> None:
        self.comm, self.nccl, self.seed, self.count, self.dtype = comm, comm.nccl, seed, count, dtype
        self.used: list[np.ndarray] = []

    def fill(self, count: int, rank: int | None = None) -> np.ndarray:
        array = self.nccl.array(count, self.dtype)
        array[:] = data(self.seed, self.comm.rank if rank is None else rank, count, self.dtype)
        self.used.append(array)
        return array

    def room(self, count: int) -> np.ndarray:
        array = self.nccl.array(count, self.dtype)
        array.view(np.uint8)[:] = 0xA5
        self.used.append(array)
        return array

    def parts(self, count: int) -> list[np.ndarray]:
        return [data(self.seed, rank, count, self.dtype) for rank in range(self.comm.ranks)]

    def expected(self, count: int, op: int) -> np.ndarray:
        return expectation(self.seed, self.comm.ranks, count, self.dtype, op)

    def start(self, name: str, op: int, root: int, in_place: bool) -> Any:
        return getattr(self, name)(op, root, in_place)

    def all_reduce(self, op: int, root: int, in_place: bool) -> Any:
        send = self.fill(self.count)
        recv = send if in_place else self.room(self.count)
        self.comm.all_reduce(send, recv, self.dtype, op)
        expected = self.expected(self.count, op)
        return lambda: same(recv, expected, self.dtype, ("all_reduce", self.dtype, op), op != AVG)

    def reduce(self, op: int, root: int, in_place: bool) -> Any:
        send = self.fill(self.count)
        recv = send if in_place else self.room(self.count)
        self.comm.call("ncclReduce", send, recv, ctypes.c_size_t(self.count), self.dtype, op, root)
        expected = self.expected(self.count, op)
        before = recv.copy()
        if self.comm.rank == root:
            return lambda: same(recv, expected, self.dtype, ("reduce", self.dtype, op, root), op != AVG)
        return lambda: np.testing.assert_array_equal(recv.view(np.uint8), before.view(np.uint8))

    def reduce_scatter(self, op: int, root: int, in_place: bool) -> Any:
        ranks, rank = self.comm.ranks, self.comm.rank
        own = slice(rank * self.count, (rank + 1) * self.count)
        send = self.fill(self.count * ranks)
        recv = send[own] if in_place else self.room(self.count)
        self.comm.call("ncclReduceScatter", send, recv, ctypes.c_size_t(self.count), self.dtype, op)
        expected = self.expected(self.count * ranks, op)[own]
        return lambda: same(recv, expected, self.dtype, ("reduce_scatter", self.dtype, op), op != AVG)

    def all_gather(self, op: int, root: int, in_place: bool) -> Any:
        ranks, rank = self.comm.ranks, self.comm.rank
        recv = self.room(self.count * ranks)
        send = self.fill(self.count)
        if in_place:
            own = recv[rank * self.count : (rank + 1) * self.count]
            own[:] = send
            send = own
        self.comm.call("ncclAllGather", send, recv, ctypes.c_size_t(self.count), self.dtype)
        expected = np.concatenate(self.parts(self.count))
        return lambda: np.testing.assert_array_equal(recv.view(np.uint8), expected.view(np.uint8))

    def broadcast(self, op: int, root: int, in_place: bool) -> Any:
        send = self.fill(self.count)
        recv = send if in_place else self.room(self.count)
        if in_place:
            self.comm.call("ncclBcast", send, ctypes.c_size_t(self.count), self.dtype, root)
        else:
            self.comm.call("ncclBroadcast", send, recv, ctypes.c_size_t(self.count), self.dtype, root)
        expected = data(self.seed, root, self.count, self.dtype)
        return lambda: np.testing.assert_array_equal(recv.view(np.uint8), expected.view(np.uint8))

    def all_to_all(self, op: int, root: int, in_place: bool) -> Any:
        ranks, rank, count = self.comm.ranks, self.comm.rank, self.count
        send, recv = self.fill(count * ranks), self.room(count * ranks)
        with self.nccl.group():
            for peer in range(ranks):
                self.comm.send(send[peer * count : (peer + 1) * count], self.dtype, peer)
                self.comm.recv(recv[peer * count : (peer + 1) * count], self.dtype, peer)
        expected = np.concatenate([part[rank * count : (rank + 1) * count] for part in self.parts(count * ranks)])
        return lambda: np.testing.assert_array_equal(recv.view(np.uint8), expected.view(np.uint8))

    def shift(self, op: int, root: int, in_place: bool) -> Any:
        ranks, rank = self.comm.ranks, self.comm.rank
        send, recv = self.fill(self.count), self.room(self.count)
        with self.nccl.group():
            self.comm.recv(recv, self.dtype, (rank - 1 - root) % ranks)
            self.comm.send(send, self.dtype, (rank + 1 + root) % ranks)
        expected = data(self.seed, (rank - 1 - root) % ranks, self.count, self.dtype)
        return lambda: np.testing.assert_array_equal(recv.view(np.uint8), expected.view(np.uint8))

    def free(self) -> None:
        self.nccl.free(*self.used)


class Checks:
    """Operations that run one behind the other on a communicator, and are looked at together."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.done = comm, 0
        self.open: list[tuple[Check, Any]] = []

    def add(self, name: str, count: int, dtype: int, op: int = SUM, root: int = 0, in_place: bool = False) -> None:
        check = Check(self.comm, dtype, count, dtype)
        self.open.append((check, check.start(name, op, root, in_place)))
        self.done += 1
        if len(self.open) == 32:
            self.settle()

    def settle(self) -> None:
        self.comm.nccl.synchronize()
        for check, verify in self.open:
            verify()
            check.free()
        self.open.clear()


def every_operation(nccl: Nccl, uid: bytes, ranks: int, rank: int) -> int:
    """Every operation, type, reduction and root, in place and not."""
    comm = nccl.init(uid, ranks, rank)
    checks = Checks(comm)
    for dtype in ALL_TYPES:
        for root in range(ranks):
            checks.add("broadcast", 5, dtype, root=root, in_place=root % 2 == 0)
        for name in ("all_gather", "all_to_all", "shift"):
            checks.add(name, 11, dtype, in_place=dtype % 2 == 0)
    for dtype in REDUCIBLE:
        for op in OPS:
            for root in range(ranks):
                checks.add("reduce", 7, dtype, op, root, in_place=root % 2 == 1)
            checks.add("all_reduce", 7, dtype, op, in_place=op % 2 == 0)
            checks.add("reduce_scatter", 7, dtype, op, in_place=op % 2 == 1)
    for name, most in MORE_THAN_A_CHUNK.items():
        for count in (1, 1000, most):
            for in_place in (False, True):
                checks.add(name, count, FLOAT32, in_place=in_place)
    checks.settle()
    comm.destroy()
    return checks.done


def pre_mul_sum(nccl: Nccl, uid: bytes, ranks: int, rank: int) -> None:
    """Each rank multiplies by its own factor, from the host or from memory."""
    comm = nccl.init(uid, ranks, rank)
    for dtype in REDUCIBLE:
        for residence in (0, 1):
            factor = nccl.array(1, dtype)
            factor[:] = encode(np.array([rank % 3 + 1]), dtype)
            op = ctypes.c_int()
            create = nccl.lib.ncclRedOpCreatePreMulSum
            pointer = ctypes.c_void_p(factor.ctypes.data)
            assert create(ctypes.byref(op), pointer, dtype, residence, comm.handle) == 0
            send, recv = nccl.array(10, dtype), nccl.array(10, dtype)
            send[:] = data(3, rank, 10, dtype)
            comm.all_reduce(send, recv, dtype, op.value)
            nccl.synchronize()
            parts = [
                encode(decode(data(3, r, 10, dtype), dtype).astype(np.int64) * (r % 3 + 1), dtype) for r in range(ranks)
            ]
            same(recv, reduced(parts, dtype, SUM), dtype, ("premul", dtype, residence))
            assert nccl.lib.ncclRedOpDestroy(op, comm.handle) == 0
            assert comm.try_call("ncclAllReduce", send, recv, ctypes.c_size_t(10), dtype, op.value) == 4
            nccl.free(factor, send, recv)
    comm.destroy()


NAMES = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "shift")


class Program:
    """A random program: all ranks draw the same numbers, and so agree on what to do."""

    def __init__(self, nccl: Nccl, comm: Comm, seed: int) -> None:
        self.nccl, self.random, self.seed = nccl, random.Random(seed), seed
        self.world = comm
        self.children: list[Comm | None] = []
        self.open: list[tuple[Check, Any]] = []  # of several communicators

    def operation(self, comm: Comm, number: int) -> None:
        draw = self.random
        name, dtype = draw.choice(NAMES), draw.choice(REDUCIBLE)
        count = draw.choice((1, 3, 64, 1000, 20_000))
        op, in_place, root = draw.choice(OPS), draw.random() < 0.5, draw.randrange(1000)
        check = Check(comm, self.seed + number, count, dtype)
        self.open.append((check, check.start(name, op, root % comm.ranks, in_place)))

    def split(self) -> None:
        """By colors that are no ranges, with keys that turn the order round; some ranks stay out."""
        colors = [self.random.choice((-1, 0, 0, 1, 1, 2)) for _ in range(8)]
        sign = self.random.choice((-1, 1))
        child = self.world.split(colors[self.world.rank], sign * self.world.rank)
        self.children.append(child)
        mates = [r for r in range(self.world.ranks) if colors[r] == colors[self.world.rank]]
        if child is None:
            assert colors[self.world.rank] == -1
        else:
            assert (child.ranks, child.rank) == (
                len(mates),
                sorted(mates, key=lambda r: sign * r).index(self.world.rank),
            )

    def step(self, number: int) -> None:
        kind = self.random.random()
        state = self.random.getstate()
        if kind < 0.12:
            self.split()
        elif kind < 0.4:
            size = self.random.randint(2, 4)
            with self.nccl.group():
                for i in range(size):
                    self.operation(self.world, 10 * number + i)
        elif kind < 0.6 and self.children:
            child = self.children[-1]
            if child is not None:
                self.operation(child, 10 * number)
        else:
            self.operation(self.world, 10 * number)
        # Whatever branch a rank took, the next step starts from the same numbers.
        self.random.setstate(state)
        self.random.seed(self.random.random() + number)

    def settle(self) -> None:
        self.nccl.synchronize()
        for check, verify in self.open:
            verify()
            check.free()
        self.open.clear()

    def run(self) -> None:
        for number in range(self.random.randint(4, 12)):
            self.step(number)
            if number % 5 == 4:
                self.settle()
        self.settle()
        for comm in (*self.children, self.world):
            if comm is not None:
                comm.destroy()


def random_programs(nccl: Nccl, uids: list[bytes], first: int, ranks: int, rank: int) -> int:
    """Programs number first, first + 1 and so on; each among the first two to eight of the ranks."""
    for index, uid in enumerate(uids):
        members = 2 + (first + index) % (ranks - 1)
        if rank < members:
            Program(nccl, nccl.init(uid, members, rank), first + index).run()
    return len(uids)

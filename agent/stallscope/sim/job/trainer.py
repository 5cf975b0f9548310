"""One rank's training loop."""

from __future__ import annotations

import ctypes
import os
import random
import time
from argparse import Namespace
from pathlib import Path

from stallscope.sim.job.communicators import Communicator, Maker
from stallscope.sim.job.cuda import Dim3, Runtime
from stallscope.sim.job.inject import Injector
from stallscope.sim.job.layout import DATA, Layout
from stallscope.sim.job.loader import Loaders
from stallscope.sim.job.schedule import (
    ACTIVATIONS,
    FLOAT32,
    Call,
    Flag,
    Item,
    Launch,
    Mark,
    Transfer,
    evaluation,
    flat,
    schedule,
)

BATCH_BYTES = 256 * 1024
WEIGHT_BYTES = 4 * 1024 * 1024
KERNELS = ("forward_gemm", "backward_gemm", "adam_step")
KERNEL_NS = 300_000
SUM = 0
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
LEAST_OPERATIONS = 24  # of a step
WARM_UP_STEPS = 3
SHORT_BATCH = 1 / 3
CHUNK_S = 0.05
STREAM_NON_BLOCKING, EVENT_WITHOUT_TIMING = 1, 2


class Device:
    """The device and its stream, with what a training step needs on them."""

    def __init__(self, runtime: Runtime, rank: int) -> None:
        devices = ctypes.c_int()
        runtime.call("cudaGetDeviceCount", ctypes.byref(devices))
        runtime.call("cudaSetDevice", rank % devices.value)
        self.stream = ctypes.c_void_p()
        runtime.call("cudaStreamCreateWithFlags", ctypes.byref(self.stream), STREAM_NON_BLOCKING)
        self.event = ctypes.c_void_p()
        runtime.call("cudaEventCreate", ctypes.byref(self.event))
        self.batch = runtime.allocate("cudaMalloc", BATCH_BYTES)
        self.weights = runtime.allocate("cudaMalloc", WEIGHT_BYTES)
        self.gradients = runtime.allocate("cudaMalloc", WEIGHT_BYTES)
        self.functions = {}
        for number, name in enumerate(KERNELS):
            self.functions[name] = ctypes.c_void_p(0x1000 * (number + 1))
            runtime.library.stallscope_sim_name_function(self.functions[name], name.encode())


class Throttle:
    """Lets the host run so many operations ahead of its device."""

    def __init__(self, runtime: Runtime, stream: ctypes.c_void_p, ahead: int) -> None:
        self._runtime, self._stream = runtime, stream
        self._events = [ctypes.c_void_p() for _ in range(ahead)]
        for event in self._events:
            runtime.call("cudaEventCreateWithFlags", ctypes.byref(event), EVENT_WITHOUT_TIMING)
        self._issued = 0

    def issued(self) -> None:
        """After each operation: waits for the one that was `ahead` operations before."""
        if not self._events:
            return
        event = self._events[self._issued % len(self._events)]
        if self._issued >= len(self._events):
            self._runtime.wait("cudaEventSynchronize", event)
        self._runtime.call("cudaEventRecord", event, self._stream)
        self._issued += 1


class Trainer:
    """One rank: its device, its communicators, and the loop."""

    def __init__(self, runtime: Runtime, args: Namespace, injector: Injector, loaders: Loaders) -> None:
        self.loaders = loaders
        self.runtime, self.rank, self.injector = runtime, int(args.rank), injector
        self.layout: Layout = args.layout
        slowness = args.slowness if self.rank == args.slow_rank else 1.0
        self.kernel_ns = int(KERNEL_NS * slowness)
        self.in_step = args.ahead == 0
        self.host_jitter_s = args.host_jitter / 1e3
        self.checkpoint_every_s, self.checkpoint_write_s = args.checkpoint_every, args.checkpoint_write
        self.folder = Path(args.folder)
        self.random = random.Random(args.seed * 1000 + self.rank)  # noqa: S311
        self.steps = self.checkpoints = 0
        self.schedule = schedule(self.layout, self.rank)
        self.flat_steps, self.eval_every = int(args.flat), int(args.eval_every)
        self.lazy_ns = self._lazy_ns(args.warm_up)
        has_short_batch = args.uneven and self.layout.place(self.rank)[1] == self.layout.size(DATA) - 1
        self.last_share = SHORT_BATCH if has_short_batch else 1.0
        self.given_steps = int(args.steps)
        self.device = Device(runtime, self.rank)
        self.throttle = Throttle(runtime, self.device.stream, args.ahead)
        self.host_batch = self._host_batch()
        self.host_weights = ctypes.create_string_buffer(WEIGHT_BYTES)
        self.communicators = self._communicators(self.folder)

    def _lazy_ns(self, warm_up_s: float) -> int:
        """By how much each kernel of the first steps is longer: what the last rank does not find ready yet."""
        kernels = sum(item.times for item in self.schedule if isinstance(item, Launch))
        return int(warm_up_s * 1e9 / (WARM_UP_STEPS * kernels)) if self.rank == self.layout.ranks - 1 else 0

    def _host_batch(self) -> ctypes.c_void_p:
        """Pageable where the host waits anyway, else pinned."""
        if not self.in_step:
            return self.runtime.allocate("cudaMallocHost", BATCH_BYTES)
        self._pageable = ctypes.create_string_buffer(BATCH_BYTES)
        return ctypes.cast(self._pageable, ctypes.c_void_p)

    def _communicators(self, folder: Path) -> dict[str, Communicator]:
        if self.layout.ranks == 1:
            return {}
        maker = Maker(self.runtime, self.layout, self.rank, folder)
        return maker.make(lambda kind: self.injector.before_communicator(kind, kind == self.layout.split_kind))

    def launch(self, kernel: str, times: int) -> None:
        grid, block, none = Dim3(64, 1, 1), Dim3(256, 1, 1), ctypes.c_size_t(0)
        for _ in range(times):
            usual_ns = self._kernel_ns()
            length_ns = self.injector.next_kernel_ns(self.steps, usual_ns)
            self.runtime.library.stallscope_sim_set_next_kernel_ns(ctypes.c_uint64(length_ns))
            function = self.device.functions[kernel]
            self.runtime.call("cudaLaunchKernel", function, grid, block, None, none, self.device.stream)
            self.throttle.issued()

    def _kernel_ns(self) -> int:
        length_ns = self.kernel_ns * self.random.uniform(0.9, 1.1)
        if self.steps < WARM_UP_STEPS:
            length_ns += self.lazy_ns
        last = self.runtime.slot.board.last_step or self.given_steps
        return int(length_ns * (self.last_share if self.steps + 1 == last else 1.0))

    def collective(self, call: Call) -> None:
        communicator = self.communicators[call.kind]
        communicator.operations += 1
        root = [0] if call.api == "ncclReduce" else []
        what = (self.device.weights, self.device.gradients, ctypes.c_size_t(call.count), call.dtype, SUM, *root)
        self.runtime.nccl(call.api, *what, communicator.handle, self.device.stream)
        self.throttle.issued()

    def transfer(self, call: Transfer) -> None:
        communicator = self.communicators[call.kind]
        communicator.operations += 1
        what = (self.device.gradients, ctypes.c_size_t(ACTIVATIONS), FLOAT32, call.stage)
        self.runtime.nccl(call.api, *what, communicator.handle, self.device.stream)
        self.throttle.issued()

    def load_batch(self) -> None:
        self.loaders.next_batch()
        self.injector.at_load(self.steps, self.communicators)
        what = (self.device.batch, self.host_batch, ctypes.c_size_t(BATCH_BYTES), HOST_TO_DEVICE, self.device.stream)
        self.runtime.wait("cudaMemcpyAsync", *what)

    def dawdle(self) -> None:
        """What a host does between its calls, by chance more or less."""
        if self.host_jitter_s:
            time.sleep(self.random.expovariate(1 / self.host_jitter_s))

    def do(self, item: Item) -> None:
        if isinstance(item, Call | Transfer):
            self.dawdle()
        if isinstance(item, Launch):
            self.launch(item.kernel, item.times)
        elif isinstance(item, Call):
            self.collective(item)
        elif isinstance(item, Transfer):
            self.transfer(item)
        elif isinstance(item, Flag):
            self.read_flag()
        elif isinstance(item, Mark):
            self.injector.mark(self.steps, self.communicators[item.kind])

    def read_flag(self) -> None:
        """What ``isnan(loss)`` before the exchange of gradients does; hosts that run ahead don't ask."""
        if self.in_step:
            self.loss_item()

    def loss_item(self) -> None:
        """What ``loss.item()`` does: a small copy to pageable memory, which waits, and a synchronize."""
        loss, size = ctypes.c_float(), ctypes.c_size_t(4)
        what = (ctypes.byref(loss), self.device.gradients, size, DEVICE_TO_HOST, self.device.stream)
        self.runtime.wait("cudaMemcpyAsync", *what)
        self.runtime.wait("cudaStreamSynchronize", self.device.stream)

    def save_checkpoint(self) -> None:
        self.runtime.wait("cudaDeviceSynchronize")
        size = ctypes.c_size_t(WEIGHT_BYTES)
        self.runtime.wait("cudaMemcpy", self.host_weights, self.device.weights, size, DEVICE_TO_HOST)
        self._write_checkpoint(self.folder / f"checkpoint-{self.checkpoints:03}.pt")
        self.checkpoints += 1

    def _write_checkpoint(self, path: Path) -> None:
        """Piece by piece over the time that it is to take, as a slow disk does; only the newest one is kept."""
        pieces = max(1, int(self.checkpoint_write_s / CHUNK_S))
        size = -(-WEIGHT_BYTES // pieces)
        weights = memoryview(self.host_weights)
        with path.open("wb", buffering=0) as file:
            for start in range(0, WEIGHT_BYTES, size):
                file.write(weights[start : start + size])
                time.sleep(self.checkpoint_write_s / pieces)
            os.fsync(file.fileno())
        (self.folder / f"checkpoint-{self.checkpoints - 1:03}.pt").unlink(missing_ok=True)

    def step(self) -> None:
        self.load_batch()
        usual = flat(self.schedule) if self.steps < self.flat_steps else self.schedule
        for item in self.injector.items(self.steps, usual):
            self.do(item)
        self.runtime.call("cudaEventRecord", self.device.event, self.device.stream)
        if self.in_step:
            self.loss_item()
        self.steps += 1
        self.runtime.slot.steps = self.steps
        self.runtime.slot.leave()
        if self.eval_every and self.steps % self.eval_every == 0:
            self.evaluate()

    def evaluate(self) -> None:
        """Looks at the model without changing it."""
        self.load_batch()
        for item in evaluation(self.layout, self.rank):
            self.do(item)
        if self.in_step:
            self.loss_item()

    def train(self, steps: int, margin: int) -> None:
        """Rank 0 says which step is the last: `margin` steps on, which nobody can have begun."""
        board = self.runtime.slot.board
        next_checkpoint_ns = time.monotonic_ns() + int(self.checkpoint_every_s * 1e9)
        while (last := board.last_step or steps) == 0 or self.steps < last:
            self.step()
            now_ns = time.monotonic_ns()
            if self.rank == 0 and not board.last_step and 0 < board.until_ns <= now_ns:
                board.last_step = min(self.steps + margin, steps or self.steps + margin)
            if self.rank == 0 and now_ns >= next_checkpoint_ns:
                self.save_checkpoint()
                next_checkpoint_ns += int(self.checkpoint_every_s * 1e9)

    def finish(self) -> None:
        if not self.in_step:
            self.runtime.wait("cudaStreamSynchronize", self.device.stream)
        for communicator in self.communicators.values():
            self.runtime.nccl("ncclCommDestroy", communicator.handle)
        self.loaders.close()

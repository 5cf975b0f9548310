"""A simulated training job: a launcher and N ranks, each a small training loop on the simulated CUDA runtime.

``python -m stallscope.sim.job --ranks 4 --duration 10 --truth truth.json``

A step loads a batch (a pageable copy, which waits), launches forward, backward and optimizer kernels, and reads the
loss back the way ``.item()`` does. Checkpoints come every few seconds, and one rank is slower than the others. The
truth file holds what every rank did by its own count: calls by function and waits of at least 200 us.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

LONG_WAIT_NS = 200_000
BATCH_BYTES = 256 * 1024
WEIGHT_BYTES = 4 * 1024 * 1024
FORWARD, BACKWARD, OPTIMIZER = 8, 12, 4
KERNEL_NS = 300_000
LOAD_S = 0.001
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
STREAM_NON_BLOCKING = 1


class Dim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class JobError(Exception):
    """Says what failed, on what, why, and what to do next."""


def library_path() -> Path:
    """The simulated libcudart: from STALLSCOPE_SIM_LIB, else from this checkout's build."""
    folder = os.environ.get("STALLSCOPE_SIM_LIB") or str(Path(__file__).resolve().parents[3] / "build/sim/lib")
    path = Path(folder) / "libcudart.so.12"
    if not path.exists():
        raise JobError(
            f"cannot start the simulated job: {path} does not exist\n"
            "  why: the simulated CUDA stack is not built, or STALLSCOPE_SIM_LIB names another folder\n"
            "  next: run `make build`, or set STALLSCOPE_SIM_LIB to the folder that holds libcudart.so.12"
        )
    return path


class Runtime:
    """libcudart through ctypes; counts its calls, and measures those that wait with this program's own clock."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.calls: Counter[str] = Counter()
        self.waits: dict[str, dict[str, int]] = {}

    def call(self, api: str, *args: Any) -> None:
        self.calls[api] += 1
        result = getattr(self.library, api)(*args)
        if result != 0:
            raise JobError(f"{api} failed with CUDA error {result}")

    def wait(self, api: str, *args: Any) -> None:
        start_ns = time.monotonic_ns()
        self.call(api, *args)
        duration_ns = time.monotonic_ns() - start_ns
        if duration_ns >= LONG_WAIT_NS:
            known = self.waits.setdefault(api, {"count": 0, "total_ns": 0})
            known["count"] += 1
            known["total_ns"] += duration_ns

    def allocate(self, api: str, size: int) -> ctypes.c_void_p:
        pointer = ctypes.c_void_p()
        self.call(api, ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer


class Trainer:
    """One rank: its stream, its buffers, and the loop."""

    def __init__(self, runtime: Runtime, rank: int, slowness: float) -> None:
        self.runtime, self.rank = runtime, rank
        self.kernel_ns = int(KERNEL_NS * slowness)
        self.steps = self.checkpoints = 0
        devices = ctypes.c_int()
        runtime.call("cudaGetDeviceCount", ctypes.byref(devices))
        runtime.call("cudaSetDevice", rank % devices.value)
        self.stream = ctypes.c_void_p()
        runtime.call("cudaStreamCreateWithFlags", ctypes.byref(self.stream), STREAM_NON_BLOCKING)
        self.event = ctypes.c_void_p()
        runtime.call("cudaEventCreate", ctypes.byref(self.event))
        self.batch = runtime.allocate("cudaMalloc", BATCH_BYTES)
        self.weights = runtime.allocate("cudaMalloc", WEIGHT_BYTES)
        self.host_batch = ctypes.create_string_buffer(BATCH_BYTES)
        self.host_weights = ctypes.create_string_buffer(WEIGHT_BYTES)
        self.kernels = {
            name: self.name_kernel(0x1000 * (i + 1), name)
            for i, name in enumerate(("forward_gemm", "backward_gemm", "adam_step"))
        }

    def name_kernel(self, address: int, name: str) -> ctypes.c_void_p:
        func = ctypes.c_void_p(address)
        self.runtime.library.stallscope_sim_name_function(func, name.encode())
        return func

    def launch(self, kernel: str, times: int) -> None:
        grid, block = Dim3(64, 1, 1), Dim3(256, 1, 1)
        for _ in range(times):
            self.runtime.library.stallscope_sim_set_next_kernel_ns(ctypes.c_uint64(self.kernel_ns))
            self.runtime.call(
                "cudaLaunchKernel", self.kernels[kernel], grid, block, None, ctypes.c_size_t(0), self.stream
            )

    def load_batch(self) -> None:
        time.sleep(LOAD_S)
        size = ctypes.c_size_t(BATCH_BYTES)
        self.runtime.wait("cudaMemcpyAsync", self.batch, self.host_batch, size, HOST_TO_DEVICE, self.stream)

    def forward(self) -> None:
        self.launch("forward_gemm", FORWARD)

    def backward(self) -> None:
        self.launch("backward_gemm", BACKWARD)
        self.runtime.call("cudaEventRecord", self.event, self.stream)

    def optimizer_step(self) -> None:
        self.launch("adam_step", OPTIMIZER)

    def loss_item(self) -> float:
        """What ``loss.item()`` does: a small copy to pageable memory, which waits, and a synchronize."""
        loss = ctypes.c_float()
        self.runtime.wait(
            "cudaMemcpyAsync", ctypes.byref(loss), self.weights, ctypes.c_size_t(4), DEVICE_TO_HOST, self.stream
        )
        self.runtime.wait("cudaStreamSynchronize", self.stream)
        return loss.value

    def save_checkpoint(self) -> None:
        self.runtime.wait("cudaDeviceSynchronize")
        size = ctypes.c_size_t(WEIGHT_BYTES)
        self.runtime.wait("cudaMemcpy", self.host_weights, self.weights, size, DEVICE_TO_HOST)
        with tempfile.TemporaryFile() as file:
            file.write(self.host_weights.raw)
            file.flush()
            os.fsync(file.fileno())
        self.checkpoints += 1

    def step(self) -> None:
        self.load_batch()
        self.forward()
        self.backward()
        self.optimizer_step()
        self.loss_item()
        self.steps += 1

    def train(self, until_ns: int, checkpoint_every_s: float) -> None:
        next_checkpoint_ns = time.monotonic_ns() + int(checkpoint_every_s * 1e9)
        while time.monotonic_ns() < until_ns:
            self.step()
            if time.monotonic_ns() >= next_checkpoint_ns:
                self.save_checkpoint()
                next_checkpoint_ns += int(checkpoint_every_s * 1e9)


def run_rank(args: argparse.Namespace) -> int:
    runtime = Runtime(library_path())
    start_ns = time.monotonic_ns()
    trainer = Trainer(runtime, args.rank, args.slowness if args.rank == args.slow_rank else 1.0)
    trainer.train(args.until_ns, args.checkpoint_every)
    truth = {
        "rank": args.rank,
        "pid": os.getpid(),
        "slow": args.rank == args.slow_rank,
        "steps": trainer.steps,
        "checkpoints": trainer.checkpoints,
        "start_ns": start_ns,
        "end_ns": time.monotonic_ns(),
        "calls": dict(sorted(runtime.calls.items())),
        "long_waits": runtime.waits,
    }
    print(json.dumps(truth), flush=True)
    return 0


def rank_command(args: argparse.Namespace, rank: int, until_ns: int) -> list[str]:
    values = {
        "rank": rank,
        "until-ns": until_ns,
        "slow-rank": args.slow_rank,
        "slowness": args.slowness,
        "checkpoint-every": args.checkpoint_every,
    }
    return [sys.executable, str(Path(__file__).resolve()), *(f"--{name}={value}" for name, value in values.items())]


def start_rank(args: argparse.Namespace, rank: int, until_ns: int) -> subprocess.Popen[str]:
    identity = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(args.ranks)}
    return subprocess.Popen(
        rank_command(args, rank, until_ns), stdout=subprocess.PIPE, text=True, env={**os.environ, **identity}
    )


def stop(signum: int, _frame: object) -> None:
    sys.exit(128 + signum)


def collect(ranks: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    truths = []
    for number, process in enumerate(ranks):
        line, _ = process.communicate()
        if process.returncode != 0:
            raise JobError(f"rank {number} (pid {process.pid}) ended with code {process.returncode}")
        truths.append(json.loads(line))
    return truths


def run_launcher(args: argparse.Namespace) -> int:
    library_path()
    signal.signal(signal.SIGTERM, stop)
    if args.hold and not sys.stdin.readline():
        return 1
    until_ns = time.monotonic_ns() + int(args.duration * 1e9)
    ranks = [start_rank(args, rank, until_ns) for rank in range(args.ranks)]
    try:
        truths = collect(ranks)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.terminate()
    job = {"launcher_pid": os.getpid(), "ranks": truths}
    if args.truth:
        Path(args.truth).write_text(json.dumps(job, indent=1) + "\n", encoding="utf-8")
    steps, checkpoints = (sum(truth[key] for truth in truths) for key in ("steps", "checkpoints"))
    print(f"{args.ranks} ranks, {steps} steps, {checkpoints} checkpoints")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="stallscope.sim.job", description="a simulated training job")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--duration", type=float, default=10.0, help="seconds")
    parser.add_argument("--truth", help="where to write what every rank did (JSON)")
    parser.add_argument("--slow-rank", type=int, default=1, help="-1: none")
    parser.add_argument("--slowness", type=float, default=1.6, help="how many times longer its kernels take")
    parser.add_argument("--checkpoint-every", type=float, default=3.0, help="seconds")
    parser.add_argument("--hold", action="store_true", help="start the ranks when a line comes on stdin")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until-ns", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.ranks < 1 or args.duration <= 0 or args.checkpoint_every <= 0 or args.slowness <= 0:
        parser.error("--ranks, --duration, --slowness and --checkpoint-every must be greater than 0")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        return run_launcher(args) if args.rank is None else run_rank(args)
    except JobError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

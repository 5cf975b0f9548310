"""A rank's process."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import time
from pathlib import Path

from stallscope.sim.job.board import Board, Slot
from stallscope.sim.job.cuda import Runtime, library_folder
from stallscope.sim.job.inject import Injector
from stallscope.sim.job.loader import Loaders
from stallscope.sim.job.trainer import LEAST_OPERATIONS, Trainer

PR_SET_PDEATHSIG = 1


def run_rank(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a launcher that is killed leaves nobody behind
    start_ns = time.monotonic_ns()
    slot = Slot(Board(folder / "board", args.layout.ranks), args.rank, os.getpid())
    loaders = Loaders(args.loaders, args.seed * 1000 + args.rank)
    runtime = Runtime(library_folder(), slot)
    time.sleep(args.load_time)  # as the import of a framework does: a tracer sees the libraries before they are used
    injector = Injector(args.plan, args.layout, args.rank, folder, runtime)
    trainer = Trainer(runtime, args, injector, loaders)
    trainer.train(args.steps, 3 + args.ahead // LEAST_OPERATIONS)
    trainer.finish()
    _report(folder, args, trainer, start_ns)
    return 0


def _report(folder: Path, args: argparse.Namespace, trainer: Trainer, start_ns: int) -> None:
    truth = {
        "rank": args.rank,
        "pid": os.getpid(),
        "slow": args.rank == args.slow_rank,
        "steps": trainer.steps,
        "checkpoints": trainer.checkpoints,
        "start_ns": start_ns,
        "end_ns": time.monotonic_ns(),
        "calls": dict(sorted(trainer.runtime.calls.items())),
        "long_waits": trainer.runtime.waits,
        "operations": {kind: comm.operations for kind, comm in trainer.communicators.items()},
    }
    (folder / f"rank-{args.rank}.json").write_text(json.dumps(truth), encoding="utf-8")

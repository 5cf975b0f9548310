"""Starts the ranks, watches them, ends those that hang, and writes the truth."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from stallscope.sim.job.board import Board, Place
from stallscope.sim.job.cuda import JobError, library_folder
from stallscope.sim.job.inject import fault_file_line
from stallscope.sim.job.options import PASSED_ON, SWITCHES
from stallscope.sim.job.truth import job_truth

LOOK_S = 0.05
QUIET_S = 0.7  # without any progress: somebody is blocked
NOT_WAITING = ("", "ncclCommAbort")
PACKAGES = Path(__file__).resolve().parents[3]


class Watch:
    """What a look at the board from outside shows, kept for the longest time in which nothing moved."""

    def __init__(self, board: Board, ranks: int) -> None:
        self._board, self._ranks = board, ranks
        self._last: list[tuple[int, int]] = []
        self._since_s = time.monotonic()
        self._longest_s = QUIET_S
        self.seen: dict[str, Any] | None = None

    def look(self, alive: list[bool]) -> float:
        """Returns for how many seconds nothing moved."""
        places = [self._board.read(rank) for rank in range(self._ranks)]
        moved = [(place.steps, place.operations) for place in places]
        if moved != self._last:
            self._last, self._since_s = moved, time.monotonic()
        quiet_s = time.monotonic() - self._since_s
        if quiet_s >= self._longest_s and all(place.pid for place in places):
            self._longest_s, self.seen = quiet_s, self._describe(places, alive)
        return quiet_s

    def keep(self, alive: list[bool]) -> None:
        """What is there now is what stays, however long ranks stood still before (while they started, say)."""
        self.seen = self._describe([self._board.read(rank) for rank in range(self._ranks)], alive)

    def _describe(self, places: list[Place], alive: list[bool]) -> dict[str, Any]:
        waits = [place.api not in NOT_WAITING for place in places]
        return {
            "blocked": [rank for rank, place in enumerate(places) if waits[rank] and alive[rank]],
            "outside": [rank for rank, place in enumerate(places) if not waits[rank] and alive[rank]],
            "dead": [rank for rank in range(self._ranks) if not alive[rank]],
            "calls": {str(rank): place.api for rank, place in enumerate(places)},
            "since_ns": {str(rank): place.since_ns for rank, place in enumerate(places)},
            "at_ns": time.monotonic_ns(),
        }


class Job:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.board = Board.create(folder / "board", args.layout.ranks)
        self.watch = Watch(self.board, args.layout.ranks)
        self.killed = False
        self.ranks: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self.ranks = [self._start_rank(rank) for rank in range(self.args.layout.ranks)]

    def _command(self, rank: int) -> list[str]:
        values = {name: getattr(self.args, name) for name in PASSED_ON}
        layout = self.args.layout
        values |= {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}
        values |= {"rank": rank, "folder": self.folder}
        if self.args.plan:
            values["fault"] = self.args.plan.text()
        options = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
        options += [f"--{name}" for name in SWITCHES if getattr(self.args, name)]
        return [sys.executable, "-m", "stallscope.sim.job", *options]

    def _start_rank(self, rank: int) -> subprocess.Popen[bytes]:
        size = str(self.args.layout.ranks)
        path = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
        environment = {"STALLSCOPE_SIM_DEVICES": size, **os.environ, "PYTHONPATH": path, "WORLD_SIZE": size}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        line = fault_file_line(self.args.plan) if self.args.plan and rank == self.args.plan.rank else None
        if line:
            (self.folder / "faults").write_text(line, encoding="utf-8")
            environment["STALLSCOPE_SIM_FAULTS"] = str(self.folder / "faults")
        return subprocess.Popen(self._command(rank), env=environment, stdin=subprocess.DEVNULL)

    def run(self) -> None:
        """Until all ranks ended, or nothing moved any more when the time is up."""
        hangs = self.args.plan is not None and self.args.plan.hangs
        # On a busy machine healthy ranks stand still for seconds, too: at their end, for one.
        patience_s = (1.0 if hangs else 5.0) + self.args.checkpoint_write + self.args.warm_up
        while any(alive := [process.poll() is None for process in self.ranks]):
            quiet_s = self.watch.look(alive)
            self._check()
            if self._time_is_up() and quiet_s >= patience_s:
                self.killed = True
                return
            time.sleep(LOOK_S)
        self._check()

    def _time_is_up(self) -> bool:
        """It runs from when all ranks are there: on a busy machine that takes seconds."""
        if not self.board.until_ns and all(self.board.read(rank).pid for rank in range(len(self.ranks))):
            self.board.until_ns = time.monotonic_ns() + int(self.args.duration * 1e9)
        return 0 < self.board.until_ns <= time.monotonic_ns()

    def _check(self) -> None:
        for rank, process in enumerate(self.ranks):
            dies = self.args.plan is not None and self.args.plan.kind == "die" and rank == self.args.plan.rank
            if process.poll() and not (dies and process.returncode == -signal.SIGKILL):
                raise JobError(f"rank {rank} (pid {process.pid}) ended with code {process.returncode}")

    def end(self) -> dict[str, Any]:
        alive = [process.poll() is None for process in self.ranks]
        if any(alive) and self.watch.look(alive) >= QUIET_S:
            self.watch.keep(alive)
        for process in self.ranks:
            if process.poll() is None:
                process.kill()
        for process in self.ranks:
            process.wait()
        truth = job_truth(self.folder, self.args, self.board, self.watch.seen)
        return {"launcher_pid": os.getpid(), "ended_by_launcher": self.killed, **truth}


def _stop(signum: int, _frame: object) -> None:
    sys.exit(128 + signum)


def _write(path: str | None, truth: dict[str, Any]) -> None:
    if path:
        fresh = Path(f"{path}.new")
        fresh.write_text(json.dumps(truth, indent=1) + "\n", encoding="utf-8")
        fresh.rename(path)


def _summary(truth: dict[str, Any]) -> str:
    ranks = truth["ranks"]
    steps, checkpoints = (sum(rank.get(key, 0) for rank in ranks) for key in ("steps", "checkpoints"))
    text = f"{len(ranks)} ranks, {steps} steps, {checkpoints} checkpoints"
    return text + (", ended by the launcher: nothing moved any more" if truth["ended_by_launcher"] else "")


def run_launcher(args: argparse.Namespace) -> int:
    library_folder()
    signal.signal(signal.SIGTERM, _stop)
    if args.hold and not sys.stdin.readline():
        return 1
    folder = Path(tempfile.mkdtemp(prefix="stallscope-job-"))
    job = Job(args, folder)
    try:
        job.start()
        job.run()
    finally:
        truth = job.end()
        _write(args.truth, truth)
        shutil.rmtree(folder, ignore_errors=True)
    print(_summary(truth))
    return 1 if job.killed and args.plan is None else 0

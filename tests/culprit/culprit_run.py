"""Runs one case: a simulated job of real processes, `stallscope attach` beside it, and both their records."""

from __future__ import annotations

import atexit
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from culprit_cases import IN_BLOCK_S, LATE, LATE_AFTER_STEPS, LIVE, MID, SHIM, STEP, Case

from stallscope.sim.job.board import Board

ROOT = Path(__file__).resolve().parents[2]
BUILT_LIB = ROOT / "build" / "sim" / "lib"
SHIM_LIB = ROOT / "build" / "shim" / "libstallscope.so"
LAYOUT = (2, 2, 2)
RANKS = 8
PATIENCE_S = 8.0  # after the fault: then nothing more is waited for
LINGER_S = 1.5  # after the first incident, for others that must not come
START_S = 60.0
END_S = 60.0
Json = dict[str, Any]
J = TypeVar("J", bound="Job")


@cache
def sim_lib() -> Path:
    """Copies of the simulated libraries: where many processes use a file, a tracer probes it in all processes, and what
    other tests run beside these must not be among them."""
    folder = Path(tempfile.mkdtemp(prefix="culprit-lib-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.chmod(folder, 0o755)
    return Path(shutil.copytree(BUILT_LIB, folder / "lib", symlinks=True))


class RunFailed(Exception):
    """The case could not be played."""


class Run(NamedTuple):
    """What came of it. Instants are CLOCK_MONOTONIC ns.

    `told_ns`: when the first incident was on stderr; `attached_ns`: when the probes were in place; `steps_then`: of the
    slowest rank when the incident was told.
    """

    report: Json
    truth: Json
    stderr: str
    attached_ns: int
    told_ns: int | None
    steps_then: int | None
    unix_minus_mono_ns: int


class Lines:
    """Lines of a pipe with the instants at which they came."""

    def __init__(self, pipe: IO[str]) -> None:
        self.lines: list[tuple[int, str]] = []
        self._thread = threading.Thread(target=self._pump, args=(pipe,), daemon=True)
        self._thread.start()

    def _pump(self, pipe: IO[str]) -> None:
        for line in pipe:
            self.lines.append((time.monotonic_ns(), line))

    def first(self, start: str) -> int | None:
        """When the first line that starts so came."""
        return next((at for at, line in list(self.lines) if line.startswith(start)), None)

    def text(self) -> str:
        """All of them, once the pipe has ended."""
        self._thread.join(END_S)
        return "".join(line for _, line in self.lines)


class Job:
    """The simulated job; its folder tells how far it is."""

    def __init__(self, folder: Path, *options: str, has_shim: bool = False, recording: Path | None = None) -> None:
        self.folder, self.truth_file, self.ranks = folder, folder / "truth.json", RANKS
        self.recording = recording
        command = [sys.executable, "-m", "stallscope.sim.job", f"--truth={self.truth_file}", "--hold", *options]
        self.figures = tempfile.mkdtemp(prefix="stallscope-figures-")
        os.chmod(self.figures, 0o755)
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "agent"),
            "STALLSCOPE_SIM_LIB": str(sim_lib()),
            "TMPDIR": str(folder),
            "STALLSCOPE_SIM_STATS": self.figures,
        }
        env.setdefault("STALLSCOPE_SHIM_GPU", "on")  # the simulated NCCL is an old one
        if has_shim:
            env["LD_PRELOAD"] = str(SHIM_LIB)
        self._board: Board | None = None
        self.process = self._start(command, env)

    def _start(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[Any]:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env, start_new_session=True
        )

    def go(self) -> None:
        """Let the ranks start."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.close()

    def _inner(self) -> Path | None:
        return next(self.folder.glob("stallscope-job-*"), None)

    def steps(self) -> int:
        """Of the slowest rank."""
        inner = self._inner()
        if self._board is None and inner and (inner / "board").exists():
            with suppress(ValueError):  # not written yet
                self._board = Board(inner / "board", self.ranks)
        return min(self._board.read(rank).steps for rank in range(self.ranks)) if self._board else 0

    def fault(self) -> Json:
        """What the rank at fault wrote down; empty before it happened."""
        inner = self._inner()
        path = inner / "fault.json" if inner else None
        found: Json = json.loads(path.read_text()) if path and path.exists() else {}
        return found

    def end(self) -> Json:
        """Stop it; its truth."""
        self.process.terminate()
        self.process.wait(END_S)
        truth: Json = json.loads(self.truth_file.read_text())
        return truth

    def kill(self) -> None:
        """Leave nothing behind."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.figures, ignore_errors=True)


class RunJob(Job):
    """The same under `stallscope run --json`, which is its tracer as well."""

    def _start(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[Any]:
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by kill
        run = [
            sys.executable,
            str(Path(__file__).parent / "culprit_shim.py"),
            self.figures,
            "--json",
            *_recorded(self.recording),
            "--",
        ]
        self.attached_ns = time.monotonic_ns()
        process = subprocess.Popen(
            [*run, *command], stdin=subprocess.PIPE, stdout=self._out, stderr=subprocess.PIPE, env=env,
            start_new_session=True,
        )  # fmt: skip
        assert process.stderr is not None
        self.lines = Lines(io.TextIOWrapper(process.stderr))
        return process

    def report(self) -> Json:
        """As a signal to it ends it."""
        self.process.terminate()
        self.process.wait(END_S)
        self._out.seek(0)
        text = self._out.read()  # what the job itself says stands in front
        begin = text.find("{\n") if "{\n" in text else text.find("{")
        if begin < 0:
            raise RunFailed(f"run made no report: {self.lines.text()}")
        report: Json = json.loads(text[begin:])
        return report

    def kill(self) -> None:
        """Leave nothing behind."""
        super().kill()
        self._out.close()


class Tracer:
    """`stallscope attach --json`."""

    def __init__(self, job: Job, *options: str) -> None:
        words = [str(job.process.pid), "--json", "--backend=object", *options]
        command = [sys.executable, str(Path(__file__).parent / "culprit_attach.py"), job.figures, *words]
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by kill
        self.process = subprocess.Popen(
            command,
            stdout=self._out,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "agent")},
        )
        assert self.process.stderr is not None
        self.lines = Lines(self.process.stderr)
        self.attached_ns = until(
            lambda: self.lines.first("attached to PID"), START_S, "no line `attached`", self._ended
        )

    def _ended(self) -> str | None:
        return None if self.process.poll() is None else f"attach ended: {self.lines.text()}"

    def report(self) -> Json:
        """As Ctrl-C ends it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        code = self.process.wait(END_S)
        if code != 0:
            raise RunFailed(f"attach ended with code {code}: {self.lines.text()}")
        self._out.seek(0)
        report: Json = json.load(self._out)
        return report

    def kill(self) -> None:
        """Leave nothing behind."""
        self.process.kill()
        self.process.wait()
        self._out.close()


def _recorded(path: Path | None) -> list[str]:
    return ["-o", str(path), "--force"] if path else []


def until(
    what: Callable[[], Any], seconds: float, complaint: str, problem: Callable[[], str | None] = lambda: None
) -> Any:
    """Wait for a value. Raises RunFailed at the deadline, or when `problem` says something."""
    end = time.monotonic() + seconds
    while not (value := what()):
        if said := problem():
            raise RunFailed(said)
        if time.monotonic() > end:
            raise RunFailed(f"{complaint} within {seconds:g} s")
        time.sleep(0.02)
    return value


def maybe(what: Callable[[], Any], end_ns: int) -> Any:
    """Wait for a value until an instant; the last one."""
    while not (value := what()) and time.monotonic_ns() < end_ns:
        time.sleep(0.02)
    return value


@contextmanager
def a_job(
    *options: str,
    make: Callable[..., J] = Job,  # type: ignore[assignment]
    layout: tuple[int, int, int] = LAYOUT,
    **more: Any,
) -> Iterator[J]:
    """A job that is gone at the end, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="culprit-") as folder:
        tp, pp, dp = layout
        job = make(Path(folder), f"--tp={tp}", f"--pp={pp}", f"--dp={dp}", *options, **more)
        job.ranks = tp * pp * dp
        try:
            yield job
        finally:
            job.kill()


@contextmanager
def a_tracer(job: Job, *options: str) -> Iterator[Tracer]:
    """An attach that is gone at the end, whatever happens."""
    tracer = Tracer(job, *options)
    try:
        yield tracer
    finally:
        tracer.kill()


def play(case: Case, step: int | None = None, recording: Path | None = None) -> Run:
    """Run a case, recorded if there is a place for it. Raises RunFailed."""
    at_step = STEP[case.mode] if step is None else step
    options = [f"--fault={case.fault(at_step)}", f"--ahead={case.ahead}", f"--seed={case.seed}"]
    options = ["--duration=600", "--load-time=0.5", *options]
    if case.via == SHIM and case.mode == LIVE:
        with a_job(*options, make=RunJob, recording=recording) as running:
            running.go()
            return _watched(case, running, running)
    with a_job(*options, has_shim=case.via == SHIM) as job:
        if case.mode != LIVE:
            job.go()
        if case.mode == LATE:
            until(lambda: job.steps() >= LATE_AFTER_STEPS, START_S, "the job did not come so far")
        if case.mode == MID:
            until(job.fault, START_S, "no fault")
            time.sleep(IN_BLOCK_S)
        with a_tracer(job, *_recorded(recording)) as tracer:
            if case.mode == LIVE:
                job.go()
            run = _watched(case, job, tracer)
    too_early = case.mode == LATE and run.truth["fault"]["start_ns"] < run.attached_ns
    if too_early and step is None:
        return play(case, 2 * at_step, recording)
    return run


def _watched(case: Case, job: Job, tracer: Tracer | RunJob) -> Run:
    """From the attach to the end."""
    fault = until(job.fault, START_S, "no fault")
    since_ns = max(fault["start_ns"], tracer.attached_ns)
    end_ns = since_ns + int(PATIENCE_S * 1e9)
    told_ns = maybe(lambda: tracer.lines.first("incident "), end_ns)
    steps_then = job.steps() if told_ns else None
    if told_ns:
        time.sleep(LINGER_S)
    if "resolved" in case.answer.also:
        over = until(lambda: job.fault().get("end_ns"), 60, "the fault did not end")
        maybe(lambda: tracer.lines.first("incident 1 resolved"), over + int(PATIENCE_S * 1e9))
    offset = time.time_ns() - time.monotonic_ns()
    report = tracer.report()
    truth = job.end()
    return Run(report, truth, tracer.lines.text(), tracer.attached_ns, told_ns, steps_then, offset)

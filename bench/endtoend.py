"""`stallscope attach` as a user runs it: time to the first event, memory, time to end."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from figures import Figure, of

from stallscope.wire.frames import Kind
from stallscope.wire.recording import read_recording

__all__ = ["cudart", "measure", "measure_busy"]

FIRST_BAR, RSS_BAR = 3.0, 100.0
WATCH_SECONDS = 2.0
LIMIT_SECONDS = 60.0
MB = 1e6
_ROOT = Path(__file__).resolve().parents[1]
_PLACES = (_ROOT / "build/sim/lib", _ROOT / "build/wheels/nvidia-cuda-runtime-cu12-12.9.79/nvidia/cuda_runtime/lib")
_REC_BYTES = 104


def cudart() -> Path | None:
    """The runtime to call: the simulated one, or a real one that was unpacked here."""
    found = (folder / "libcudart.so.12" for folder in _PLACES)
    return next((path for path in found if path.exists()), None)


@dataclass
class Run:
    """What one attach showed; seconds from its start, MB."""

    attached: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    rss: float = 0.0
    pss: float = 0.0
    peak: float = 0.0
    helper: float = 0.0
    faults: list[str] = field(default_factory=list)


@contextlib.contextmanager
def _caller(program: Path, library: Path, *words: str) -> Iterator[int]:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent)}
    command = [str(program), str(library), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the calling program ended with {process.wait()}")
        yield process.pid
    finally:
        process.kill()
        process.communicate()


class _Memory:
    """Watches a process and its children."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self.rss = self.pss = self.peak = self.helper = 0.0

    def look(self, attached: bool) -> None:
        """Once. `rss` is the largest sum since the attach, when the helper has ended; `peak` is of the whole time."""
        with contextlib.suppress(psutil.Error):
            family = [self._root, *self._root.children(recursive=True)]
            total = sum(p.memory_info().rss for p in family) / MB
            self.peak = max(self.peak, total)
            if attached:
                self.rss = max(self.rss, total)
                return
            helpers = [p for p in family if any("bcc_helper" in word for word in p.cmdline())]
            self.helper = max(self.helper, *(p.memory_info().rss / MB for p in helpers), 0.0)

    def look_closely(self) -> None:
        """The proportional size, in which shared pages count once."""
        with contextlib.suppress(psutil.Error):
            family = [self._root, *self._root.children(recursive=True)]
            self.pss = sum(p.memory_full_info().pss for p in family) / MB


def _command(pid: int, backend: str, recording: Path) -> list[str]:
    words = ["attach", str(pid), "--backend", backend, "--sample", "1/1", "--force", "-o", str(recording)]
    return [sys.executable, "-m", "stallscope.cli.main", *words]


def _attach(pid: int, backend: str, folder: Path) -> Run:
    run, recording, said = Run(), folder / "recording", folder / "stderr"
    with said.open("wb") as errors:
        start = time.monotonic()
        process = subprocess.Popen(_command(pid, backend, recording), stdout=subprocess.DEVNULL, stderr=errors)
        memory = _Memory(process.pid)
        while process.poll() is None and time.monotonic() - start < LIMIT_SECONDS:
            memory.look(bool(run.attached))
            if not run.attached and b"attached to" in said.read_bytes():
                run.attached = time.monotonic() - start
            if run.attached and time.monotonic() - start > run.attached + WATCH_SECONDS:
                break
            time.sleep(0.02)
        memory.look_closely()
        _end(process, run)
    run.rss, run.pss, run.peak, run.helper = memory.rss, memory.pss, memory.peak, memory.helper
    if process.returncode or not run.attached:
        run.faults.append(f"exit code {process.returncode}: {said.read_text()[-150:]!r}")
    else:
        run.first = _first_event(recording) - start
    return run


def _end(process: subprocess.Popen[bytes], run: Run) -> None:
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    try:
        process.wait(LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    run.ended = time.monotonic() - start


def _first_event(recording: Path) -> float:
    """When the first recorded call began, in seconds of CLOCK_MONOTONIC."""
    frames = (frame for frame in read_recording(str(recording)) if frame.kind == Kind.EVENTS)
    datas = [frame.body["data"] for frame in itertools.islice(frames, 4)]  # of both rings; later frames are later
    first = [int.from_bytes(data[at : at + 8], "little") for data in datas for at in range(0, len(data), _REC_BYTES)]
    return min(first, default=float("inf")) / 1e9


def measure(program: Path, library: Path, backend: str, rounds: int) -> list[Figure]:
    """Attach to a program that calls once a millisecond, `rounds` times."""
    runs = []
    with tempfile.TemporaryDirectory() as folder, _caller(program, library) as pid:
        for _ in range(rounds):
            runs.append(_attach(pid, backend, Path(folder)))
    return _figures(runs, backend)


def measure_busy(program: Path, library: Path, backend: str, rounds: int) -> list[Figure]:
    """Memory when the program does nothing but call, and every call is recorded."""
    with tempfile.TemporaryDirectory() as folder, _caller(program, library, "busy") as pid:
        runs = [_attach(pid, backend, Path(folder)) for _ in range(rounds)]
    return [of(f"RSS under full load [{backend}]", "MB", [r.rss for r in runs], note="MB", faults=_faults(runs))]


def _faults(runs: Sequence[Run]) -> list[str]:
    return [fault for run in runs for fault in run.faults][:2]


def _figures(runs: Sequence[Run], backend: str) -> list[Figure]:
    faults = _faults(runs)
    rows = [
        of(f"attach to first event [{backend}]", "s", [r.first for r in runs], bar=FIRST_BAR, note="s", faults=faults),
        of(f"attach to 'attached' [{backend}]", "s", [r.attached for r in runs], note="s"),
        of(f"Ctrl-C to end [{backend}]", "s", [r.ended for r in runs], note="s"),
        of(f"RSS of all processes [{backend}]", "MB", [r.rss for r in runs], bar=RSS_BAR, note="MB", faults=faults),
        of(f"PSS of all processes [{backend}]", "MB", [r.pss for r in runs], note="MB"),
    ]
    if any(r.helper for r in runs):
        rows.append(of("peak with the bcc helper", "MB", [r.peak for r in runs], note="MB, all processes"))
        rows.append(of("peak of the bcc helper", "MB", [r.helper for r in runs], note="MB, the helper alone"))
    return rows

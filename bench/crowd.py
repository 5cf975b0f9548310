"""What a call costs in one traced process, and what it costs when 64 of its children are traced on the same library."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from figures import Figure, of

__all__ = ["attached", "measure"]

CHILDREN = 64
BAR = 1.3
SETTLE_S = 2.0
Costs = tuple[float, float]


class _Caller:
    """The calling program; ns of a launch and of a wait."""

    def __init__(self, program: Path, library: Path, children: int) -> None:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent), "STALLSCOPE_SIM_DRIVER": "inside",
                       "STALLSCOPE_SIM_KERNEL_NS": "1"}  # fmt: skip
        self._process = subprocess.Popen(
            [str(program), str(library), str(children)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.pid = self._process.pid
        if self._line() != "ready\n":
            raise RuntimeError("the calling program did not start")

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def costs(self) -> Costs:
        """Measure once."""
        assert self._process.stdin is not None
        self._process.stdin.write("m\n")
        self._process.stdin.flush()
        launch, wait = self._line().split()
        return float(launch), float(wait)

    def close(self) -> None:
        """End it and its children."""
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def attached(pid: int, backend: str) -> Iterator[None]:
    """The product's command, attached while the context lasts."""
    command = [sys.executable, "-m", "stallscope.cli.main", "attach", str(pid), "--backend", backend]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("attached to"):
                break
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


def _added(caller: _Caller, backend: str) -> Costs:
    """What the tracer adds to a launch and to a wait, ns."""
    bare = caller.costs()
    with attached(caller.pid, backend):
        time.sleep(SETTLE_S)  # links that were replaced are closed in the background
        traced = caller.costs()
    return traced[0] - bare[0], traced[1] - bare[1]


def measure(program: Path, library: Path, backend: str, rounds: int) -> list[Figure]:
    """Alone and in the crowd by turns; the ratio of what the tracer adds, round by round."""
    ratios: list[Costs] = []
    with contextlib.ExitStack() as stack:
        alone, crowd = (stack.enter_context(contextlib.closing(_Caller(program, library, n))) for n in (0, CHILDREN))
        for _ in range(rounds):
            one, many = _added(alone, backend), _added(crowd, backend)
            ratios.append((many[0] / one[0], many[1] / one[1]))
    names = ("launch", "wait")
    return [
        of(f"{name} among {CHILDREN} traced children [{backend}]", "", [r[i] for r in ratios], bar=BAR, note="of alone")
        for i, name in enumerate(names)
    ]

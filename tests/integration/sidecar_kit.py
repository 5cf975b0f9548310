"""`stallscope sidecar`, here or in a container, and trainers that share a folder with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import ROOT, SIM_LIB, STALLSCOPE, Lines
from run_kit import SHIM

GROUP = 65532
HERE = Path("/volume")  # where a container has the shared folder


@contextmanager
def volume() -> Iterator[Path]:
    """A folder on a tmpfs whose files are their group's, as Kubernetes makes an emptyDir with fsGroup."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name, "segments")
        folder.mkdir()
        folder.parent.chmod(0o755)
        if os.geteuid() == 0:
            os.chown(folder, -1, GROUP)
        folder.chmod(0o2777)
        yield folder


def preloaded(folder: Path, **more: str) -> dict[str, str]:
    """What a trainer's manifest says, and where the simulated stack is."""
    stack = {"LD_LIBRARY_PATH": str(SIM_LIB), "STALLSCOPE_SIM_LIB": str(SIM_LIB)}
    return {**stack, "LD_PRELOAD": str(SHIM), "STALLSCOPE_SHIM": f"dir:{folder}", **more}


class Process:
    """A program in the background; `stop` as Kubernetes does it."""

    def __init__(self, words: Sequence[Any], env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            list(map(str, words)), env={**os.environ, **(env or {})}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.lines, self.errors = Lines(self.process.stdout), Lines(self.process.stderr)

    def say(self, line: str = "go") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def truth(self) -> dict[str, Any]:
        """Wait for the end; the line of JSON before it."""
        found: dict[str, Any] = json.loads(self.lines.wait_for("{"))
        assert self.process.wait(60) == 0
        return found

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Sidecar(Process):
    """It prints its report as JSON."""

    def __init__(self, folder: Path, *options: Any, before: Sequence[Any] = STALLSCOPE, **env: str) -> None:
        super().__init__([*before, "sidecar", "--dir", folder, "--json", *options], env)

    def watching(self) -> Any:
        """Wait until it does."""
        self.errors.wait_for("watching ")
        return self

    def report(self, code: int = 0) -> dict[str, Any]:
        """Its report, once it has ended by itself or was stopped."""
        out = self.lines.rest()
        assert self.process.wait(60) == code, self.errors.rest()
        found: dict[str, Any] = json.loads(out)
        return found


def in_container(podman: Sequence[str], folder: Path, *options: Any, user: str | None = None) -> list[Any]:
    """The command up to the program: this machine's files, read-only, without capabilities, and the volume."""
    words = [*podman, "--read-only", "--read-only-tmpfs=false", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
    words += [f"--user={user}"] if user else []
    return [*words, "-v", f"{folder}:{HERE}", *options, "--rootfs", "/:O"]


def variables(env: dict[str, str]) -> list[str]:
    """As options of podman."""
    return [f"--env={name}={value}" for name, value in env.items()]


def job(*options: str) -> list[Any]:
    """The simulated job."""
    return [sys.executable, "-m", "stallscope.sim.job", *options]


def installed(folder: Path) -> dict[str, str]:
    """What `sidecar --install` says."""
    done = subprocess.run(
        [*STALLSCOPE, "sidecar", "--install", folder, "--dir", HERE], capture_output=True, text=True, check=True
    )
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


__all__ = ["GROUP", "HERE", "ROOT", "Process", "Sidecar", "in_container", "installed", "job", "preloaded", "variables",
           "volume"]  # fmt: skip

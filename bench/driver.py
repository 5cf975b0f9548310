"""The process that calls the stubs, and what its memory says about probes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from stub_library import StubLibrary

__all__ = ["Driver"]

BREAKPOINT = 0xCC


class Driver:
    """A pinned process that has the libraries mapped and calls functions of the first one.

    Args:
        program: the compiled driver.c, or the words of a command that runs it.
        core: the CPU it runs on.
    """

    def __init__(self, program: Path | Sequence[str], core: int, libraries: Sequence[StubLibrary]) -> None:
        words = [str(program)] if isinstance(program, Path) else program
        command = [*words, str(core), *(str(library.path) for library in libraries)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._library = libraries[0]
        pid, first = self._answer().split()
        self.pid = int(pid)
        self._base = int(first, 16) - self._library.addresses[0]
        self.calls = [0] * len(self._library.offsets)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the driver ended with {self._process.wait()}")
        return line

    def measure(self, function: int, calls: int, windows: int) -> float:
        """Median over the windows of ns per call."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{function} {calls} {windows}\n")
        self._process.stdin.flush()
        self.calls[function] += calls * windows
        return float(self._answer())

    def probed(self, function: int) -> bool:
        """Whether a breakpoint stands at the function in this process."""
        with open(f"/proc/{self.pid}/mem", "rb") as memory:
            memory.seek(self._base + self._library.addresses[function])
            return memory.read(1)[0] == BREAKPOINT

    def wait_probed(self, function: int, seconds: float) -> bool:
        """Whether one appears within that time."""
        deadline = time.monotonic() + seconds
        while not self.probed(function):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

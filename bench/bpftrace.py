"""The tool to compare with: a latency histogram by uprobe and uretprobe."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from types import TracebackType

from driver import Driver
from stub_library import StubLibrary

__all__ = ["Bpftrace", "missing"]

ATTACH_SECONDS, STOP_SECONDS = 20.0, 5.0
_COUNT = re.compile(r"^\[[^\n]*\)\s+(\d+) \|", re.MULTILINE)  # [256, 512)   1234 |@@@   |


def missing() -> str | None:
    """Why it can't run here."""
    return None if shutil.which("bpftrace") else "bpftrace is not installed (apt install bpftrace)"


def _script(library: StubLibrary, function: int) -> str:
    at = f"{library.path}:f_{function:03d}"
    return f"uprobe:{at}{{@s[tid]=nsecs}} uretprobe:{at}{{@h=hist(nsecs-@s[tid]); delete(@s[tid])}}"


class Bpftrace:
    """Attached to one function while the context lasts.

    Raises RuntimeError when no breakpoint appears in the driver.
    """

    def __init__(self, driver: Driver, library: StubLibrary, function: int, core: int) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        command = ["bpftrace", "-e", _script(library, function)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output)
        os.sched_setaffinity(self._process.pid, {core})
        if not driver.wait_probed(function, ATTACH_SECONDS):
            self.close()
            raise RuntimeError(f"bpftrace attached nothing within {ATTACH_SECONDS:g} s: {self._said()}")

    def _said(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace").strip()[-300:]

    def stop(self) -> int:
        """End it; how many calls its histogram holds, -1 when it gave none."""
        self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.close()
        self._output.seek(0)
        counts = _COUNT.findall(self._output.read().decode(errors="replace"))
        return sum(map(int, counts)) if counts else -1

    def close(self) -> None:
        """SIGKILL: version 0.17 has been seen to hang on SIGTERM, in epoll."""
        self._process.kill()
        self._process.wait(10)

    def __enter__(self) -> Bpftrace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

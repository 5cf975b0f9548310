"""What the conductor and a worker say to each other: JSON lines over two pipes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from gpufind.hooks import mapped_libraries

Message = dict[str, Any]


class Expect(NamedTuple):
    """What each call of a window should hit; names without version and default stream, as regular expressions."""

    family: str
    driver: str
    runtime: str = ""
    nccl: str = ""


LAUNCH = Expect(
    "launch", "cuLaunchKernel(Ex)?|cuLaunchCooperativeKernel", "cudaLaunchKernel(ExC)?|cudaLaunchCooperativeKernel"
)
GRAPH = Expect("graph launch", "cuGraphLaunch", "cudaGraphLaunch")
DEVICE_WAIT = Expect("device wait", "cuCtxSynchronize", "cudaDeviceSynchronize")
STREAM_WAIT = Expect("stream wait", "cuStreamSynchronize", "cudaStreamSynchronize")
EVENT_WAIT = Expect("event wait", "cuEventSynchronize", "cudaEventSynchronize")
EVENT = Expect("event record", "cuEventRecord(WithFlags)?", "cudaEventRecord(WithFlags)?")
COPY = Expect("copy", "cuMemcpy(HtoD|DtoH|DtoD|2D|3D)?(Async)?", "cudaMemcpy(Async|2D|3D)?(Async)?")
ALLOC = Expect("allocation", "cuMemAlloc(Async)?", "cudaMalloc(Async)?")
FREE = Expect("free", "cuMemFree(Async)?", "cudaFree(Async)?")
COLLECTIVE = Expect("collective", "", "", "ncclAllReduce")


class Unavailable(Exception):
    """The step can't run here; the text says why."""


class Channel:
    """The worker's end."""

    def __init__(self, read_fd: int, write_fd: int, options: Message) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self.options = options

    def say(self, message: Message) -> None:
        """Send one message."""
        os.write(self._write_fd, json.dumps(message).encode() + b"\n")

    def ask(self, message: Message) -> None:
        """Send one message, return when the conductor has done what it wants done."""
        self.say(message)
        if not os.read(self._read_fd, 1):
            raise SystemExit("the conductor is gone")

    def count(self, what: str, calls: int, call: Callable[[], Any], *expects: Expect, total: int = 0) -> None:
        """Make the calls while the conductor counts; results that are int are taken for return codes.

        Args:
            total: calls that should be counted, where it is not `calls` (other processes make some).
        """
        self.ask({"say": "begin"})
        results = [call() for _ in range(calls)]
        codes = sorted({r for r in results if isinstance(r, int) and not isinstance(r, bool)})
        made = total or calls
        row = {"what": what, "calls": made, "codes": codes, "expects": [expect._asdict() for expect in expects]}
        self.ask({"say": "end", "row": row})

    def fact(self, name: str, value: Any) -> None:
        """Record something beside the counts."""
        self.say({"say": "fact", "name": name, "value": value})

    def finish(self) -> None:
        """The step is over: tell which libraries were mapped and whether a thread left the counted CPU."""
        strays = sum(_cpus_of(task) != os.sched_getaffinity(0) for task in Path("/proc/self/task").iterdir())
        self.say({"say": "done", "libraries": mapped_libraries(), "strays": strays})


def _cpus_of(task: Path) -> set[int]:
    try:
        return os.sched_getaffinity(int(task.name))
    except OSError:
        return os.sched_getaffinity(0)

"""Recordings of a daemon: one file a stream, the oldest go when there are too many. Nothing is recorded by default."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from stallscope.wire.recording import Recorder

__all__ = ["Tapes"]

_NAME = re.compile(r"stallscope-[0-9a-f]{16}\.stall")


class Tapes:
    """Files in a folder that this process may write to.

    Attributes:
        problem: why the newest file is not whole, or could not be made.
    """

    def __init__(self, folder: Path, files: int) -> None:
        self._folder, self._files = folder, files
        self._recorder: Recorder | None = None
        self.problem: str | None = None

    def begin(self, start_unix_ns: int) -> None:
        """The next stream has its own file."""
        self.close()
        path = self._folder / f"stallscope-{start_unix_ns:016x}.stall"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._remove_oldest()
            self._recorder = Recorder(os.open(path, flags, 0o600))
        except OSError as error:
            self.problem = f"cannot record to {path}: {os.strerror(error.errno or 0)}"

    def _remove_oldest(self) -> None:
        ours = sorted(path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))
        for path in ours[: max(0, len(ours) - self._files + 1)]:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def write(self, data: bytes) -> None:
        """Bytes of whole frames."""
        if self._recorder is not None:
            self._recorder.write(data)
            self.problem = self._recorder.problem or self.problem

    def close(self) -> None:
        """The stream is over."""
        if self._recorder is not None:
            self._recorder.close()
            self.problem = self._recorder.problem or self.problem
            self._recorder = None

"""Links that nobody needs any more are closed in a thread: the kernel takes some 20 ms a link, a look must not wait."""

from __future__ import annotations

import queue
import threading
from typing import Any

from stallscope.capture.links import close_all

__all__ = ["Reaper"]


class Reaper:
    """Starts its thread at the first use."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[tuple[list[Any], list[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def close_later(self, entries: list[Any], returns: list[Any]) -> None:
        """Close these, entries first, soon."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="unlink", daemon=True)
            self._thread.start()
        self._todo.put((entries, returns))

    def _work(self) -> None:
        while (links := self._todo.get()) is not None:
            close_all(*links)

    def stop(self) -> None:
        """Wait until all is closed."""
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join()
            self._thread = None

"""Faults of our own: one must cost a person the part that it lies in, and never the rest of the report."""

from __future__ import annotations

import traceback
from types import TracebackType

__all__ = ["Faults"]

MAX_TOLD = 16


class Faults:
    """What of stallscope itself failed while it made a report.

    Attributes:
        strict: raise instead; for tests, in which a fault must not look like an empty section.
        first: the traceback of the first one, for a report to the authors.
        turned_away: how many came after MAX_TOLD.
    """

    strict = False

    def __init__(self) -> None:
        self._told: dict[str, None] = {}
        self.first = ""
        self.turned_away = 0

    def __bool__(self) -> bool:
        return bool(self._told)

    def held(self, part: str) -> _Held:
        """A context that a fault in `part` does not leave."""
        return _Held(self, part)

    def add(self, part: str, error: Exception) -> str:
        """Keep it; the sentence that says so."""
        last = traceback.extract_tb(error.__traceback__)[-1:]
        where = "".join(f" at {_module(frame.filename)}:{frame.lineno}" for frame in last)
        words = f"{part} failed by a fault of stallscope ({type(error).__name__}{where}); please report it"
        if len(self._told) < MAX_TOLD or words in self._told:
            self._told[words] = None
        else:
            self.turned_away += 1
        self.first = self.first or "".join(traceback.format_exception(error))
        return words

    def notes(self) -> list[str]:
        """One sentence each."""
        more = [f"{self.turned_away} more faults of stallscope"] if self.turned_away else []
        return [*self._told, *more]


class _Held:
    """Ends the part, not the report. What asks the process to end passes."""

    def __init__(self, faults: Faults, part: str) -> None:
        self._faults, self._part = faults, part

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or self._faults.strict:
            return False
        self._faults.add(self._part, error)
        return True


def _module(path: str) -> str:
    """The path below the package: where it is installed is nobody's business."""
    return path.rpartition("stallscope/")[2]

"""A capture as its frames come, live or from a recording: state and diagnosis advance together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stallscope.aggregate.state import State
from stallscope.diagnose.watch import Watch
from stallscope.wire.frames import Frame, Kind
from stallscope.wire.recording import Ending

__all__ = ["Follower"]


class Follower:
    """What the frames so far add up to (`state`), and what follows from it (`watch`)."""

    def __init__(self) -> None:
        self.state = State()
        self.watch = Watch(self.state)
        self._is_blind = False

    def apply(self, frame: Frame) -> bool:
        """Take the next frame; whether the diagnosis looked again."""
        self.state.apply(frame)
        looks = frame.kind == Kind.TICK and self.state.dropped is None and not self.state.complete
        if looks and not self._is_blind:
            with self._diagnosis():
                self.watch.step()
        return looks

    def finish(self, ending: Ending | None) -> None:
        """The stream is over; `ending` says how, None after a farewell."""
        self.state.finish(ending)
        if not self._is_blind:
            with self._diagnosis():
                self.watch.finish()

    @contextmanager
    def _diagnosis(self) -> Iterator[None]:
        """Where it fails it ends: it goes on from what it found before. Calls and waits are reported all the same."""
        done = False
        with self.state.faults.held("the diagnosis (incidents, episodes, steps) of what came later"):
            yield
            done = True
        self._is_blind = not done

"""A capture as its frames come, live or from a recording: state and diagnosis advance together."""

from __future__ import annotations

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

    def apply(self, frame: Frame) -> bool:
        """Take the next frame; whether the diagnosis looked again."""
        self.state.apply(frame)
        looks = frame.kind == Kind.TICK and self.state.dropped is None and not self.state.complete
        if looks:
            self.watch.step()
        return looks

    def finish(self, ending: Ending | None) -> None:
        """The stream is over; `ending` says how, None after a farewell."""
        self.state.finish(ending)
        self.watch.finish()

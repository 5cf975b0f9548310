"""The search for calls under way, when the parser is slow or the kernel refuses; stacks and parser are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stallscope.capture import inference as module
from stallscope.capture.inference import Inference
from stallscope.capture.parser_client import ParserFailed


class Clock:
    """Moves when the parser is asked."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Any:
    scene = SimpleNamespace(close=lambda: None, relevant=lambda stack, pc: ([], []), hooks=[])
    monkeypatch.setattr(module.Scene, "of", lambda pid, hooks: scene)
    monkeypatch.setattr(module, "threads_of", lambda pid: list(range(1, 101)))
    return SimpleNamespace(pid=1, proc=1, linked={1: SimpleNamespace(places=[])}, inferred=[], preloaded=False)


def test_a_parser_that_hangs_holds_the_attach_up_for_a_moment(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 threads and 3 s each would be five minutes in which nothing is drained and Ctrl-C does nothing."""
    clock, notes = Clock(), []

    def infer(**_: Any) -> None:
        clock.now += 3_000_000_000
        raise ParserFailed("cannot parse", "infer", "no answer within 3 s", died=True)

    monkeypatch.setattr(module, "read_blocked", lambda pid, tid: (8, 8, b""))
    rows = SimpleNamespace(thread_calls=lambda pid, tid: None)
    Inference(SimpleNamespace(infer=infer), rows, lambda kind, body: notes.append(body["text"]), clock).search(target)  # type: ignore[arg-type]
    assert clock.now <= 3_000_000_000
    assert notes[-1] == "99 threads were not searched for calls that began before the attach"


def test_sampling_that_is_refused_is_a_note(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the attach does not need it."""

    def refuse(tid: int) -> None:
        raise PermissionError(13, "Permission denied")

    notes: list[str] = []
    monkeypatch.setattr(module, "read_blocked", lambda pid, tid: None)
    monkeypatch.setattr(module, "sample_running", refuse)
    Inference(None, None, lambda kind, body: notes.append(body["text"]), Clock()).search(target)  # type: ignore[arg-type]
    assert len(notes) == 1 and "Permission denied" in notes[0]

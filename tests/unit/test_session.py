"""The capture loop's decisions, with stand-ins for everything that needs rights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from stallscope.capture.discovery import Lost, Mapped
from stallscope.capture.libmatch import WANTED, match
from stallscope.capture.session import Session


def session(**parts: Any) -> Session:
    """A session that has only these parts."""
    made = Session.__new__(Session)
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def test_lost_mappings_are_looked_for() -> None:
    """The perf ring was full: a library may be mapped that no record tells of."""
    looked: list[tuple[str, int]] = []
    told: list[str] = []
    made = session(
        _discovery=SimpleNamespace(read=lambda: [Lost(0, 0, 9, 1, 17)]),
        _clock=lambda: 1000,
        _mappings_read_ns=400,
        population=SimpleNamespace(live=lambda: ["one", "two"]),
        outbox=SimpleNamespace(send=lambda kind, body: told.append(body["text"])),
        _linker=SimpleNamespace(link_process=lambda target, since: looked.append((target, since))),
    )
    made._read_mappings()
    assert looked == [("one", 400), ("two", 400)]
    assert told == ["17 mapping records were lost; every process was looked at again"]
    made._discovery = SimpleNamespace(read=lambda: [Mapped(1, 1, 9, 0, 1, 0, (0, 0), 5, "/x")])  # type: ignore[assignment]
    made.population.by_pid = lambda pid: None  # type: ignore[method-assign]
    made._read_mappings()
    assert len(looked) == 2


def test_the_coarse_filter_lets_all_through_that_matches() -> None:
    """What `match` takes, the filter on raw bytes must not leave out."""
    for name in ("libcudart.so.12", "libcudart-4f6ac1d2.so.12", "libcuda.so.1 (deleted)", "libnccl.so.2", "libcuda.so"):
        assert match(f"/a/{name}")
        assert WANTED.search(f"/a/{name}".encode())
    assert not WANTED.search(b"/usr/lib/libc.so.6")

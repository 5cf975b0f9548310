"""Loses records of a recording on purpose, and says so in it, as a full ring would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stallscope.wire.columns import REC, UID_REC
from stallscope.wire.frames import FILE_HEADER_BYTES, Decoder, Frame, Kind, encode, file_header

DONE = 2


class Loss(NamedTuple):
    """What to lose: records sent from `from_ns` to before `to_ns`, of one slot or of all (None)."""

    from_ns: int
    to_ns: int
    slot: int | None = None


def frames_of(path: Path) -> list[Frame]:
    """All frames of a recording."""
    return list(Decoder().feed(path.read_bytes()[FILE_HEADER_BYTES:]))


def slots_of(frames: list[Frame]) -> dict[int, int]:
    """pid -> slot."""
    pids = {f.body["proc"]: f.body["pid"] for f in frames if f.kind == Kind.PROCESS}
    return {pids[f.body["proc"]]: f.body["slot"] for f in frames if f.kind == Kind.SLOT}


def start_of(frames: list[Frame]) -> int:
    """CLOCK_MONOTONIC ns at the start of the capture."""
    return int(frames[0].body["start_mono_ns"])


def cut(frames: list[Frame], loss: Loss, path: Path) -> int:
    """Write the recording without these records; how many they were."""
    lost = 0
    with path.open("wb") as file:
        file.write(file_header())
        for frame in _cut(frames, loss):
            lost += frame.body["count"] if frame.kind == Kind.GAP and frame.body["reason"] == "vital ring full" else 0
            file.write(encode(Kind(frame.kind), frame.body))
    return lost


def _cut(frames: list[Frame], loss: Loss) -> Iterator[Frame]:
    missed = 0
    for frame in frames:
        now = frame.body.get("at_ns") or 0
        if frame.kind == Kind.TICK and missed:
            # The capture tells a loss at the latest after a second, and the counts go on.
            yield Frame(Kind.GAP, _gap(missed, loss, now))
            missed = 0
        if frame.kind in (Kind.EVENTS, Kind.UIDS):
            frame, number = _without(frame, loss)
            missed += number
        yield frame


def _gap(missed: int, loss: Loss, now: int) -> dict[str, Any]:
    return {
        "source": "bpf",
        "proc": None,
        "count": missed,
        "from_ns": loss.from_ns,
        "to_ns": min(now, loss.to_ns),
        "reason": "vital ring full",
    }


def _without(frame: Frame, loss: Loss) -> tuple[Frame, int]:
    rows = np.frombuffer(frame.body["data"], UID_REC if frame.kind == Kind.UIDS else REC)
    recs = rows["rec"] if frame.kind == Kind.UIDS else rows
    sent = recs["ts_ns"].astype(np.int64) + np.where(recs["kind"] == DONE, recs["dur_ns"].astype(np.int64), 0)
    gone = (sent >= loss.from_ns) & (sent < loss.to_ns)
    if loss.slot is not None:
        gone &= recs["slot"] == loss.slot
    left = rows[~gone]
    return Frame(frame.kind, {**frame.body, "count": len(left), "data": left.tobytes()}), int(gone.sum())

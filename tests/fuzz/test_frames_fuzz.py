"""Hostile frames: any field missing, of another type or out of range. The source may be dropped; nothing may break."""

from __future__ import annotations

import io
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

import numpy as np
from aggregate_kit import hello, small

from stallscope.aggregate.state import State
from stallscope.diagnose.incident import Found
from stallscope.output.finish import finish
from stallscope.wire.frames import BadFrame, Decoder, Frame, Kind
from stallscope.wire.recording import Ending

SECONDS = 5.0
ODD: list[Any] = [None, True, False, 0, 1, -1, 399, 400, 127, 128, 2**31, 2**32 - 1, 2**63, 2**64 - 1, -(2**63), 1.5,
                  float("nan"), float("inf"), "", "x" * 5000, "\x1b[2J", b"", b"x", bytes(103), bytes(104), bytes(232),
                  [], [[]], [1], [[1, 2, []]], [[1, 2, [[1, 2, 3, 4, [0] * 8]]]], {}, {"a": 1}, {"a": [1, 2]},
                  [[1, "a", "b", "c", True]], list(range(500)), [-1], ["a"] * 70]  # fmt: skip


def ends_well(state: State) -> None:
    """Both reports can be printed."""
    for as_json in (True, False):
        finish(state, Found(), as_json=as_json, out=io.StringIO(), err=io.StringIO())


def mutated(rng: random.Random, value: Any) -> Any:
    """Something like `value`, somewhere wrong."""
    if rng.random() < 0.4:
        return rng.choice(ODD)
    if isinstance(value, bytes) and value:
        data = bytearray(value)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)
    if isinstance(value, list) and value:
        changed = list(value)
        place = rng.randrange(len(changed))
        changed[place] = mutated(rng, changed[place])
        return changed
    return rng.choice(ODD)


def test_fields() -> None:
    rng, end = random.Random(2), time.monotonic() + SECONDS
    kit = small()
    kit.flush()
    while time.monotonic() < end:
        state = State()
        for kind, original in kit.frames:
            body = dict(original)
            if rng.random() < 0.15:
                key = rng.choice(list(body))
                if rng.random() < 0.2:
                    del body[key]
                else:
                    body[key] = mutated(rng, body[key])
            state.apply(Frame(kind, body))
        ends_well(state)


def test_every_field_of_every_frame_once() -> None:
    kit = small()
    kit.flush()
    for i, (_, body) in enumerate(kit.frames):
        for key in body:
            for value in ODD:
                state = State()
                for j, (other, original) in enumerate(kit.frames[: i + 1]):
                    state.apply(Frame(other, {**original, key: value} if i == j else original))
        ends_well(state)


def test_bytes() -> None:
    rng, end = random.Random(3), time.monotonic() + SECONDS
    whole = b"".join(small().encoded())
    while time.monotonic() < end:
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        state, decoder = State(), Decoder()
        try:
            for frame in decoder.feed(bytes(data)):
                state.apply(frame)
        except BadFrame as error:
            state.finish(Ending(error.offset, 0, error.why))
        ends_well(state)


def test_records() -> None:
    """Random records within what the format allows: all counted somewhere, all tables bounded."""
    rng = np.random.default_rng(4)
    end = time.monotonic() + SECONDS / 2
    while time.monotonic() < end:
        state = State()
        state.apply(Frame(Kind.HELLO, hello()))
        for slot in range(1, 5):
            body = {"proc": slot, "pid": slot, "name": "x", "cmdline": [], "start_ns": 0}
            state.apply(Frame(Kind.PROCESS, body))
            state.apply(Frame(Kind.SLOT, {"slot": slot, "proc": slot, "at_ns": 0}))
        rows = rng.integers(0, 256, (2000, 104), dtype=np.uint8)
        rows[:, 24:26] = rng.integers(0, 400, 2000).astype("<u2").view(np.uint8).reshape(-1, 2)
        rows[:, 26] %= 7
        rows[:, 28] %= 128
        rows[:, 29] = 0
        state.apply(Frame(Kind.EVENTS, {"count": 2000, "data": rows.tobytes()}))
        assert state.dropped is None
        ends_well(state)


def test_unknown_kinds_and_no_hello() -> None:
    state = State()
    state.apply(Frame(60000, {"x": 1}))
    state.apply(Frame(Kind.TICK, {"at_ns": 1}))
    assert state.dropped is not None and state.unknown_kinds == 1
    ends_well(state)

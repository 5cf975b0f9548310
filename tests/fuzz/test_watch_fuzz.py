"""Hostile frames of a blocked job, all the way through the diagnosis and both reports."""

from __future__ import annotations

import io
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

from test_frames_fuzz import ODD, mutated
from test_watch import Blocked

from stallscope.diagnose.follow import Follower
from stallscope.output.announce import Announcer
from stallscope.output.finish import finish
from stallscope.wire.frames import Frame, Kind

SECONDS = 10.0
Frames = list[tuple[Kind, dict[str, object]]]


def blocked() -> Frames:
    """One of two ranks does not come; every kind of frame that tells about a block."""
    job = Blocked()
    job.add(Kind.GPU, at_ns=job.clock, note=None,
            devices=[[0, "GPU-1", 99, 78_000, 700_000, 1980, 1980, 1 << 30, 0, [4001]]])  # fmt: skip
    job.wait()
    job.run(1)
    job.add(Kind.SUSPECT, at_ns=job.clock, since_ns=job.waiting_since, on=True)
    job.host(2, writing=["/data/checkpoint", 1 << 20])
    job.add(
        Kind.STACK, at_ns=job.clock, proc=2, tid=4002, by="py-spy", frames=[["a.py", 7, "load", "python"]], why=None
    )
    job.add(Kind.WITNESS, at_ns=job.clock, source="ras", says="rank 1 is missing", detail={"ranks": 2})
    job.run(3)
    job.add(Kind.NOTE, at_ns=job.clock, proc=2, text="a note")
    job.add(Kind.EXIT, proc=2, at_ns=job.clock, code=None, signal=9)
    job.run(1)
    assert [incident.kind for incident in job.follower.watch.incidents] == ["NOT_ARRIVED"]
    return job.frames


def follow(frames: Frames) -> Follower:
    """Through everything, as the aggregator does."""
    follower, announcer = Follower(), Announcer(io.StringIO())
    for kind, body in frames:
        if follower.apply(Frame(kind, body)):
            announcer.look(follower.watch)
    follower.finish(None)
    for as_json in (True, False):
        finish(follower.state, follower.watch, as_json=as_json, out=io.StringIO(), err=io.StringIO())
    return follower


def test_any_field_of_any_frame() -> None:
    rng, end, turns = random.Random(5), time.monotonic() + SECONDS, 0
    frames = blocked()
    while time.monotonic() < end or not turns:
        changed = []
        for kind, original in frames:
            body = dict(original)
            if rng.random() < 0.03:
                key = rng.choice(list(body))
                if rng.random() < 0.2:
                    del body[key]
                else:
                    body[key] = mutated(rng, body[key])
            changed.append((kind, body))
        follow(changed)
        turns += 1


def test_frames_left_out_doubled_and_in_another_order() -> None:
    rng, end, turns = random.Random(6), time.monotonic() + SECONDS, 0
    frames = blocked()
    while time.monotonic() < end or not turns:
        changed = [frames[0]]
        for frame in frames[1:]:
            changed += [frame] * rng.choice((0, 1, 1, 1, 1, 1, 1, 2))
        for _ in range(rng.randrange(10)):
            one, other = (rng.randrange(1, len(changed)) for _ in range(2))
            changed[one], changed[other] = changed[other], changed[one]
        follow(changed)
        turns += 1


def test_instants_of_any_size() -> None:
    """What is told about time that runs backwards may be wrong; nothing may break."""
    rng = random.Random(7)
    frames = blocked()
    for value in (v for v in ODD if isinstance(v, int) and not isinstance(v, bool)):
        changed = [(k, {**b, "at_ns": value} if "at_ns" in b and rng.random() < 0.1 else b) for k, b in frames]
        follow(changed)

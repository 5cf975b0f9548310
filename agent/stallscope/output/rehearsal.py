"""A capture that never was, with something of everything in it: what a process runs before it gives up its rights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from stallscope.aggregate.events import ABANDONED, CALL, DONE, ENTER
from stallscope.aggregate.state import State
from stallscope.aggregate.tape import NCCL, TOKEN, WAITED
from stallscope.diagnose.follow import Follower
from stallscope.diagnose.incident import Collective, Culprit, Episode, Found, Incident, Longest, Place
from stallscope.diagnose.steps import Part, Range, SlowStep, StepsFound
from stallscope.diagnose.steptrack import Track
from stallscope.wire.columns import COUNT, REC, TIME, UID_REC
from stallscope.wire.frames import Decoder, Kind, encode
from stallscope.wire.hook_table import BY_NAME, HOOKS
from stallscope.wire.recording import Ending

__all__ = ["rehearse", "rehearse_steps", "rehearsed_findings"]

LAUNCH, WAIT, COLLECTIVE, CREATE = (
    BY_NAME[name] for name in ("cudaLaunchKernel", "cudaStreamSynchronize", "ncclAllReduce", "ncclCommInitRank")
)
NAME = "名前 [bold]:smile:"  # wide, and what rich would take for markup and an emoji
SECOND = 1_000_000_000
SIGKILL, FAILED = 9, 1


def rehearse() -> State:
    """The state after every kind of frame, a return code that is no success, losses, gaps, and a bad end."""
    follower, decoder = Follower(), Decoder()
    for kind, body in _frames():
        for frame in decoder.feed(encode(kind, body)):
            follower.apply(frame)
    follower.finish(Ending(decoder.offset, decoder.pending))
    return follower.state


def rehearsed_findings() -> Found:
    """Incidents under way and over, an episode and collectives, with every field filled, and with none."""
    full, bare = Place(1, 1, 1, 1), Place(None, None, 2, 2)
    stack = [{"file": NAME, "line": 1, "function": NAME, "kind": "python"}] * 4
    waiting: dict[str, str | None] = {"syscall": "read", "file": NAME, "wchan": None}
    common: dict[str, Any] = {
        "comm": None, "op": "ncclAllReduce", "seq": 1, "victims": [full, bare], "cascade": ["0" * 16], "start_ns": 1,
        "reported_ns": SECOND, "evidence": "api", "confidence": "high", "summary": NAME, "next": NAME,
    }  # fmt: skip
    now = Incident(
        1, "NOT_ARRIVED", "checkpoint", culprits=[Culprit(full, stack, waiting), Culprit(bare)], end_ns=None,
        outcome="running", since_before=True, **common,
    )  # fmt: skip
    over = Incident(2, "STRAGGLER", None, culprits=[], end_ns=SECOND, outcome="died", numbers={"own_ns": 1}, **common)
    episode = Episode(NAME, full, 801, SECOND, SECOND, 1, [Longest(1, SECOND, "ncclAllReduce", 1, stack)], exact=False)
    done = [Collective(NAME, "ncclAllGather", "bfloat16", 64, 1 << 30, per, None, True) for per in (64.0, None)]
    return Found([now, over], [episode], [done[0], done[1]._replace(wait_ns=SECOND)], _steps())


def rehearse_steps() -> Track:
    """Steps of a loop: some without its operations, one that is slow, and a second kind of loop behind them."""
    track = Track()
    for first, number in ((1, 9), (2, 40)):
        rows = np.zeros(number * 3, TOKEN)
        rows["key"] = rows["sort"] = np.tile((first, 4, 5), number)
        rows["kind"], rows["n"] = np.tile((NCCL, NCCL, WAITED), number), np.arange(3 * number)
        rows["at_ns"], rows["ns"] = np.arange(3 * number) * SECOND + first, np.where(rows["kind"] == WAITED, SECOND, 0)
        rows["at_ns"][-30:] += SECOND * 9
        track.add(rows[rows["n"] % 27 > 5])
        track.fold(2 * number)
    return track.closed(1000, is_end=True)


def _steps() -> StepsFound:
    full = Part(1, 9, "lower_bound", 1, 1, 1, SECOND, NAME, False, 1.5, False, 9, 1)
    bare = Part(2, 9, None, None, None, 1, 1, NAME, True, None, True, 0, 0)
    ranges = [Range(1, 1, 1, None, 1, 2, NAME, None, (1, 2)), Range(2, 4, 3, None, 1, 2, NAME, 1.5, (1,)),
              Range(1, 9, 3, 2, 1, 2, NAME, None, (2,))] * 3  # fmt: skip
    return StepsFound([full, bare], ranges, 1, [SlowStep(1, 1, 1, 1, 1, NAME)])


def _frames() -> Iterator[tuple[Kind, dict[str, Any]]]:
    hooks = [[h.id, h.library, h.name, h.kind, h.time_id >= 0] for h in HOOKS]
    yield Kind.HELLO, {
        "version": "", "start_mono_ns": 0, "start_unix_ns": 0, "host": NAME, "backend": "bcc", "sources": ["bpf"],
        "targets": [1], "sample_one_in": 100.5, "long_ns": 1, "hooks": hooks,
    }  # fmt: skip
    for proc in (1, 2):
        yield from _process(proc)
    yield from _records()
    yield from _state_of_things()
    yield Kind.BYE, {"at_ns": 2 * SECOND, "reason": ""}


def _process(proc: int) -> Iterator[tuple[Kind, dict[str, Any]]]:
    name = f"{NAME} {proc}"
    yield Kind.PROCESS, {"proc": proc, "pid": proc, "name": name, "cmdline": [], "start_ns": 0, "at_ns": 0}
    yield Kind.SLOT, {"slot": proc, "proc": proc, "at_ns": 0}
    for library in ("CUDART", "CUDA", "NCCL"):
        ids = [h.id for h in HOOKS if h.library == library]
        yield Kind.LINK, {
            "proc": proc, "library": library, "path": "/", "hooks": ids, "at_ns": 9 * proc, "appeared_ns": 0,
        }  # fmt: skip


def _record(name: int, kind: int, slot: int, **more: Any) -> np.ndarray[Any, Any]:
    record = np.zeros(1, REC)
    for key, value in {"ts_ns": 100, "hook": name, "kind": kind, "slot": slot, "tid": 1, **more}.items():
        record[key] = value
    return record


def _records() -> Iterator[tuple[Kind, dict[str, Any]]]:
    rows = [
        _record(hook.id, kind, slot, dur_ns=SECOND + kind, status=FAILED)
        for slot in (1, 2, 3)
        for hook in (LAUNCH, WAIT, COLLECTIVE, CREATE)
        for kind in (CALL, ENTER, DONE, ABANDONED)
    ]
    yield Kind.EVENTS, {"count": len(rows), "data": np.concatenate(rows).tobytes()}
    unique = np.zeros(1, UID_REC)
    # The bytes of an id that names an IPv4 address: family 2 in bytes 8 and 9.
    unique["rec"], unique["uid"][0, 8] = _record(CREATE.id, ENTER, 1, ts_ns=200), 2
    yield Kind.UIDS, {"count": 1, "data": unique.tobytes()}


def _state_of_things() -> Iterator[tuple[Kind, dict[str, Any]]]:
    counts, timed = np.zeros(3, COUNT), np.zeros(2, TIME)
    counts["calls"], counts["errors"], counts["lost"], timed["n"], timed["sum_ns"], timed["max_ns"] = 9, 3, 1, 5, 9, 4
    timed["hist"][:, 60] = 5
    for proc in (1, 2):
        yield Kind.COUNTS, {
            "proc": proc, "at_ns": 300, "hooks": [LAUNCH.id, WAIT.id, COLLECTIVE.id], "counts": counts.tobytes(),
            "times": [WAIT.time_id, COLLECTIVE.time_id], "timed": timed.tobytes(),
        }  # fmt: skip
    rows = [[1, tid, [[hook.id, 200, 1, 0, [0] * 8]]] for tid, hook in enumerate((WAIT, COLLECTIVE, CREATE), 1)]
    yield Kind.INFLIGHT, {"at_ns": SECOND, "final": True, "rows": rows}
    yield Kind.INFERRED, {"proc": 1, "tid": 9, "hook": WAIT.id, "since_ns": 1, "at_ns": 2, "ended": None}
    for missed in (1, None):
        yield Kind.GAP, {"source": "bpf", "proc": missed, "count": missed, "from_ns": 1, "to_ns": 2, "reason": NAME}
    yield Kind.LOST, {"at_ns": 400, "places": {NAME: 1}}
    yield Kind.NOTE, {"at_ns": 400, "proc": 1, "text": NAME}
    yield Kind.TICK, {"at_ns": 400}
    devices: list[list[Any]] = [[n, NAME, *[n] * 6, 0x3FF, [n]] for n in (1, 2)] + [[3, *[None] * 8, []]]
    yield Kind.GPU, {"at_ns": 400, "note": NAME, "devices": devices}
    for pids in ([1], [1, 3], [3]):
        yield Kind.WITNESS, {"at_ns": 400, "source": "ras", "says": f"{NAME}\n{NAME}", "detail": {"pids": pids}}
    yield Kind.COST, {"at_ns": 400, "cpu_ns": 1, "rss_bytes": 1, "processes": {"capture": [1, 1]}}
    yield Kind.IMAGE, {"proc": 2, "at_ns": 400, "name": f"{NAME} 2", "cmdline": [], "env": {}}
    yield Kind.EXIT, {"proc": 2, "at_ns": 500, "code": None, "signal": SIGKILL}

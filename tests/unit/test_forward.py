"""What capture lets through of what the poller says: its own kinds, small, few, timely; nothing else, and it never waits."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stallscope.capture import forward
from stallscope.capture.forward import Poller, StandIn
from stallscope.wire.frames import Kind, encode

SIM = Path(__file__).resolve().parents[2] / "build/sim/lib"
NOW = 1_000_000_000_000
GPU = {"at_ns": NOW - 5, "note": None, "devices": [[0, "GPU-1", *[1] * 7, [42]]]}
IDS = (65534, 65534) if os.geteuid() == 0 else (os.getuid(), os.getgid())


class Outbox:
    """Keeps what would go to the aggregator."""

    def __init__(self) -> None:
        self.sent: list[tuple[Kind, dict[str, Any]]] = []
        self.bulk_ok = True

    def send(self, kind: Kind, body: dict[str, Any]) -> None:
        encode(kind, body)
        self.sent.append((kind, body))

    def notes(self) -> list[str]:
        return [body["text"] for kind, body in self.sent if kind == Kind.NOTE]


class Pair:
    """Capture's end, with the test at the other."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.poller = Poller(clock=lambda: NOW)
        self.poller.take(ours)
        self.outbox = Outbox()

    def look(self, now: int = NOW) -> None:
        self.poller.forward(self.outbox, now)  # type: ignore[arg-type]


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.poller.close()
    made.theirs.close()


def test_frames_go_through(pair: Pair) -> None:
    witness = {"at_ns": NOW, "source": "ras", "says": "x", "detail": {"pids": [1]}}
    pair.look()
    pair.theirs.send(encode(Kind.GPU, GPU))
    pair.theirs.send(encode(Kind.WITNESS, witness))
    pair.look()
    assert pair.outbox.sent == [(Kind.GPU, GPU), (Kind.WITNESS, witness)]


def _deep() -> bytes:
    payload = b"\x82\xa5at_ns\xcf" + (NOW - 1).to_bytes(8, "big") + b"\xa1x" + b"\x91" * 1100 + b"\xc0"
    return len(payload).to_bytes(4, "little") + int(Kind.GPU).to_bytes(2, "little") + bytes(2) + payload


HOSTILE = {
    "a word": b"x",
    "half a frame": encode(Kind.GPU, GPU)[:-1],
    "two frames": encode(Kind.GPU, GPU) * 2,
    "more than a frame": encode(Kind.GPU, GPU) + b"x",
    "no msgpack": (3).to_bytes(4, "little") + int(Kind.GPU).to_bytes(2, "little") + bytes(2) + b"\xc1\xc1\xc1",
    "no map": (1).to_bytes(4, "little") + int(Kind.GPU).to_bytes(2, "little") + bytes(2) + b"\x00",
    "nested too deep": _deep(),
    "another kind": encode(Kind.EXIT, {"proc": 1, "at_ns": NOW}),
    "the farewell": encode(Kind.BYE, {"at_ns": NOW, "reason": "gone"}),
    "an unknown kind": (1).to_bytes(4, "little") + b"\xff\xff" + bytes(2) + b"\x80",
    "no time": encode(Kind.GPU, {"note": None, "devices": []}),
    "a time to come": encode(Kind.GPU, {**GPU, "at_ns": NOW + 1}),
    "a time before all": encode(Kind.GPU, {**GPU, "at_ns": -1}),
    "a time that is none": encode(Kind.GPU, {**GPU, "at_ns": True}),
    "too large": encode(Kind.GPU, {**GPU, "note": "x" * 65536}),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_poller_is_ended_with_a_note(pair: Pair, data: bytes) -> None:
    pair.theirs.send(encode(Kind.GPU, GPU))
    pair.theirs.send(data)
    pair.theirs.send(encode(Kind.GPU, GPU))
    for _ in range(3):
        pair.look()
    assert [kind for kind, _ in pair.outbox.sent] == [Kind.GPU, Kind.NOTE]
    (note,) = pair.outbox.notes()
    assert note.startswith("the GPUs and NCCL's RAS are not asked any more: the poller process was ended: ")
    with pytest.raises(OSError):
        pair.theirs.send(b"x")
    pair.poller.ask()  # nobody is there any more


def test_a_flood_is_ended(pair: Pair) -> None:
    """Sixteen a second for ever; for a moment as many as wait in the socket when capture stood still."""
    sent = 0
    for second in range(60):
        for _ in range(16):
            pair.theirs.send(encode(Kind.GPU, GPU))
            sent += 1
        pair.look(NOW + second * 1_000_000_000)
    assert [kind for kind, _ in pair.outbox.sent] == [Kind.GPU] * sent
    while not pair.outbox.notes() and sent < 2000:
        pair.theirs.send(encode(Kind.GPU, GPU))
        sent += 1
        pair.look(NOW + 60_000_000_000)
    assert sent == 960 + 401
    assert pair.outbox.notes()[0].endswith("it sent far over 16 frames a second")


def test_what_waited_for_long(pair: Pair) -> None:
    """A capture that stood still: the socket is full, no reason to end anybody; what is a minute old is left out."""
    pair.theirs.setblocking(False)
    waiting = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            pair.theirs.send(encode(Kind.GPU, GPU))
            waiting += 1
    pair.look()
    assert 16 < waiting < 400 and len(pair.outbox.sent) == waiting
    pair.theirs.send(encode(Kind.GPU, {**GPU, "at_ns": NOW - 61_000_000_000}))
    pair.theirs.send(encode(Kind.GPU, {**GPU, "at_ns": NOW - 59_000_000_000}))
    pair.look()
    assert len(pair.outbox.sent) == waiting + 1 and pair.outbox.notes() == []


def test_a_slow_aggregator_leaves_it_waiting(pair: Pair) -> None:
    pair.theirs.send(encode(Kind.GPU, GPU))
    pair.outbox.bulk_ok = False
    pair.look()
    assert pair.outbox.sent == []
    pair.outbox.bulk_ok = True
    pair.look()
    assert len(pair.outbox.sent) == 1


def test_asking_never_waits(pair: Pair) -> None:
    begin = time.monotonic()
    for _ in range(100_000):
        pair.poller.ask()
    assert time.monotonic() - begin < 5
    assert pair.theirs.recv(64) == b"?"


# the process


def started(**environment: str) -> Poller:
    poller = Poller()
    poller.start(*IDS, StandIn(SIM / "libnvidia-ml.so.1", environment))
    return poller


def frames(poller: Poller, outbox: Outbox, until: Any, seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        poller.forward(outbox, time.monotonic_ns())  # type: ignore[arg-type]
        time.sleep(0.01)
    assert until(), outbox.sent


@pytest.mark.skipif(IDS[0] == 0, reason="a root without capabilities")
def test_the_process_is_started_and_ended() -> None:
    poller, outbox = started(STALLSCOPE_SIM_DEVICES="3"), Outbox()
    pid = poller.pid
    assert pid is not None and os.getsid(pid) == pid
    frames(poller, outbox, lambda: outbox.sent)
    assert outbox.sent[0][0] == Kind.GPU and len(outbox.sent[0][1]["devices"]) == 3
    poller.close()
    assert poller.pid is None and not Path(f"/proc/{pid}").exists()


@pytest.mark.skipif(IDS[0] == 0, reason="a root without capabilities")
def test_a_poller_that_is_killed_is_told_once() -> None:
    poller, outbox = started(), Outbox()
    frames(poller, outbox, lambda: outbox.sent)
    assert poller.pid is not None
    os.kill(poller.pid, signal.SIGKILL)
    frames(poller, outbox, outbox.notes)
    for _ in range(3):
        poller.forward(outbox, time.monotonic_ns())  # type: ignore[arg-type]
    assert len(outbox.notes()) == 1 and "the poller process ended" in outbox.notes()[0]
    poller.close()


@pytest.mark.skipif(IDS[0] == 0, reason="a root without capabilities")
def test_a_stopped_poller_delays_nothing() -> None:
    """Neither the start, nor a look, nor the end."""
    poller, outbox = started(STALLSCOPE_SIM_NVML="hang"), Outbox()
    assert poller.pid is not None
    os.kill(poller.pid, signal.SIGSTOP)
    begin = time.monotonic()
    for _ in range(1000):
        poller.forward(outbox, time.monotonic_ns())  # type: ignore[arg-type]
    poller.close()
    assert time.monotonic() - begin < 10 and outbox.sent == []


def test_one_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(forward.subprocess, "Popen", refuse)
    poller, outbox = Poller(), Outbox()
    poller.start(*IDS)
    poller.ask()
    poller.forward(outbox, NOW)  # type: ignore[arg-type]
    (note,) = outbox.notes()
    assert note.endswith("the poller process cannot be started: Cannot allocate memory")
    assert poller.pid is None

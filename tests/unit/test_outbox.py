"""Frames on their way: many at once, in order, whatever the socket takes."""

from __future__ import annotations

import socket

from stallscope.capture.outbox import TOGETHER_BYTES, Outbox
from stallscope.wire.frames import Decoder, Frame, Kind


class Pair:
    """An outbox and the other end of its socket."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.outbox = Outbox(ours)
        self.theirs.setblocking(False)
        self.decoder = Decoder()

    def came(self) -> list[Frame]:
        frames: list[Frame] = []
        while True:
            try:
                data = self.theirs.recv(1 << 20)
            except BlockingIOError:
                return frames
            frames += self.decoder.feed(data)


def test_small_frames_go_together() -> None:
    pair = Pair()
    for number in range(200):
        pair.outbox.send(Kind.TICK, {"at_ns": number})
    assert pair.came() == [] and pair.outbox.queued_bytes > 0
    pair.outbox.flush()
    assert [frame.body["at_ns"] for frame in pair.came()] == list(range(200))
    assert pair.outbox.queued_bytes == 0


def test_many_bytes_go_at_once() -> None:
    pair = Pair()
    pair.outbox.send(Kind.NOTE, {"at_ns": 1, "proc": None, "text": "x" * TOGETHER_BYTES})
    assert len(pair.came()) == 1


def test_a_socket_that_takes_little() -> None:
    """Pieces of any length: nothing is lost, doubled or out of order, and `bulk_ok` says when to wait."""
    pair, got = Pair(), []
    for number in range(5000):
        pair.outbox.send(Kind.NOTE, {"at_ns": number, "proc": None, "text": "x" * (number % 5000)})
    assert not pair.outbox.bulk_ok and pair.outbox.vital_ok
    while pair.outbox.queued_bytes:
        pair.outbox.flush()
        got += pair.came()
    got += pair.came()
    assert [(frame.body["at_ns"], len(frame.body["text"])) for frame in got] == [(n, n % 5000) for n in range(5000)]
    assert pair.outbox.bulk_ok


def test_nobody_listens() -> None:
    pair = Pair()
    pair.theirs.close()
    pair.outbox.send(Kind.TICK, {"at_ns": 1})
    pair.outbox.flush()
    assert pair.outbox.broken
    pair.outbox.send(Kind.TICK, {"at_ns": 2})
    pair.outbox.flush()

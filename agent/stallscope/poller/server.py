"""The poller's loop: looks at the devices go out once a second, questions to RAS when capture asks for one."""

from __future__ import annotations

import select
import socket
import time
from typing import Any

from stallscope.poller.ras import Asker
from stallscope.poller.sampler import Sampler
from stallscope.wire.frames import Kind, encode

__all__ = ["MAX_PACKET_BYTES", "Voice", "serve"]

MAX_PACKET_BYTES = 64 << 10
LOOK_S = 0.25


class Voice:
    """Sends frames, one a packet, and leaves out those that nobody takes; says nothing twice."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._told_ns = 0
        self._note: str | None = None

    def send(self, kind: Kind, body: dict[str, Any]) -> bool:
        """Whether it went out. Raises OSError when the other side is gone."""
        data = encode(kind, body)
        if len(data) > MAX_PACKET_BYTES:
            return False
        try:
            self._sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False  # a later look tells more than this one
        return True

    def tell(self, sampler: Sampler) -> None:
        """Send the newest look, if it is new: with devices each, without them when the reason changed."""
        latest = sampler.latest()
        if latest is None or latest[0] <= self._told_ns:
            return
        at_ns, look = latest
        if (look.devices or look.note != self._note) and self.send(
            Kind.GPU, {"at_ns": at_ns, "note": look.note, "devices": look.devices}
        ):
            self._told_ns, self._note = at_ns, look.note


def serve(sock: socket.socket, sampler: Sampler, asker: Asker) -> None:
    """Until the other side closes the socket; each byte from it is a wish to ask RAS."""
    sampler.start()
    voice = Voice(sock)
    wishes = select.poll()
    wishes.register(sock, select.POLLIN)
    next_s = time.monotonic()
    while True:
        if wishes.poll(max(0.0, next_s - time.monotonic()) * 1000):
            if not sock.recv(64):
                return
            asker.ask()
        if time.monotonic() < next_s:
            continue
        next_s = time.monotonic() + LOOK_S
        voice.tell(sampler)
        for witness in asker.take():
            voice.send(Kind.WITNESS, witness)

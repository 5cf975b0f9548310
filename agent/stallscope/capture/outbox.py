"""Frames on their way to the aggregator: bounded, never blocking."""

from __future__ import annotations

import itertools
import socket
from collections import deque
from typing import Any

from stallscope.capture.rings import Drained
from stallscope.wire.frames import Kind, encode

__all__ = ["Outbox"]

BULK_LIMIT_BYTES = 4 << 20
HARD_LIMIT_BYTES = 16 << 20
TOGETHER, TOGETHER_BYTES = 64, 32 << 10  # frames, and bytes of them, that go out at once


class Outbox:
    """Queue before a non-blocking socket.

    A slow aggregator must not slow capture, and capture must not grow without bound. So the caller asks `bulk_ok` and
    `vital_ok` before it drains a ring: what stays in the ring is bounded, and what no longer fits there is counted by
    the kernel side, exactly and in one place.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._queue: deque[memoryview] = deque()
        self.reopen(sock)

    def reopen(self, sock: socket.socket) -> None:
        """Send to this aggregator from now on; what waited for the one before is forgotten."""
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._socket = sock
        self._queue.clear()
        self.queued_bytes = self._unsent_bytes = 0
        self.broken = False

    @property
    def bulk_ok(self) -> bool:
        """Whether there is room for frames that may wait in their ring; not while nobody takes any."""
        return self.queued_bytes < BULK_LIMIT_BYTES and not self.broken

    @property
    def vital_ok(self) -> bool:
        """Whether there is room for any frame."""
        return self.queued_bytes < HARD_LIMIT_BYTES and not self.broken

    def send(self, kind: Kind, body: dict[str, Any]) -> None:
        """Queue one frame; many go together, at the next `flush` or when they are many.

        A dead aggregator sets `broken`; nothing is raised.
        """
        if self.broken:
            return
        data = encode(kind, body)
        self._queue.append(memoryview(data))
        self.queued_bytes += len(data)
        self._unsent_bytes += len(data)
        if self._unsent_bytes >= TOGETHER_BYTES:
            self.flush()

    def send_records(self, batch: Drained) -> None:
        """Queue a batch; ids first: a creation's entry carries the id and must not come after its return."""
        if batch.n_uids:
            self.send(Kind.UIDS, {"count": batch.n_uids, "data": bytes(batch.uids)})
        if batch.n_recs:
            self.send(Kind.EVENTS, {"count": batch.n_recs, "data": bytes(batch.recs)})

    def flush(self) -> None:
        """Send what the socket takes without waiting."""
        self._unsent_bytes = 0
        while self._queue and not self.broken:
            try:
                sent = self._socket.sendmsg(list(itertools.islice(self._queue, TOGETHER)))
            except BlockingIOError:
                return
            except OSError:
                self.broken = True
                self._queue.clear()
                return
            self.queued_bytes -= sent
            while sent and sent >= len(self._queue[0]):
                sent -= len(self._queue.popleft())
            if sent:
                self._queue[0] = self._queue[0][sent:]

    def close(self, timeout_s: float) -> bool:
        """Send the rest, waiting at most `timeout_s` for each piece; True when all was sent."""
        self._socket.settimeout(timeout_s)
        try:
            while self._queue and not self.broken:
                self._socket.sendall(self._queue.popleft())
        except OSError:
            self.broken = True
        self._socket.close()
        return not self.broken

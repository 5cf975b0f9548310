"""The socket to which shims hand their segments: so that a process that lives for a millisecond is not lost."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

__all__ = ["HandOver", "Handed"]

# native/shim/segment.h, struct seg_hello: magic, version, pid, start_ticks.
HELLO = struct.Struct("<QIIQ")
MAGIC, VERSIONS = 0x31676573706C7473, (1, 2, 3)
BACKLOG, MAX_WAITING, TURN = 4096, 256, 64
PATIENCE_NS = 2_000_000_000
_CREDENTIALS = struct.Struct("3i")


class Handed(NamedTuple):
    """A segment's descriptor, on a description of its own; `pid` is the kernel's word, `start_ticks` the sender's."""

    pid: int
    start_ticks: int
    fd: int


class _Waiting(NamedTuple):
    """A connection whose packet has not come yet."""

    connection: socket.socket
    since_ns: int


class HandOver:
    """Listens; nothing here waits.

    Args:
        path: of the socket, in a folder that is nobody else's.

    Attributes:
        refused: hand-overs that made no sense.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.refused = path, 0
        self._waiting: list[_Waiting] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(str(path))
            self._socket.listen(BACKLOG)
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Readable while somebody wants to hand something over."""
        return self._socket.fileno()

    def take(self, now_ns: int) -> list[Handed]:
        """What has come. At most TURN a call; the caller owns the descriptors."""
        self._accept(now_ns)
        found, still = [], []
        for one in self._waiting:
            try:
                handed = self._receive(one.connection)
            except BlockingIOError:
                if now_ns - one.since_ns < PATIENCE_NS:
                    still.append(one)
                    continue
                handed = None
            one.connection.close()
            if handed is None:
                self.refused += 1
            else:
                found.append(handed)
        self._waiting = still
        return found

    def _accept(self, now_ns: int) -> None:
        room = min(TURN, MAX_WAITING - len(self._waiting))
        for _ in range(room):
            try:
                connection, _address = self._socket.accept()
            except OSError:  # nobody there, or already gone again
                return
            connection.setblocking(False)
            self._waiting.append(_Waiting(connection, now_ns))

    def _receive(self, connection: socket.socket) -> Handed | None:
        """None for what is no hand-over. Raises BlockingIOError while nothing has come."""
        try:
            data, fds, _flags, _ = socket.recv_fds(connection, HELLO.size + 1, 4, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            raise
        except OSError:
            return None
        try:
            return self._checked(connection, data, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _checked(self, connection: socket.socket, data: bytes, fds: list[int]) -> Handed | None:
        if len(data) != HELLO.size or len(fds) != 1:
            return None
        magic, version, _pid, start_ticks = HELLO.unpack(data)
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, _uid, _gid = _CREDENTIALS.unpack(raw)
        if magic != MAGIC or version not in VERSIONS or pid <= 0:
            return None
        with contextlib.suppress(OSError):
            # Anew: the description that came is shared with the sender, and so would be a lock on it.
            return Handed(pid, start_ticks, os.open(f"/proc/self/fd/{fds[0]}", os.O_RDWR | os.O_CLOEXEC))
        return None

    def close(self) -> None:
        """Close and remove the socket."""
        for one in self._waiting:
            one.connection.close()
        self._waiting.clear()
        self._socket.close()
        with contextlib.suppress(OSError):
            self.path.unlink()

"""The serving end of `stallscope ctl`: a Unix socket that tells by the kernel who asks; never waits, holds little.

One request a connection: ``{"words": [..]}`` and a newline. The answer is one line of JSON, ``{"ok": true}`` or
``{"ok": false, "what", "why", "hint", "code"}``, then the text that was asked for, up to the end of the stream.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stallscope.errors import ArgumentProblem, CaptureProblem, PermissionProblem, StallscopeError

__all__ = ["ControlServer", "listen", "listening", "peer_of"]

MAX_CONNECTIONS, MAX_REFUSED = 8, 4
MAX_REQUEST_BYTES = 16 << 10
CHUNK_BYTES = 1 << 16
REQUEST_NS, STANDSTILL_NS = 2_000_000_000, 10_000_000_000
_CREDENTIALS = struct.Struct("3i")

Answer = Callable[[list[str]], str]


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of who connected, as the kernel noted it then."""
    pid, uid, _gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A socket as `listen` makes it, closed and removed at the end. Raises CaptureProblem."""
    sock = listen(path)
    try:
        yield sock
    finally:
        sock.close()
        with contextlib.suppress(OSError):
            path.unlink()


def listen(path: Path, *, mode: int = 0o666) -> socket.socket:
    """A listening socket at this path; who may connect is asked of the kernel at each connection.

    Raises:
        CaptureProblem: another process listens there, or the path can't be had.
    """
    what = f"cannot listen on {path}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o755, exist_ok=True)
        _remove_stale(path, what)
        sock.bind(str(path))
        path.chmod(mode)
        sock.listen(MAX_CONNECTIONS)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        hint = "run it as root or by its systemd unit, or set [sockets] folder in the configuration"
        why = os.strerror(error.errno) if error.errno else str(error)  # a path that is too long has no number
        raise CaptureProblem(what, why=why, hint=hint) from error
    except StallscopeError:
        sock.close()
        raise
    return sock


def _remove_stale(path: Path, what: str) -> None:
    """A socket that a killed daemon has left; anything else stays. Raises CaptureProblem where one is served."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise CaptureProblem(what, why="a file that is no socket is there", hint=f"move {path} away")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError:
            pass
    raise CaptureProblem(what, why="another daemon listens there", hint="stallscope ctl status; stallscope ctl stop")


@dataclass
class _Connection:
    sock: socket.socket
    due_ns: int
    refusal: bytes | None = None
    request: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None


class ControlServer:
    """`poll` often; it takes, reads, answers and sends what can be without waiting.

    Args:
        listener: from `listen`; stays the caller's.
        owners: user ids that may ask, besides root.
        answer: the words to the text; a StallscopeError is the answer, too.

    Attributes:
        refused: connections of other users.
    """

    def __init__(
        self, listener: socket.socket, owners: set[int], answer: Answer, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._listener, self._owners, self._answer, self._clock = listener, owners | {0}, answer, clock
        self._open: list[_Connection] = []
        self.refused = 0

    def waits_for(self) -> tuple[list[socket.socket], list[socket.socket]]:
        """What select(2) may wait for: (to read, to write)."""
        asking = [one.sock for one in self._open if one.answer is None]
        listener = [self._listener] if len(self._open) < MAX_CONNECTIONS else []
        return listener + asking, [one.sock for one in self._open if one.answer is not None]

    def poll(self) -> None:
        """One turn."""
        while len(self._open) < MAX_CONNECTIONS:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                break
            self._take(sock)
        for one in list(self._open):
            try:
                is_done = self._advance(one)
            except OSError:
                is_done = True
            if is_done:
                one.sock.close()
                self._open.remove(one)

    def _take(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        one = _Connection(sock, self._clock() + REQUEST_NS)
        self._open.append(one)
        _pid, uid = peer_of(sock)
        if uid not in self._owners:
            self.refused += 1
            if sum(other.refusal is not None for other in self._open) >= MAX_REFUSED:
                one.due_ns = 0
            whose = ", ".join(str(owner) for owner in sorted(self._owners))
            refusal = PermissionProblem(
                "cannot talk to the daemon",
                why=f"it answers the users {whose} only, and this is {uid}",
                hint="use sudo",
            )
            # Told once the request is read: a socket that is closed before resets the connection.
            one.refusal = _failed(refusal)

    def _advance(self, one: _Connection) -> bool:
        """Whether the connection is over."""
        if self._clock() > one.due_ns:
            return True
        if one.answer is None and not self._read(one):
            return False
        while one.answer:
            try:
                sent = one.sock.send(one.answer[:CHUNK_BYTES])
            except BlockingIOError:
                return False
            one.answer = one.answer[sent:]
            one.due_ns = self._clock() + STANDSTILL_NS
        return True

    def _read(self, one: _Connection) -> bool:
        """Whether the request is whole, and answered."""
        try:
            data = one.sock.recv(CHUNK_BYTES)
        except BlockingIOError:
            return False
        one.request += data
        line, newline, _rest = bytes(one.request).partition(b"\n")
        if not newline and data and len(one.request) <= MAX_REQUEST_BYTES:
            return False
        self._reply(one, one.refusal or self._answered(line))
        return True

    def _answered(self, line: bytes) -> bytes:
        try:
            words = json.loads(line)["words"]
            if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
                raise TypeError("words is no list of texts")
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            return _failed(ArgumentProblem("cannot read the request", why=str(error)[:200], hint="use stallscope ctl"))
        try:
            return b'{"ok": true}\n' + self._answer(words).encode(errors="replace")
        except StallscopeError as error:
            return _failed(error)

    def _reply(self, one: _Connection, data: bytes) -> None:
        one.answer, one.due_ns = memoryview(data), self._clock() + STANDSTILL_NS

    def close(self) -> None:
        """End all connections."""
        for one in self._open:
            with contextlib.suppress(OSError):
                if one.answer:
                    one.sock.send(one.answer)
                one.sock.close()
        self._open.clear()


def _failed(error: StallscopeError) -> bytes:
    body = {"ok": False, "what": error.what, "why": error.why, "hint": error.hint, "code": int(error.exit_code)}
    return json.dumps(body).encode() + b"\n"

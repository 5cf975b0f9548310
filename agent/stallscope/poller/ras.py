"""Asks NCCL's RAS service (2.24 and later) what it knows of its job: a text protocol on port 28028 of this host.

Whoever listens there may belong to another job, or be no NCCL at all.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from stallscope.poller.ras_answer import Testimony, read_answer

__all__ = ["PORT", "Answer", "Asker", "RasProblem", "ask"]

PORT = 28028
TIME_OUT_S = 5.0
SERVER_TIME_OUT_S = 3  # what RAS may wait for its peers: below ours, so that an answer with gaps still comes
PERIOD_NS = 10_000_000_000
MAX_ANSWER_BYTES = 256 << 10
MAX_LINE_BYTES = 256
# RAS listens on what "localhost" means to it.
HOSTS = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


class RasProblem(Exception):
    """Something listens but gives no usable answer."""


class Answer(NamedTuple):
    """The whole answer; `cut`: it did not end in time, or is longer than 256 kB."""

    text: str
    cut: bool


class _Line:
    """A connection with one deadline for everything on it."""

    def __init__(self, sock: socket.socket, end_s: float) -> None:
        self._sock, self._end_s = sock, end_s

    def _arm(self) -> None:
        left = self._end_s - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)

    def say(self, command: str) -> None:
        self._arm()
        self._sock.sendall(command.encode() + b"\n")

    def hear(self) -> str:
        """One line, without its end."""
        data = b""
        while not data.endswith(b"\n"):
            self._arm()
            part = self._sock.recv(1)
            if not part:
                raise RasProblem("it closed the connection")
            data += part
            if len(data) > MAX_LINE_BYTES:
                raise RasProblem("it does not speak the protocol of RAS")
        return data.decode("utf-8", "replace").strip()

    def rest(self) -> Answer:
        """All that comes until the other side closes."""
        data, cut = bytearray(), False
        while len(data) < MAX_ANSWER_BYTES:
            try:
                self._arm()
                part = self._sock.recv(1 << 16)
            except (TimeoutError, ConnectionError):
                cut = True
                break
            if not part:
                break
            data += part
        cut = cut or len(data) >= MAX_ANSWER_BYTES
        return Answer(data[:MAX_ANSWER_BYTES].decode("utf-8", "replace"), cut)


def ask(port: int = PORT, time_out_s: float = TIME_OUT_S) -> Answer | None:
    """The status of the job that listens on `port`; None when nobody does. Takes `time_out_s` at most.

    Raises:
        RasProblem: somebody listens who does not answer, or not as RAS does.
    """
    end_s = time.monotonic() + time_out_s
    try:
        sock = _connected(port, end_s)
        if sock is None:
            return None
        with sock:
            return _converse(_Line(sock, end_s))
    except TimeoutError as error:
        raise RasProblem(f"no answer within {time_out_s:g} s") from error
    except OSError as error:
        raise RasProblem(str(error.strerror or error)) from error


def _connected(port: int, end_s: float) -> socket.socket | None:
    for family, host in HOSTS:
        # No name service: it would load modules, which this user may be unable to read.
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.settimeout(max(0.001, end_s - time.monotonic()))
        try:
            sock.connect((host, port))
        except OSError as error:
            sock.close()
            if isinstance(error, TimeoutError):
                raise
            continue  # refused, or no such address on this host
        return sock
    return None


def _converse(line: _Line) -> Answer:
    line.say("CLIENT PROTOCOL 2")
    if not line.hear().upper().startswith("SERVER PROTOCOL "):
        raise RasProblem("it does not speak the protocol of RAS")
    line.say(f"TIMEOUT {SERVER_TIME_OUT_S}")
    if line.hear().upper() != "OK":
        raise RasProblem("it refused a time-out")
    line.say("SET FORMAT json")
    line.hear()  # an error before 2.28.7, which answers in text
    line.say("VERBOSE STATUS")
    return line.rest()


class Asker:
    """At most one question under way and one every ten seconds; the answers wait until they are taken."""

    def __init__(self, port: int = PORT, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._port = port
        self._clock = clock
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._last_ns: int | None = None
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Ask now, unless that was done a moment ago."""
        now = self._clock()
        busy = self._thread is not None and self._thread.is_alive()
        if busy or (self._last_ns is not None and now - self._last_ns < PERIOD_NS):
            return
        self._last_ns = now
        self._thread = threading.Thread(target=self._work, name="ras", daemon=True)
        self._thread.start()

    def take(self) -> list[dict[str, Any]]:
        """Bodies of WITNESS frames that came since the last call."""
        found = []
        while not self._answers.empty():
            found.append(self._answers.get())
        return found

    def _work(self) -> None:
        said = self._hear()
        if said is not None:
            at_ns = self._clock()
            self._answers.put({"at_ns": at_ns, "source": "ras", "says": said.says, "detail": said.detail})

    def _hear(self) -> Testimony | None:
        try:
            answer = ask(self._port)
        except RasProblem as problem:
            return Testimony(f"NCCL's RAS service (port {self._port}) could not be asked: {problem}", {})
        return None if answer is None else read_answer(answer.text, cut=answer.cut)

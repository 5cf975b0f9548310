"""Capture's end of the poller, the process without privileges that asks NVML and RAS: its frames pass through here.

Nothing that it does may delay capture or spoil the stream: one frame a packet, small, few, of the kinds that are its
own, with a time that has just been. A poller that breaks a rule is ended, with a note.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from stallscope.capture.outbox import Outbox
from stallscope.wire.frames import BadFrame, Decoder, Frame, Kind

__all__ = ["Poller", "StandIn"]

MAX_PACKET_BYTES = 64 << 10
PACKETS_A_SECOND = 16
MAX_WAITING = 400  # more than the socket holds, so that a capture which stood still finds no flood
KINDS = (Kind.GPU, Kind.WITNESS)
OLDEST_NS = 60_000_000_000
SECOND_NS = 1_000_000_000
END_S = 0.5


class StandIn(NamedTuple):
    """An NVML other than the system's, which our own files hold, and what its process finds in the environment."""

    library: Path
    environment: dict[str, str]


class _Refused(Exception):
    """The poller broke a rule."""


class Poller:
    """Starts the process, forwards what it says, ends it. Nothing here waits, and nothing raises for what it does."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._trouble: str | None = None
        self._allowed: float = MAX_WAITING
        self._counted_ns = 0

    def start(self, uid: int, gid: int, stand_in: StandIn | None = None) -> None:
        """Start the process, which becomes that user. Where that fails, the first `forward` says so."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = _spawn(theirs.fileno(), uid, gid, stand_in)
        except OSError as error:
            ours.close()
            self._trouble = f"cannot be started: {error.strerror}"
            return
        self.take(ours)

    def take(self, sock: socket.socket) -> None:
        """Talk to what is at the other end of this SOCK_SEQPACKET socket."""
        sock.setblocking(False)
        self._sock = sock

    @property
    def pid(self) -> int | None:
        """The process's pid, or None while there is none."""
        return self._process.pid if self._process else None

    def ask(self) -> None:
        """Let it ask RAS now: something seems to be blocked."""
        if self._sock is not None:
            with contextlib.suppress(OSError):  # full: it has not got round to the last wish; broken: see forward
                self._sock.send(b"?")

    def forward(self, outbox: Outbox, now_ns: int) -> None:
        """Pass on what has come. Costs one system call where nothing has."""
        while self._sock is not None and outbox.bulk_ok:
            try:
                data = self._sock.recv(MAX_PACKET_BYTES + 1)
                if not data:
                    raise _Refused("ended" + self._how())
                self._count(now_ns)
                frame = self._checked(data, now_ns)
                if now_ns - frame.body["at_ns"] <= OLDEST_NS:  # else nobody had time to read it for a minute
                    outbox.send(Kind(frame.kind), frame.body)
            except BlockingIOError:
                return
            except (OSError, BadFrame, ValueError, TypeError, RecursionError, _Refused) as error:
                self._trouble = f"was ended: {error}" if not isinstance(error, _Refused) else str(error)
                self.close()
        if self._trouble is not None:
            text = f"the GPUs and NCCL's RAS are not asked any more: the poller process {self._trouble}"[:400]
            outbox.send(Kind.NOTE, {"at_ns": now_ns, "proc": None, "text": text})
            self._trouble = None

    def _checked(self, data: bytes, now_ns: int) -> Frame:
        """The frame in a packet; raises BadFrame or _Refused."""
        if len(data) > MAX_PACKET_BYTES:
            raise _Refused("was ended: it sent a packet of over 64 kB")
        decoder = Decoder()
        frames = list(decoder.feed(data))
        if len(frames) != 1 or decoder.pending:
            raise _Refused(f"was ended: it sent a packet with {len(frames)} whole frames")
        (frame,) = frames
        if frame.kind not in KINDS:
            raise _Refused(f"was ended: it sent a frame of kind {frame.kind}")
        at_ns: Any = frame.body.get("at_ns")
        # The newest instant that a frame tells is the aggregator's clock.
        if type(at_ns) is not int or not 0 <= at_ns <= self._clock():
            raise _Refused("was ended: it sent an impossible time")
        return frame

    def _count(self, now_ns: int) -> None:
        """One more packet; raises _Refused when there are too many."""
        self._allowed += max(0, now_ns - self._counted_ns) / SECOND_NS * PACKETS_A_SECOND
        self._allowed = min(self._allowed, MAX_WAITING) - 1
        self._counted_ns = now_ns
        if self._allowed < 0:
            raise _Refused(f"was ended: it sent far over {PACKETS_A_SECOND} frames a second")

    def _how(self) -> str:
        code = self._process.poll() if self._process else None
        if code is None:
            return ""
        return f" by signal {-code}" if code < 0 else f" with code {code}"

    def close(self) -> None:
        """End the process. One that the driver holds in the kernel ends when it lets go; nobody waits for that."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
            self._process = None


def _spawn(fd: int, uid: int, gid: int, stand_in: StandIn | None) -> subprocess.Popen[bytes]:
    """Start the poller with nothing of the caller's environment, in a session of its own: Ctrl-C goes to capture."""
    words = [str(fd), str(uid), str(gid), *([str(stand_in.library)] if stand_in else [])]
    return subprocess.Popen(
        [sys.executable, "-B", "-I", "-m", "stallscope.poller", *words],
        pass_fds=(fd,),
        cwd="/",
        env={"MALLOC_ARENA_MAX": "1", "PATH": os.defpath, **(stand_in.environment if stand_in else {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # its words may be those of whoever listens on RAS's port
        start_new_session=True,
    )

"""The parser where it is a systemd unit of its own: reached by a socket, not started."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from stallscope.capture.parser_client import ParserClient, ParserFailed

__all__ = ["ParserUnit"]

PAUSE_S = 0.05


class ParserUnit(ParserClient):
    """Each connection gets a fresh parser process; closing it, or making another, ends the one before."""

    def __init__(self, path: Path, *, deadline_s: float = 3.0) -> None:
        super().__init__(deadline_s=deadline_s)
        self._path = path

    def start(self, uid: int = 0, gid: int = 0) -> None:
        """Connect, unless that is done; while the unit is started again, wait for it. Raises ParserFailed."""
        end = time.monotonic() + self._deadline_s / 2
        while self._sock is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(self._deadline_s)
                sock.connect(str(self._path))
            except OSError as error:
                sock.close()
                if time.monotonic() > end:
                    why = os.strerror(error.errno or 0)
                    raise ParserFailed("cannot reach the parser", str(self._path), why, died=True) from error
                time.sleep(PAUSE_S)
                continue
            self._sock = sock

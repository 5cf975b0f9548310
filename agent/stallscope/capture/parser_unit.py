"""The parser where it is a systemd unit of its own: reached by a socket, not started."""

from __future__ import annotations

import socket
from pathlib import Path

from stallscope.capture.parser_client import ParserClient, ParserFailed

__all__ = ["ParserUnit"]


class ParserUnit(ParserClient):
    """Each connection gets a fresh parser process; closing it, or making another, ends the one before."""

    def __init__(self, path: Path, *, deadline_s: float = 3.0) -> None:
        super().__init__(deadline_s=deadline_s)
        self._path = path

    def start(self, uid: int = 0, gid: int = 0) -> None:
        """Connect, unless that is done. Raises ParserFailed."""
        if self._sock is not None:
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(self._deadline_s)
            sock.connect(str(self._path))
        except OSError as error:
            sock.close()
            raise ParserFailed("cannot reach the parser", str(self._path), str(error), died=True) from error
        self._sock = sock

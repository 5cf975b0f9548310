"""The parser as a unit of its own: `python -m stallscope.parser.unit LISTENING_FD UID..`.

One connection at a time, each in a process of its own without any privilege: what a target's bytes did to it ends with
it. A new connection ends the one before: capture makes one when it has given the old one up.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys

from stallscope.parser.__main__ import FILES, MEMORY
from stallscope.parser.server import serve
from stallscope.wire.privdrop import drop_privileges

__all__ = ["main", "serve_all"]

_CREDENTIALS = struct.Struct("3i")


def serve_all(listener: socket.socket, allowed: set[int]) -> None:
    """Until a signal ends this process. `allowed`: user ids that may ask, as the kernel tells them."""
    child = 0
    listener.setblocking(True)
    while True:
        sock, _ = listener.accept()
        with sock:
            data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(data)[1] not in allowed:
                continue
            _end(child)
            child = os.fork()
            if child == 0:
                listener.close()
                _one(sock)


def _end(child: int) -> None:
    if child:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _one(sock: socket.socket) -> None:
    """What a parser does; never returns."""
    code = 1
    try:
        sock.setblocking(True)
        drop_privileges(os.geteuid(), os.getegid(), memory=MEMORY, files=FILES, processes=0)
        serve(sock)
        code = 0
    finally:
        os._exit(code)


def main(arguments: list[str]) -> int:
    """Serve the socket with this descriptor to these users."""
    fd, *users = (int(a) for a in arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=fd) as listener:
        serve_all(listener, set(users))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The parser process: `python -m stallscope.parser FD UID GID`. Capture starts it; nobody else needs to."""

from __future__ import annotations

import signal
import socket
import sys

from stallscope.parser.server import serve
from stallscope.wire.privdrop import drop_privileges

MEMORY = 1 << 30
FILES = 96  # at most 64 handed over at once


def main(arguments: list[str]) -> int:
    """Drop privileges, then serve the socket `FD` until it ends."""
    fd, uid, gid = (int(a) for a in arguments)
    # A terminal sends SIGINT to the whole group; capture ends this process by closing the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    drop_privileges(uid, gid, memory=MEMORY, files=FILES, processes=0)
    with socket.socket(fileno=fd) as sock:
        serve(sock)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

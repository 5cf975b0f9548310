"""The poller process: `python -I -m stallscope.poller FD UID GID [LIBRARY]`. Attach starts it; nobody else needs to."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

from stallscope.poller.nvml import Nvml
from stallscope.poller.ras import Asker
from stallscope.poller.sampler import Sampler
from stallscope.poller.server import serve
from stallscope.wire.privdrop import drop_privileges

MEMORY = 4 << 30
FILES = 256


def main(arguments: list[str]) -> int:
    """Drop privileges, then serve the socket `FD` until it ends.

    `LIBRARY`: the NVML to use instead of the system's.
    """
    fd, uid, gid = (int(a) for a in arguments[:3])
    # A terminal sends SIGINT to the whole group; capture ends this process by closing the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for library in arguments[3:]:
        # Before the drop: only root may be able to read the folder. The loader then gives this one to whoever asks for
        # libnvidia-ml.so.1.
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    drop_privileges(uid, gid, memory=MEMORY, files=FILES)
    with socket.socket(fileno=fd) as sock:
        try:
            serve(sock, Sampler(Nvml().look), Asker())
        except ConnectionError:
            return 0  # capture is gone
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # A thread may hang in the driver: the usual end would wait for what it holds.
    os._exit(code)

"""Which processes of this host share a communicator, as far as /proc tells: by memory and connections that two have.

Ranks of one host share memory (files of NCCL's in /dev/shm, memfds), and those of any two hosts, or where memory is not
used, hold connections to each other: NCCL's own for setting up a communicator stay open as long as it lives.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from typing import NamedTuple

from stallscope.capture.libmatch import match
from stallscope.capture.procfs import MAX_MAPS_BYTES, live_path

__all__ = ["Ties", "peers_of", "ties_of"]

MAX_PROCESSES, MAX_FDS, MAX_NET_BYTES = 1 << 16, 1 << 14, 8 << 20
SHARED = re.compile(rb"^[0-9a-f]+-[0-9a-f]+ ..\Ss [0-9a-f]+ ([0-9a-f]+:[0-9a-f]+) (\d+) +((?:/dev/shm/|/memfd:).*)$")
LIBRARY = re.compile(rb"/libnccl[^/]*$")
ESTABLISHED = b"01"
Ends = tuple[bytes, bytes]


class Ties(NamedTuple):
    """What a process that uses NCCL has in common with its peers.

    Attributes:
        memory: (device, inode) of memory that it shares.
        sockets: (own end, other end) of its TCP connections, as the kernel writes them, with the network they are in.
    """

    memory: frozenset[tuple[bytes, bytes]]
    sockets: frozenset[tuple[str, Ends]]

    def binds(self, other: Ties) -> bool:
        """Whether the two are peers."""
        return bool(self.memory & other.memory) or any((net, (b, a)) in other.sockets for net, (a, b) in self.sockets)


def ties_of(pid: int) -> Ties | None:
    """None for a process without NCCL, one that is gone or may not be read."""
    try:
        with open(f"{live_path(pid)}/maps", "rb") as file:
            lines = file.read(MAX_MAPS_BYTES).splitlines()
    except OSError:
        return None
    if not any(LIBRARY.search(line) and match(line.decode("utf-8", "replace")) == "NCCL" for line in lines):
        return None
    found = (SHARED.match(line) for line in lines)
    return Ties(frozenset((f[1], f[2]) for f in found if f), frozenset(_connections(pid)))


def _connections(pid: int) -> set[tuple[str, Ends]]:
    inodes, network = _sockets(pid), ""
    found: set[tuple[str, Ends]] = set()
    with contextlib.suppress(OSError):
        network = os.readlink(f"/proc/{pid}/ns/net")
        for name in ("tcp", "tcp6") if inodes else ():
            with open(f"/proc/{pid}/net/{name}", "rb") as file:
                rows = (line.split() for line in file.read(MAX_NET_BYTES).splitlines()[1:])
            found |= {(network, (r[1], r[2])) for r in rows if len(r) > 9 and r[3] == ESTABLISHED and r[9] in inodes}
    return found


def _sockets(pid: int) -> set[bytes]:
    inodes = set()
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in itertools.islice(entries, MAX_FDS):
            with contextlib.suppress(OSError):
                link = os.readlink(entry.path)
                if link.startswith("socket:["):
                    inodes.add(link[8:-1].encode())
    return inodes


def peers_of(pids: set[int]) -> set[int]:
    """Processes that share a communicator with one of these, or with a peer of theirs, and are none of these."""
    known = {pid: ties for pid in pids if (ties := ties_of(pid)) is not None}
    if not known:
        return set()
    others = {int(name) for name in os.listdir("/proc") if name.isdecimal()} - pids
    waiting = {pid: ties for pid in sorted(others)[:MAX_PROCESSES] if (ties := ties_of(pid)) is not None}
    found: set[int] = set()
    todo = list(known.values())
    while todo:
        ties = todo.pop()
        for pid in [pid for pid, other in waiting.items() if ties.binds(other)]:
            found.add(pid)
            todo.append(waiting.pop(pid))
    return found

"""The socket to which shims hand their segments: real sockets, and senders that misbehave."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from stallscope.capture.handover import HELLO, MAGIC, MAX_WAITING, PATIENCE_NS, VERSIONS, HandOver

SECOND = 1_000_000_000


@pytest.fixture
def door(tmp_path: Path) -> Iterator[HandOver]:
    made = HandOver(tmp_path / "s")
    yield made
    made.close()
    assert not (tmp_path / "s").exists()


def knock(door: HandOver) -> socket.socket:
    """A shim that has come to the socket."""
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender.connect(str(door.path))
    return sender


def hello(magic: int = MAGIC, version: int = VERSIONS[-1], pid: int = 1, ticks: int = 123) -> bytes:
    return HELLO.pack(magic, version, pid, ticks)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_segment_comes_with_its_sender(door: HandOver) -> None:
    """The pid is the kernel's, whatever the packet says; the description is our own, so that a lock on it is, too."""
    fd = os.memfd_create("segment")
    with knock(door) as sender:
        socket.send_fds(sender, [hello(pid=42)], [fd])
    (handed,) = door.take(0)
    assert (handed.pid, handed.start_ticks) == (os.getpid(), 123)
    assert os.fstat(handed.fd).st_ino == os.fstat(fd).st_ino
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError):
        fcntl.flock(handed.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for mine in (fd, handed.fd):
        os.close(mine)
    assert door.refused == 0


@pytest.mark.parametrize(("data", "fds"), [
    (hello(magic=5), 1), (hello(version=99), 1), (hello()[:-1], 1), (hello() + b"x", 1), (hello(), 0), (hello(), 2),
    (b"", 1),
])  # fmt: skip
def test_what_is_no_hand_over(door: HandOver, data: bytes, fds: int) -> None:
    """Refused, counted, and no descriptor stays open."""
    null = os.open(os.devnull, os.O_RDONLY)
    before = open_files()
    with knock(door) as sender:
        socket.send_fds(sender, [data], [null] * fds)
    assert door.take(0) == [] and door.refused == 1
    assert open_files() == before
    os.close(null)


def test_who_comes_and_says_nothing(door: HandOver) -> None:
    """He is waited for, not for ever, and does not hold up others."""
    fd = os.memfd_create("segment")
    silent = knock(door)
    assert door.take(0) == [] and door.refused == 0
    with knock(door) as sender:
        socket.send_fds(sender, [hello()], [fd])
    (handed,) = door.take(SECOND)
    assert door.refused == 0
    assert door.take(PATIENCE_NS) == [] and door.refused == 1
    silent.close()
    for mine in (fd, handed.fd):
        os.close(mine)


def test_a_crowd_is_bounded(door: HandOver) -> None:
    """Who does not get in waits in the kernel; the shim itself never waits."""
    crowd = []
    for _ in range(2 * MAX_WAITING):
        sender = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        crowd.append(sender)
        if sender.connect_ex(str(door.path)):
            break
        door.take(0)
    assert len(door._waiting) == MAX_WAITING
    for sender in crowd:
        sender.close()
    for _ in range(2 * MAX_WAITING):
        door.take(PATIENCE_NS)
    assert not door._waiting

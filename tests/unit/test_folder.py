"""A folder of segments: what is opened, what is not, who lives, what is taken away."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stallscope.capture.folder import FINISH_NS, MAX_FILES, Folder, holder_of

ME = frozenset((os.geteuid(),))


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def folder(tmp_path: Path, told: list[str]) -> Folder:
    return Folder(tmp_path, ME, told.append)


def made(tmp_path: Path, name: str, data: bytes = b"x" * 16) -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def names(folder: Folder, now_ns: int = 0) -> list[str]:
    found = folder.news(now_ns)
    for file in found:
        os.close(file.fd)
    return [file.name for file in found]


def test_each_segment_is_given_out_once(folder: Folder, tmp_path: Path, told: list[str]) -> None:
    """Names of shims only; the third number is of a program after an exec."""
    for name in ("1.22.seg", "1.22.1.seg", "1.22.seg.new", "notes.txt", "1.seg", "a.1.seg", "1.22.100.seg"):
        made(tmp_path, name)
    assert names(folder) == ["1.22.seg", "1.22.1.seg"]
    assert names(folder) == []
    made(tmp_path, "2.5.seg")
    assert names(folder) == ["2.5.seg"]
    assert not told and folder.refused == 0


def test_one_that_is_not_finished_is_waited_for(folder: Folder, tmp_path: Path) -> None:
    path = made(tmp_path, "1.22.seg", b"\0" * 16)
    assert names(folder) == []
    path.write_bytes(b"stlpseg1")
    assert names(folder) == ["1.22.seg"]
    made(tmp_path, "3.4.seg", b"")
    assert names(folder, 5) == []
    assert names(folder, 6 + FINISH_NS) == ["3.4.seg"]  # the reader says what is wrong with it


def test_what_is_no_regular_file(folder: Folder, tmp_path: Path, told: list[str]) -> None:
    """Neither followed, nor opened: a pipe would block, a link leads anywhere."""
    os.mkfifo(tmp_path / "1.1.seg")
    (tmp_path / "1.2.seg").symlink_to("/etc/passwd")
    (tmp_path / "1.3.seg").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "1.4.seg"))
        assert names(folder) == []
    assert folder.refused == 4 and sum("no regular file" in line for line in told) == 4
    assert names(folder) == [] and folder.refused == 4


def test_files_of_others(tmp_path: Path, told: list[str]) -> None:
    """Whose files are read is said, not guessed; the message tells how."""
    made(tmp_path, "1.1.seg")
    other = os.geteuid() + 1
    folder = Folder(tmp_path, frozenset((other,)), told.append)
    assert names(folder) == []
    assert told == [f"{tmp_path}: 1.1.seg is of uid {os.geteuid()}, who is not read: --uid {os.geteuid()}"]
    assert names(Folder(tmp_path, frozenset((other, os.geteuid())), told.append)) == ["1.1.seg"]


def test_no_folder_and_too_many_files(tmp_path: Path, told: list[str]) -> None:
    assert names(Folder(tmp_path / "none", ME, told.append)) == []
    for number in range(MAX_FILES + 5):
        (tmp_path / f"{number}.x").touch()
    folder = Folder(tmp_path, ME, told.append)
    for _ in range(3):
        assert names(folder) == []
    assert folder.refused == 1 and "more than 4096 files" in told[0]


def test_a_file_is_taken_away_once_it_is_over(folder: Folder, tmp_path: Path) -> None:
    """But not another one that has its name by now."""
    path = made(tmp_path, "1.22.seg")
    (file,) = folder.news(0)
    folder.remove(file)
    assert not path.exists()
    folder.remove(file)  # nothing there
    made(tmp_path, "other")
    (tmp_path / "other").rename(path)
    if path.stat().st_ino != file.inode:  # some file systems give numbers out again at once
        folder.remove(file)
        assert path.exists()
    os.close(file.fd)


@pytest.fixture
def locker(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the record lock on a file, as the shim does."""
    code = (
        "import fcntl, os, struct, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)\n"
        "fcntl.fcntl(fd, fcntl.F_SETLK, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 1, 0))\n"
        "print('locked', flush=True); sys.stdin.readline()\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "1.22.seg")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_who_holds_a_file(tmp_path: Path, locker: subprocess.Popen[str]) -> None:
    """The kernel's word, also where only reading is allowed; a lock of flock's kind is another thing."""
    for flags in (os.O_RDWR, os.O_RDONLY):
        fd = os.open(tmp_path / "1.22.seg", flags)
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert holder_of(fd) == locker.pid
        os.close(fd)
    fd = os.open(tmp_path / "1.22.seg", os.O_RDWR)
    locker.kill()
    locker.wait()
    assert holder_of(fd) is None
    os.close(fd)


def test_the_layout_of_a_lock() -> None:
    """struct flock of 64-bit Linux."""
    assert struct.calcsize("hhqqi4x") == 32

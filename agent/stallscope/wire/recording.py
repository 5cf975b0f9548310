"""Recordings: the frame stream in a file, written as it comes and read with suspicion."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from stallscope.errors import RecordingProblem
from stallscope.wire.frames import (
    FILE_HEADER_BYTES,
    VERSION,
    BadFrame,
    Decoder,
    Frame,
    Kind,
    file_header,
    read_file_header,
)

__all__ = ["Ending", "Recorder", "Recording", "open_output", "read_recording"]

CHUNK_BYTES = 1 << 18


class Recorder:
    """Writes a header, then the bytes of frames, to a descriptor that it owns.

    A full disk must not cost the live report: the first failure stops the recording, is kept in `problem`, and nothing
    is raised.

    Attributes:
        problem: why the recording stopped, None while it goes on.
        written: bytes in the file, the header included.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.problem: str | None = None
        self.written = 0
        self.write(file_header())

    def write(self, data: bytes) -> None:
        """Add bytes; a partial frame at the end of a stopped recording is what a reader calls truncated."""
        view = memoryview(data)
        while view and self.problem is None:
            try:
                done = os.write(self._fd, view)
            except OSError as error:
                self.problem = f"{os.strerror(error.errno or 0)} after {self.written} bytes"
                return
            self.written += done
            view = view[done:]

    def close(self) -> None:
        """Close the file; a delayed write error (NFS, quota) shows here."""
        try:
            os.close(self._fd)
        except OSError as error:
            self.problem = self.problem or f"{os.strerror(error.errno or 0)} at the end"


class Ending(NamedTuple):
    """How a frame stream ends that no farewell ends.

    Attributes:
        offset: the byte after the last whole frame.
        pending: bytes of an unfinished frame that follow.
        bad: why it can't be read on, None where it is just cut.
    """

    offset: int
    pending: int
    bad: str | None = None

    def __str__(self) -> str:
        if self.bad is not None:
            return f"ends with {self.bad} at byte {self.offset}"
        rest = f"{self.pending} bytes of an unfinished frame follow" if self.pending else "it is no farewell"
        return f"last whole frame ends at byte {self.offset}; {rest}"


class Recording:
    """An open recording: iterate over it once, then ask `ending` (None when a farewell ended it)."""

    def __init__(self, fd: int, header_size: int) -> None:
        self._fd = fd
        self._decoder = Decoder(offset=header_size)
        self.ending: Ending | None = None

    def __iter__(self) -> Iterator[Frame]:
        try:
            yield from self._frames()
        except BadFrame as error:
            self.ending = Ending(error.offset, 0, error.why)
        except OSError as error:
            self.ending = Ending(self._decoder.offset, 0, os.strerror(error.errno or 0))
        finally:
            os.close(self._fd)

    def _frames(self) -> Iterator[Frame]:
        while data := os.read(self._fd, CHUNK_BYTES):
            for frame in self._decoder.feed(data):
                yield frame
                if frame.kind == Kind.BYE:
                    return
        self.ending = Ending(self._decoder.offset, self._decoder.pending)


def read_recording(path: str) -> Recording:
    """Open a recording and check its header. Raises RecordingProblem."""
    fd = _open_input(path)
    try:
        head = b""
        while len(head) < FILE_HEADER_BYTES and (more := os.read(fd, FILE_HEADER_BYTES - len(head))):
            head += more
        version, min_reader, size = read_file_header(head)
        _skip(fd, size - FILE_HEADER_BYTES)
    except (BadFrame, OSError) as error:
        os.close(fd)
        raise _unreadable(path, error) from error
    if min_reader > VERSION:
        os.close(fd)
        raise RecordingProblem(
            f"cannot read {path}",
            why=f"it has version {version} and asks for a reader of version {min_reader}; this one has {VERSION}",
            hint="read it with the stallscope that wrote it, or a newer one",
        )
    return Recording(fd, size)


def _unreadable(path: str, error: BadFrame | OSError) -> RecordingProblem:
    why = error.why if isinstance(error, BadFrame) else os.strerror(error.errno or 0)
    return RecordingProblem(
        f"cannot read {path}", why=why, hint="name a file that `stallscope attach PID -o FILE` has written"
    )


def _open_input(path: str) -> int:
    try:
        # O_NONBLOCK: opening a FIFO must not hang; it has no effect on regular files.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        why = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
        raise RecordingProblem(f"cannot open {path}", why=why, hint="check the path and its permissions") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise RecordingProblem(
            f"cannot read {path}", why="it is no regular file", hint="name a file that `attach -o FILE` has written"
        )
    return fd


def _skip(fd: int, size: int) -> None:
    """Skip what a later version put behind the header that we know."""
    if len(os.read(fd, size)) != size:
        raise BadFrame("shorter than its header", 0)


def open_output(path: str, force: bool, uid: int, gid: int) -> int:
    """Create a recording with the rights of the caller: root by sudo must not write where the caller could not.

    No link is followed and nothing is overwritten, except with `force` a regular file.

    Args:
        uid, gid: the caller. Without effect unless this process is root and the caller is not.

    Raises:
        RecordingProblem: the file can't be had that way.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with _as_caller(uid, gid):
            fd = os.open(path, flags if force else flags | os.O_EXCL, 0o600)
    except (OSError, ValueError) as error:
        raise _refused(path, error) from error
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise RecordingProblem(f"cannot write {path}", why="it is no regular file", hint="name a new file with -o FILE")
    # Not O_TRUNC above: a file that turns out to be no regular one must keep what it has.
    os.ftruncate(fd, 0)
    if info.st_uid == os.geteuid() or (os.geteuid() == 0 and info.st_uid == uid):
        os.fchmod(fd, 0o600)
    return fd


def _refused(path: str, error: OSError | ValueError) -> RecordingProblem:
    if isinstance(error, FileExistsError):
        return RecordingProblem(
            f"cannot write {path}", why="it exists and would be overwritten", hint="name another file, or add --force"
        )
    folder = str(Path(path).parent)
    why = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
    if isinstance(error, OSError) and Path(path).is_symlink():
        return RecordingProblem(
            f"cannot write {path}", why="it is a symbolic link, and links are not followed", hint="name its target"
        )
    return RecordingProblem(
        f"cannot write {path}", why=why, hint=f"name a file in a folder you may write to ({folder})"
    )


@contextlib.contextmanager
def _as_caller(uid: int, gid: int) -> Iterator[None]:
    """File access as that user for a moment, supplementary groups included."""
    if os.geteuid() != 0 or uid == 0:
        yield
        return
    groups, own_gid = os.getgroups(), os.getegid()
    undo: list[Callable[[], None]] = []
    try:
        os.setgroups(_groups(uid, gid))
        undo.append(lambda: os.setgroups(groups))
        os.setegid(gid)
        undo.append(lambda: os.setegid(own_gid))
        os.seteuid(uid)
        undo.append(lambda: os.seteuid(0))
        yield
    finally:
        for step in reversed(undo):
            step()


def _groups(uid: int, gid: int) -> list[int]:
    """The groups that the caller has by the user database."""
    import pwd

    try:
        return os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:
        return [gid]

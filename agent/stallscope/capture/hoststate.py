"""Where the threads of a process are, as /proc says it: what a look during a block is made of.

Nothing here may wait: no path of the target is opened or asked for its size (a file system that is gone would hold us
as it holds the target), links are read and descriptors' positions come from fdinfo.
"""

from __future__ import annotations

import itertools
import os
from typing import NamedTuple

from stallscope.capture.blocked import read_up
from stallscope.capture.procfs import clean
from stallscope.capture.syscalls import TAKES_FD, TAKES_PATH, syscall_name
from stallscope.capture.whereabouts import POLLS, polled_files

__all__ = ["MAX_THREADS", "HostThread", "WrittenFiles", "read_thread", "read_threads"]

MAX_THREADS = 16
MAX_FDS = 256
MAX_TEXT = 256
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_NO_FILES = ("/dev/", "/proc/", "/sys/", "/memfd:", "/anon_hugepage")


class HostThread(NamedTuple):
    """One thread. `syscall`, `wchan`, `file` are None where it is in none, or where that can't be read."""

    tid: int
    name: str
    state: str
    syscall: str | None
    wchan: str | None
    file: str | None
    cpu_ns: int


def read_threads(pid: int, callers: list[int]) -> list[HostThread]:
    """At most MAX_THREADS threads: the main one, then those of `callers` in their order, then others by number.

    Empty when the process is gone.
    """
    try:
        there = {int(name) for name in os.listdir(f"/proc/{pid}/task")}
    except OSError:
        return []
    order = dict.fromkeys([pid, *callers, *sorted(there)])
    chosen = itertools.islice((tid for tid in order if tid in there), MAX_THREADS)
    return [thread for tid in chosen if (thread := read_thread(pid, tid)) is not None]


def _read(path: str, limit: int = 4096) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, limit)
    finally:
        os.close(fd)


def _text(raw: bytes | str) -> str:
    text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
    return clean(text[:MAX_TEXT])[:MAX_TEXT]


def read_thread(pid: int, tid: int) -> HostThread | None:
    """One thread; None when it is gone."""
    folder = f"/proc/{pid}/task/{tid}"
    try:
        head, _, rest = _read(f"{folder}/stat").rpartition(b")")
        fields = rest.split()
        state, cpu_ticks = chr(fields[0][0]), int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return None
    syscall, file = _syscall(pid, folder)
    return HostThread(tid, _text(head.partition(b"(")[2]), state, syscall, _wchan(folder), file, cpu_ticks * _TICK_NS)


def _wchan(folder: str) -> str | None:
    try:
        name = _read(f"{folder}/wchan")
    except OSError:
        return None
    return None if name in (b"", b"0") else _text(name)


def _syscall(pid: int, folder: str) -> tuple[str | None, str | None]:
    """Name of the system call that the thread is in, and the file: what its first argument is open on, the path that it
    was given, or the only one that it polls."""
    try:
        words = _read(f"{folder}/syscall").split()
        number = int(words[0])  # "running" is no number
        arguments = [int(word, 16) for word in words[1:7]]
    except (OSError, ValueError, IndexError):
        return None, None
    if number < 0:
        return None, None  # it waits outside of a system call: a page fault
    name = syscall_name(number)
    place = TAKES_PATH.get(name)
    if place is not None and len(arguments) > place:
        path = read_up(pid, arguments[place], MAX_TEXT).split(b"\0", 1)[0]
        return name, _text(path) or None
    if name in POLLS and len(arguments) > 1:
        files = polled_files(pid, pid, arguments)
        # A pidfd, an event or a timer is no file that a reader could look up; inotify: it waits for one to change.
        is_told = len(files) == 1 and (files[0] == "anon_inode:inotify" or not files[0].startswith("anon_inode:"))
        return name, files[0] if is_told else None
    if name not in TAKES_FD or not arguments:
        return name, None
    try:
        return name, _text(os.readlink(f"{folder}/fd/{arguments[0] & 0xFFFFFFFF}"))
    except (OSError, ValueError):
        return name, None


class WrittenFiles:
    """How far a process has come in the files that it writes, from one look to the next."""

    def __init__(self) -> None:
        self._positions: dict[tuple[int, str], int] | None = None

    def advance(self, pid: int, tid: int) -> tuple[str, int] | None:
        """(path, bytes) of the file whose position went on most since the last look; None at the first look.

        Positions only: bytes written by pwrite don't show. `tid`: a thread that still runs.
        """
        before, now = self._positions, _positions(f"/proc/{pid}/task/{tid}")
        self._positions = {key: position for key, (position, _) in now.items()}
        if before is None:
            return None
        grown = [
            (position - before.get(key, position if appends else 0), key[1]) for key, (position, appends) in now.items()
        ]
        size, path = max(grown, default=(0, ""))
        return (_text(path), size) if size > 0 else None


def _positions(folder: str) -> dict[tuple[int, str], tuple[int, bool]]:
    """(descriptor, path) -> (position, whether it only appends), of files open for writing that are not where its
    standard output or error go: a traceback, or a watchdog's last words, is no checkpoint."""
    found = {}
    try:
        with os.scandir(f"{folder}/fd") as entries:
            names = [entry.name for entry in itertools.islice(entries, MAX_FDS)]
    except OSError:
        return {}
    said = {_link(f"{folder}/fd/{number}") for number in (1, 2)}
    for name in names:
        try:
            path = os.readlink(f"{folder}/fd/{name}")
            if not path.startswith("/") or path.startswith(_NO_FILES) or path in said:
                continue
            position, flags = _fdinfo(_read(f"{folder}/fdinfo/{name}"))
        except (OSError, ValueError):
            continue
        if flags & os.O_ACCMODE != os.O_RDONLY:
            found[int(name), path] = position, bool(flags & os.O_APPEND)
    return found


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _fdinfo(text: bytes) -> tuple[int, int]:
    """(position, flags). Raises ValueError."""
    fields = dict(line.split(b":", 1) for line in text.splitlines() if b":" in line)
    try:
        return int(fields[b"pos"]), int(fields[b"flags"], 8)
    except KeyError as missing:
        raise ValueError(f"fdinfo without {missing}") from missing

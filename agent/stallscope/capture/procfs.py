"""What /proc says about processes. Names, paths and command lines are the target's words: data, never instructions."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import NamedTuple

from stallscope.wire.secrets import words_without_secrets

__all__ = ["Block", "Facts", "Mapping", "children_of", "clean", "environment_of", "execed_facts", "executable_mappings",
           "facts_of", "forked_facts",
           "has_own_filter", "is_leaderless", "live_path", "name_of", "own_tid", "parent_of", "probe_area",
           "rank_words", "seccomp_mode", "start_ns_of_ticks", "task_name", "threads_of", "vdso_of"]  # fmt: skip

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_CONTAINER = re.compile(r"([0-9a-f]{64})(?:\.scope)?(?:/|$)", re.MULTILINE)
_MAPS_LINE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) *(.*)$")
MAX_CMDLINE_BYTES = 4096
MAX_MAPS_BYTES = 16 << 20
MAX_ENVIRON_BYTES = 6 << 20  # the kernel takes no more: a variable behind the cut would look as if it had never been
RANK_WORDS = frozenset({b"RANK", b"WORLD_SIZE", b"LOCAL_RANK", b"SLURM_PROCID", b"SLURM_NTASKS",
                        b"OMPI_COMM_WORLD_RANK", b"PMI_RANK"})  # fmt: skip
_STATUS_LINE = re.compile(rb"^(Name|PPid|Uid|NSpid|Seccomp):(.*)$", re.MULTILINE)  # a name holds no newline there
_NUMBER = re.compile(rb"[0-9]{1,64}")


class Block(NamedTuple):
    """Where the kernel put the environment at the exec: addresses [start, end), and what stands there now.

    `words`: NAME=value each. `is_overwritten`: the process wrote something else over it, as setproctitle does.
    """

    start: int
    end: int
    data: bytes
    words: list[bytes]
    is_overwritten: bool


class Mapping(NamedTuple):
    """One executable mapping: addresses, file offset in bytes, device (major, minor), inode, path as shown."""

    start: int
    end: int
    offset: int
    device: tuple[int, int]
    inode: int
    path: str


class Facts(NamedTuple):
    """One process. `start_ns` is on CLOCK_MONOTONIC and, with the pid, names the process for good."""

    pid: int
    ns_pid: int | None
    ppid: int
    name: str
    cmdline: list[str]
    container_id: str | None
    start_ns: int
    uid: int


def clean(text: str) -> str:
    """The target's text with control characters and lone surrogates made visible: it ends on someone's terminal."""
    return "".join(c if c.isprintable() and not "\ud800" <= c <= "\udfff" else f"\\x{ord(c) & 0xFF:02x}" for c in text)


def _read(pid: int | str, name: str, limit: int) -> bytes:
    # Half the time of a file object, and processes may begin by the hundred a second.
    fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = piece = os.read(fd, limit)
        while piece and len(data) < limit:
            piece = os.read(fd, limit - len(data))
            data += piece
        return data
    finally:
        os.close(fd)


def _status(pid: int | str) -> dict[str, str]:
    found = _STATUS_LINE.findall(_read(pid, "status", 65536))
    return {key.decode(): value.decode("utf-8", "replace").strip() for key, value in found}


def _boot_minus_monotonic_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def _stat_fields(pid: int) -> list[str]:
    # The name stands in brackets and may itself hold brackets and spaces: only the last ')' ends it.
    return _read(pid, "stat", 4096).decode("utf-8", "replace").rpartition(")")[2].split()


def start_ns_of_ticks(ticks: int) -> int:
    """Field 22 of /proc/PID/stat on CLOCK_MONOTONIC."""
    return ticks * _TICK_NS - _boot_minus_monotonic_ns()


def _start_ns(pid: int) -> int:
    return start_ns_of_ticks(int(_stat_fields(pid)[19]))


def parent_of(pid: int) -> int:
    """Parent's pid. Raises OSError when the process is gone."""
    return int(_stat_fields(pid)[1])


def _container(pid: int) -> str | None:
    try:
        found = _CONTAINER.findall(_read(pid, "cgroup", 65536).decode("utf-8", "replace"))
    except OSError:
        return None
    # A container inside a container: the path names both, the inner one last.
    return str(found[-1]) if found else None


def facts_of(pid: int) -> Facts:
    """Facts of a live process. Raises OSError when it is gone or hidden."""
    status = _status(pid)
    return Facts(
        pid=pid,
        ns_pid=_ns_pid(status),
        ppid=int(status.get("PPid", "0")),
        name=clean(status.get("Name", "?")),
        cmdline=_cmdline(pid),
        container_id=_container(pid),
        start_ns=_start_ns(pid),
        uid=int(status.get("Uid", "0").split()[0]),
    )


def forked_facts(pid: int, parent: Facts, start_ns: int) -> Facts:
    """Facts of a child that was forked at that instant: what a fork leaves as it is, its parent's. Raises OSError."""
    status = _status(pid)
    name, uid = clean(status.get("Name", "?")), int(status.get("Uid", "0").split()[0])
    return parent._replace(pid=pid, ns_pid=_ns_pid(status), ppid=parent.pid, name=name, start_ns=start_ns, uid=uid)


def execed_facts(facts: Facts) -> Facts:
    """Facts of a process that runs another program by now. Raises OSError."""
    return facts._replace(name=name_of(facts.pid), cmdline=_cmdline(facts.pid))


def _ns_pid(status: dict[str, str]) -> int | None:
    ns_pids = status.get("NSpid", "").split()
    return int(ns_pids[-1]) if ns_pids else None


def _cmdline(pid: int) -> list[str]:
    raw = _read(pid, "cmdline", MAX_CMDLINE_BYTES)
    words = raw.rstrip(b"\0").split(b"\0") if raw else []
    return words_without_secrets(clean(word.decode("utf-8", "replace")) for word in words)


def name_of(pid: int) -> str:
    """Its name, as in `facts_of`. Raises OSError."""
    return clean(_read(pid, "comm", 64).decode("utf-8", "replace").removesuffix("\n"))


def task_name(comm: bytes) -> str:
    """A name as the kernel keeps it, padded with zeros."""
    return clean(comm.partition(b"\0")[0].decode("utf-8", "replace"))


def live_path(pid: int) -> str:
    """/proc folder of a process through a thread that still runs.

    A main thread that has called pthread_exit stays as a zombie without memory: /proc/PID/maps is empty then while the
    other threads go on. Raises OSError when the process is gone.
    """
    if _stat_fields(pid)[0] not in "ZX":
        return f"/proc/{pid}"
    for tid in threads_of(pid):
        path = f"/proc/{pid}/task/{tid}"
        with contextlib.suppress(OSError):
            if Path(f"{path}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX":
                return path
    raise ProcessLookupError(f"process {pid} has ended")


def rank_words(pid: int) -> dict[str, str]:
    """What launchers say of a process's place, from its environment as it was at the exec; numbers only."""
    try:
        data = _read(pid, "environ", MAX_ENVIRON_BYTES)
    except OSError:
        return {}
    pairs = (word.partition(b"=") for word in data.split(b"\0"))
    return {
        name.decode(): number.decode()
        for name, _, value in pairs
        if name in RANK_WORDS and (number := value[:64]) and _NUMBER.fullmatch(number)
    }


def environment_of(pid: int) -> Block | None:
    """The environment as it was at the exec. None when it can't be read: no rights, or the process is gone."""
    try:
        path = live_path(pid)
        fields = _stat_fields(pid)
        start, end = int(fields[47]), int(fields[48])
        with open(f"{path}/environ", "rb") as file:
            data = file.read(MAX_ENVIRON_BYTES)
    except (OSError, ValueError, IndexError):
        return None
    if start <= 0 or start > end or (not data and start != end):
        return None  # the kernel hides it, or the process has just ended
    words = data.removesuffix(b"\0").split(b"\0") if data else []
    # What exec puts there has no empty words, and the first one is a pair; what setproctitle leaves are zeros, behind
    # the end of a long title.
    is_overwritten = bool(words) and (b"=" not in words[0][1:] or b"" in words)
    whole = words[:-1] if len(data) == MAX_ENVIRON_BYTES else words
    return Block(start, end, data, [] if is_overwritten else whole, is_overwritten)


def own_tid(pid: int, tid: int) -> int:
    """The thread's number in its own pid namespace; the same one where that can't be read."""
    try:
        return int(_status(f"{pid}/task/{tid}")["NSpid"].split()[-1])
    except (OSError, LookupError, ValueError):
        return tid


def is_leaderless(pid: int) -> bool:
    """Whether the main thread has ended and others run on: the kernel filters links by the main thread's memory."""
    try:
        return live_path(pid) != f"/proc/{pid}"
    except OSError:
        return False


def seccomp_mode(pid: int) -> int | None:
    """0 none, 1 strict, 2 filter: the highest of all threads, each has its own. None when the process is gone."""
    modes = []
    for tid in threads_of(pid):
        try:
            modes.append(int(_status(f"{pid}/task/{tid}").get("Seccomp", "0")))
        except (OSError, ValueError):
            continue
    return max(modes, default=None)


def has_own_filter(pid: int) -> bool:
    """Whether the program has installed a seccomp filter itself, beyond those that its parent, or we, have too.

    The first process of a container has its runtime's, which its parent has not.
    """
    count = _filters(pid)
    if not count:
        return False
    try:
        status = _status(f"{pid}")
        given, is_first = _filters(int(status["PPid"])), status["NSpid"].split()[-1] == "1"
    except (OSError, LookupError, ValueError):
        return True
    return count > max(given, _filters(os.getpid())) + is_first


def _filters(pid: int) -> int:
    """How many its main thread has, 1 where the kernel tells no number (before 5.9); in strict mode many."""
    try:
        status = _status(f"{pid}")
        mode = int(status.get("Seccomp", "0"))
        return 1 << 20 if mode == 1 else int(status.get("Seccomp_filters", "1")) if mode else 0
    except (OSError, ValueError):
        return 0


def threads_of(pid: int) -> list[int]:
    """Thread ids; empty when the process is gone."""
    try:
        return sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return []


def thread_name(pid: int, tid: int) -> str:
    """Empty when the thread is gone."""
    try:
        return clean(_read(f"{pid}/task/{tid}", "comm", 64).decode("utf-8", "replace").removesuffix("\n"))
    except OSError:
        return ""


def children_of(pid: int) -> list[int]:
    """All live descendants, parents first."""
    found: list[int] = []
    todo = [pid]
    while todo:
        parent = todo.pop(0)
        direct = _direct_children(parent)
        found += direct
        todo += direct
    return found


def _direct_children(pid: int) -> list[int]:
    children: list[int] = []
    for tid in threads_of(pid):
        try:
            children += map(int, Path(f"/proc/{pid}/task/{tid}/children").read_text().split())
        except OSError:
            continue
    return children


def executable_mappings(pid: int) -> list[Mapping]:
    """Executable file mappings of a process, one read of its maps. Raises OSError when it is gone or not permitted."""
    mappings = []
    with open(f"{live_path(pid)}/maps", "rb") as file:
        lines = file.read(MAX_MAPS_BYTES).splitlines()
    for line in lines:
        found = _MAPS_LINE.match(line)
        if not found or found.group(3)[2:3] != b"x" or found.group(7) == b"0":
            continue
        start, end, _, offset, major, minor, inode, path = found.groups()
        mappings.append(
            Mapping(
                int(start, 16), int(end, 16), int(offset, 16), (int(major, 16), int(minor, 16)), int(inode),
                _unescape(path),
            )
        )  # fmt: skip
    return mappings


def probe_area(pid: int) -> tuple[int, int] | None:
    """Where the kernel keeps its return-probe trampoline in this process; None when it has none, or is gone."""
    return _kernel_area(pid, b"[uprobes]")


def vdso_of(pid: int) -> tuple[int, int] | None:
    """Where the kernel's code for reading clocks is mapped; None when it is not, or the process is gone."""
    return _kernel_area(pid, b"[vdso]")


def _kernel_area(pid: int, name: bytes) -> tuple[int, int] | None:
    try:
        with open(f"{live_path(pid)}/maps", "rb") as file:
            lines = file.read(MAX_MAPS_BYTES).splitlines()
    except OSError:
        return None
    for line in lines:
        if line.endswith(b" " + name) and line.split(b" ")[4] == b"0":
            start, _, end = line.split(b" ", 1)[0].partition(b"-")
            return int(start, 16), int(end, 16)
    return None


def _unescape(path: bytes) -> str:
    # The kernel escapes newline as \012 in maps and nothing else.
    return path.replace(b"\\012", b"\n").decode("utf-8", "surrogateescape")

"""Processes that the kernel ended for want of memory: a tracepoint tells, or, without privileges, a cgroup counts."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from stallscope.capture.procfs import clean, task_name
from stallscope.capture.target import Target
from stallscope.wire.frames import Kind

__all__ = ["OomCounts", "Victims", "memory_cgroup"]

MAX_CGROUPS = 64
MAX_VICTIMS = 256
MAX_BYTES = 65536
Send = Callable[[Kind, dict[str, Any]], None]


class _Mount(NamedTuple):
    """Where a hierarchy with a memory controller is mounted, and which of its folders that shows."""

    point: Path
    root: str
    is_v2: bool


def memory_cgroup(pid: int) -> str | None:
    """The process's cgroup in the hierarchy that limits its memory, as its cgroup file names it; None if it is gone."""
    try:
        with open(f"/proc/{pid}/cgroup", "rb") as file:
            lines = file.read(MAX_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    rows = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    found = next((row[2] for row in rows if "memory" in row[1].split(",")), None)
    return found or next((row[2] for row in rows if row[0] == "0"), None)


class Victims:
    """Who was chosen, as the tracepoint tells: those that are traced, and others in the same cgroup.

    Args:
        live: the traced processes.
    """

    def __init__(self, send: Send, live: Callable[[], list[Target]]) -> None:
        self._send, self._live = send, live
        self._procs: set[int] = set()
        self._counts = OomCounts()
        self._learned: set[int] = set()
        self._told = self.turned_away = 0

    def learn(self) -> None:
        """Once a second: count in the cgroups of the traced processes, too."""
        live = self._live()
        self._counts.learn(target.pid for target in live if target.proc not in self._learned)
        self._learned = {target.proc for target in live}

    def tell(self, at_ns: int, pid: int, target: Target | None, name: bytes) -> None:
        """`pid` 0: not visible from here; `name`: its task's, padded with zeros."""
        if target is not None:
            self._procs.add(target.proc)
        if self._told >= MAX_VICTIMS:
            self.turned_away += 1
            return
        self._told += 1
        cgroup = memory_cgroup(pid) if pid else None
        ours = True if target is not None else self._is_ours(cgroup)
        if ours is not False:  # asked also where it is known: that kill is explained then
            rose = self._counts.claim(signal.SIGKILL)
            ours = rose if ours is None else ours
        body = {
            "at_ns": at_ns, "proc": target.proc if target else None, "pid": pid or None, "kills": 1,
            "name": task_name(name) or None,
            "cgroup": clean(cgroup) if cgroup else None, "ours": ours,
        }  # fmt: skip
        self._send(Kind.OOM, body)

    def _is_ours(self, cgroup: str | None) -> bool | None:
        if cgroup in (None, "/"):  # which an old hierarchy says of all that are ending already
            return None
        return any(memory_cgroup(target.pid) == cgroup for target in self._live())

    def holds(self, proc: int) -> bool:
        """Whether this process was chosen."""
        return proc in self._procs


class OomCounts:
    """How often the kernel did so in the cgroups of some processes, as far as their counters can be read.

    Attributes:
        unexplained: kills by cgroup that no ended process was found for.
    """

    def __init__(self) -> None:
        self._mounts = _mounts()
        self._seen: dict[Path, int] = {}
        self._names: dict[Path, str] = {}
        self.unexplained: Counter[str] = Counter()

    def learn(self, pids: Iterable[int]) -> None:
        """Count in the cgroups of these from now on."""
        for pid in pids:
            cgroup = memory_cgroup(pid)
            path = self._file(cgroup) if cgroup else None
            if path is None or cgroup is None or path in self._seen or len(self._seen) >= MAX_CGROUPS:
                continue
            count = _count(path)
            if count is not None:
                self._seen[path], self._names[path] = count, clean(cgroup)

    def claim(self, died_of: int | None) -> bool | None:
        """Whether a process that died of this signal explains a kill that nobody else explains; None: can't be told."""
        if died_of != signal.SIGKILL:
            return False
        self._read()
        cgroup = next((name for name, kills in self.unexplained.items() if kills), None)
        if cgroup is not None:
            self.unexplained[cgroup] -= 1
            return True
        return False if self._seen else None

    def tell_rest(self, send: Send, at_ns: int) -> None:
        """Kills that no traced process explains: of others in the same cgroups."""
        self._read()
        for cgroup, kills in self.unexplained.items():
            if kills:
                body = {"at_ns": at_ns, "proc": None, "pid": None, "name": None}
                send(Kind.OOM, {**body, "kills": kills, "cgroup": cgroup, "ours": True})
        self.unexplained.clear()

    def _read(self) -> None:
        for path, before in list(self._seen.items()):
            count = _count(path)
            if count is None:  # removed with its last process
                del self._seen[path]
            elif count > before:
                self._seen[path] = count
                self.unexplained[self._names[path]] += count - before

    def _file(self, cgroup: str) -> Path | None:
        for mount in self._mounts:
            inside = cgroup.removeprefix(mount.root.rstrip("/")).lstrip("/")
            file = mount.point / inside / ("memory.events" if mount.is_v2 else "memory.oom_control")
            if ".." not in inside.split("/") and file.is_file():
                return file
        return None


def _mounts() -> list[_Mount]:
    """proc_pid_mountinfo(5): fields, " - ", type, source, options of the file system."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        head, _, tail = line.partition(" - ")
        fields, kind = head.split(), tail.split()
        if kind[0] == "cgroup2" or (kind[0] == "cgroup" and "memory" in kind[-1].split(",")):
            found.append(_Mount(Path(fields[4]), fields[3], kind[0] == "cgroup2"))
    return sorted(found, key=lambda mount: mount.is_v2)  # a hybrid host's memory controller is in the old one


def _count(path: Path) -> int | None:
    """The counter oom_kill: of the cgroup and those below it (memory.events), or of it alone (memory.oom_control)."""
    try:
        rows = dict(line.split(" ", 1) for line in path.read_text().splitlines() if " " in line)
        return int(rows["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None

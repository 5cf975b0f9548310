"""Whether a library may be put into a process: found out before anything there is touched."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from stallscope.capture.procfs import live_path, name_of, seccomp_mode
from stallscope.capture.rights import capability_held, read_text, require_traceable
from stallscope.errors import CaptureProblem, PermissionProblem, StallscopeError, TargetProblem
from stallscope.paths import SHIM_INJECT

__all__ = ["require_injectable"]

_ELF_64 = b"\x7fELF\x02"
_BPF = "use --method bpf as root, or start the program under `stallscope run`"
_YAMA = {
    "1": "kernel.yama.ptrace_scope=1 allows it for descendants only",
    "2": "kernel.yama.ptrace_scope=2 allows it with CAP_SYS_PTRACE only",
    "3": "kernel.yama.ptrace_scope=3 allows it to nobody until the next boot",
}


def require_injectable(pid: int, library: Path = SHIM_INJECT, machine: str | None = None) -> None:
    """Everything that is known beforehand to make an injection fail.

    Args:
        machine: another one's, for tests.

    Raises:
        TargetProblem: no such process, or none that the library can be put into.
        PermissionProblem: names the setting or the capability.
        CaptureProblem: there is no library for this machine.
    """
    what = f"cannot inject into pid {pid}"
    require_traceable(pid, what)
    _require_library(what, library, machine or platform.machine())
    try:
        what = f"{what} ({name_of(pid)})"
        path = live_path(pid)
        _require_memory(what, path)
        _require_kind(what, path, library)
        mode = seccomp_mode(pid)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise TargetProblem(what, why="the process has ended", hint="list the processes: ps -e") from error
    if mode != 0:
        raise TargetProblem(
            what, why=f"it has a seccomp filter (Seccomp: {mode} in /proc/{pid}/status), which may kill it for what "
            "loading a library takes", hint=_BPF,
        )  # fmt: skip


def _require_library(what: str, library: Path, machine: str) -> None:
    if machine != "x86_64":
        raise CaptureProblem(what, why=f"it is made for x86-64, and this is {machine}", hint=_BPF)
    if not library.is_file():
        raise CaptureProblem(what, why=f"the library is not built ({library})", hint="run `make build`")


def _require_memory(what: str, path: str) -> None:
    """Opening it for writing asks what ptrace would ask."""
    try:
        os.close(os.open(f"{path}/mem", os.O_RDWR | os.O_CLOEXEC))
    except PermissionError as error:
        raise _denied(what, error) from error


def _denied(what: str, error: OSError) -> StallscopeError:
    scope = read_text("/proc/sys/kernel/yama/ptrace_scope") or "0"
    why = f"the kernel refuses ptrace ({error.strerror})"
    if capability_held("CAP_SYS_PTRACE"):
        why += " although CAP_SYS_PTRACE is there: another user namespace or a security module protects the process"
        return PermissionProblem(what, why=why, hint="see the audit log: ausearch -m avc, or dmesg")
    reason = _YAMA.get(scope, "the process belongs to someone else, or is protected (setuid, prctl PR_SET_DUMPABLE)")
    why = f"{why}: {reason}, and this process lacks CAP_SYS_PTRACE"
    return PermissionProblem(what, why=why, hint="run it as root: sudo stallscope attach ...")


def _require_kind(what: str, path: str, library: Path) -> None:
    with open(f"{path}/exe", "rb") as program:
        if program.read(5) != _ELF_64:
            raise TargetProblem(what, why="it is no 64-bit program", hint=_BPF)
    if "shstk" in _status(path, "x86_Thread_features:"):
        raise TargetProblem(what, why="it uses a shadow stack, on which a borrowed thread can't return", hint=_BPF)
    try:
        there, here = os.stat(f"{path}/root{library}"), os.stat(library)
    except OSError:
        there, here = None, os.stat(library)
    if there is None or (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
        raise TargetProblem(
            what, why=f"it does not see {library}: it has other mounts or another root (a container)",
            hint="run stallscope inside the container, or mount it there under the same path; or use --method bpf",
        )  # fmt: skip


def _status(path: str, field: str) -> list[str]:
    lines = Path(f"{path}/status").read_text(errors="replace").splitlines()
    return next((line.removeprefix(field).split() for line in lines if line.startswith(field)), [])

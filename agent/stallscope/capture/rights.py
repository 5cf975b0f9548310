"""What this process may do, found by trying it, and the words for what is missing.

Errors tell the causes apart: without capabilities bpf() gives EPERM and perf_event_open() EACCES; a seccomp filter or
lockdown gives EPERM from both.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from stallscope.capture.kernel import bpf, perf_event_open
from stallscope.capture.object_loader import MapSpec, create_map, load_program
from stallscope.capture.procfs import live_path
from stallscope.errors import PermissionProblem, StallscopeError, TargetProblem

__all__ = [
    "BPF_LINK_CREATE",
    "CONTAINER_HINT",
    "Refusal",
    "capability_held",
    "container",
    "errno_of",
    "has_uprobe_multi",
    "in_user_namespace",
    "load_probe",
    "lockdown_mode",
    "own_status",
    "permission_problem",
    "read_text",
    "refusal",
    "require_attach_rights",
    "require_readable",
    "require_traceable",
    "try_bpf",
    "try_perf",
    "uprobe_multi_attr",
]

BPF_LINK_CREATE = 28
CONTAINER_HINT = (
    "start the container with --cap-add BPF --cap-add PERFMON --cap-add SYS_PTRACE and a seccomp profile that permits "
    "bpf and perf_event_open (or --privileged)"
)
_UPROBE_MULTI = 48
_KPROBE = 2
_ARRAY = 2
_RETURN_PROBE = 1
_EXIT_0 = bytes.fromhex("b7000000000000009500000000000000")
_PERF_SOFTWARE_DUMMY = struct.pack("<IIQ112x", 1, 128, 9)
_BITS = {
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_RESOURCE": 24,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
}
_LIST = "list the processes: ps -e"
_NOT_INIT = "pid 1 is init: give the pid of the program that uses the GPU"
_AUDIT = "see the audit log: ausearch -m avc, or dmesg"
_FLAGS, _PF_KTHREAD = 6, 0x00200000  # place in /proc/PID/stat after the name; include/linux/sched.h
_DENIALS = (errno.EPERM, errno.EACCES)


class Refusal(NamedTuple):
    """Why the kernel refuses BPF, and what to do."""

    why: str
    hint: str


def errno_of(attempt: Callable[[], int]) -> int:
    """0 where it worked (what it opened is closed again), else the errno."""
    try:
        os.close(attempt())
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def load_probe(code: bytes) -> int:
    """Descriptor of a probe program of these instructions. Raises OSError."""
    return load_program("preflight", code, _KPROBE, _UPROBE_MULTI, b"GPL")


def try_bpf() -> int:
    """errno of creating a map and loading a probe program, 0 where both work."""
    by_map = errno_of(lambda: create_map("preflight", MapSpec(_ARRAY, 4, 4, 1, 0)))
    return by_map or errno_of(lambda: load_probe(_EXIT_0))


def try_perf() -> int:
    """errno of what library discovery opens, 0 where it works: a software event for all processes on one CPU."""
    return errno_of(lambda: perf_event_open(_PERF_SOFTWARE_DUMMY, -1, min(os.sched_getaffinity(0))))


def uprobe_multi_attr(
    prog_fd: int,
    path: ctypes.Array[ctypes.c_char],
    offsets: ctypes.Array[ctypes.c_uint64],
    cookies: ctypes.Array[ctypes.c_uint64],
    pid: int,
    *,
    is_return: bool,
) -> bytes:
    """`union bpf_attr` of BPF_LINK_CREATE; the arrays must live until the call is over. pid 0 = every process."""
    head = struct.pack("<IIII", prog_fd, 0, _UPROBE_MULTI, 0)
    pointers = struct.pack("<QQQQ", ctypes.addressof(path), ctypes.addressof(offsets), 0, ctypes.addressof(cookies))
    return head + pointers + struct.pack("<III4x", len(offsets), _RETURN_PROBE if is_return else 0, pid)


def has_uprobe_multi() -> bool | None:
    """Whether one link can hold many uprobes; None = not permitted to find out."""
    try:
        program = load_probe(_EXIT_0)
    except OSError as error:
        return None if error.errno in _DENIALS else False
    one = (ctypes.c_uint64 * 1)(0)
    # A folder can't be probed: EBADF comes from the code that is looked for, EINVAL from a kernel without it.
    attr = uprobe_multi_attr(program, ctypes.create_string_buffer(b"/"), one, one, 0, is_return=False)
    try:
        return errno_of(lambda: bpf(BPF_LINK_CREATE, attr)) == errno.EBADF
    finally:
        os.close(program)


def read_text(path: str) -> str | None:
    """The file's text without the final newline; None where it can't be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def own_status(field: str) -> str:
    """A field of /proc/self/status, "" where there is none."""
    lines = (read_text("/proc/self/status") or "").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{field}:")), "")


def capability_held(name: str) -> bool:
    """Whether it is effective in this process, or CAP_SYS_ADMIN stands in for it."""
    held = int(own_status("CapEff") or "0", 16)
    stands_in = name in ("CAP_BPF", "CAP_PERFMON") and held >> _BITS["CAP_SYS_ADMIN"] & 1
    return bool(held >> _BITS[name] & 1 or stands_in)


def lockdown_mode() -> str | None:
    """The mode in brackets, e.g. "none"; None where securityfs does not show it."""
    text = read_text("/sys/kernel/security/lockdown")
    return text.partition("[")[2].partition("]")[0] if text else None


def in_user_namespace() -> bool:
    """Whether our ids, and so our capabilities, count in a user namespace only."""
    return (read_text("/proc/self/uid_map") or "0 0 4294967295").split() != ["0", "0", "4294967295"]


def container() -> str | None:
    """What kind of container this process runs in, as far as such things leave traces."""
    if Path("/.dockerenv").exists():
        return "docker"
    if Path("/run/.containerenv").exists():
        return "podman"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    cgroup = read_text("/proc/self/cgroup") or ""
    found = next((word for word in ("kubepods", "docker", "libpod", "containerd", "lxc") if word in cgroup), None)
    return found or os.environ.get("container")  # noqa: SIM112 - systemd writes it in small letters


def _missing_capabilities() -> list[str]:
    return [name for name in ("CAP_BPF", "CAP_PERFMON") if not capability_held(name)]


def _capability_hint() -> str:
    if container():
        return CONTAINER_HINT
    return "run it as root: sudo stallscope ...; or grant CAP_BPF and CAP_PERFMON (systemd: AmbientCapabilities=)"


def _filtered() -> Refusal:
    """EPERM from bpf() and from perf_event_open(): a missing capability would give EACCES from the second."""
    mode = lockdown_mode()
    if own_status("Seccomp") == "2":
        why = "a seccomp filter forbids bpf() and perf_event_open() (both EPERM, Seccomp: 2 in /proc/self/status)"
        return Refusal(why, CONTAINER_HINT)
    if mode not in (None, "none"):
        return Refusal(
            f"kernel lockdown is in mode {mode} (both bpf() and perf_event_open() give EPERM)",
            "boot without lockdown=confidentiality; it can't be switched off at run time",
        )
    return Refusal(
        "bpf() and perf_event_open() both give EPERM with no seccomp filter: kernel lockdown or a security module",
        "see /sys/kernel/security/lockdown and the audit log",
    )


def _unprivileged(lacking: list[str]) -> Refusal:
    settings = []
    if "CAP_BPF" in lacking:
        settings.append(
            f"kernel.unprivileged_bpf_disabled={read_text('/proc/sys/kernel/unprivileged_bpf_disabled') or '?'}"
        )
    if "CAP_PERFMON" in lacking:
        settings.append(f"kernel.perf_event_paranoid={read_text('/proc/sys/kernel/perf_event_paranoid') or '?'}")
    return Refusal(f"this process lacks {' and '.join(lacking)} ({', '.join(settings)})", _capability_hint())


def refusal() -> Refusal | None:
    """Why BPF is not permitted here; None when it is."""
    by_bpf, by_perf = try_bpf(), try_perf()
    if by_bpf not in _DENIALS and by_perf not in _DENIALS:
        return None
    lacking = _missing_capabilities()
    if by_bpf == by_perf == errno.EPERM or (by_bpf == errno.EPERM and not lacking and own_status("Seccomp") == "2"):
        return _filtered()
    if lacking:
        return _unprivileged(lacking)
    if in_user_namespace():
        return Refusal("this process is root in a user namespace only", "run it in the host's user namespace, as root")
    answers = f"bpf: {os.strerror(by_bpf)}, perf_event_open: {os.strerror(by_perf)}"
    return Refusal(
        f"the kernel refuses ({answers}) although the capabilities are there: a security module",
        _AUDIT,
    )


def permission_problem(what: str) -> PermissionProblem:
    """The error for a call that was refused: `what` could not be done, and the cause as found now."""
    found = refusal() or Refusal(
        "the kernel refused it (EPERM), although loading a BPF program is permitted", "stallscope doctor"
    )
    return PermissionProblem(what, why=found.why, hint=found.hint)


def require_attach_rights(pid: int) -> None:
    """Everything that attaching needs, tried before anything is changed.

    Raises:
        TargetProblem: no such process, or none that can make a call.
        PermissionProblem: names the missing capability and the setting.
    """
    what = f"cannot attach to pid {pid}"
    require_traceable(pid, what)
    found = refusal()
    if found:
        raise PermissionProblem(what, why=found.why, hint=found.hint)
    require_readable(pid, what)


def require_readable(pid: int, what: str) -> None:
    """Whether a process can be looked into. Raises TargetProblem, PermissionProblem; `what` could not be done."""
    problem = _unreadable(pid, what)
    if problem:
        raise problem


def require_traceable(pid: int, what: str) -> None:
    """Whether there is such a process, with a program in it. Raises TargetProblem; `what` could not be done."""
    if not Path(f"/proc/{pid}").exists():
        raise TargetProblem(what, why="there is no such process", hint=_LIST)
    # The name stands in brackets and may hold anything; state and flags come after it.
    name, _, rest = (read_text(f"/proc/{pid}/stat") or "").rpartition(")")
    fields = rest.split()
    if len(fields) > _FLAGS and int(fields[_FLAGS]) & _PF_KTHREAD:
        raise TargetProblem(
            f"{what} ({name.partition('(')[2]})", why="it is a kernel thread: no program runs in it", hint=_LIST
        )
    try:
        live_path(pid)
    except ProcessLookupError as error:
        raise TargetProblem(what, why="the process has ended (its parent has not noticed yet)", hint=_LIST) from error
    except OSError:
        return  # whoever needs more than to know that it is there will say what is wrong


def _unreadable(pid: int, what: str) -> StallscopeError | None:
    # Both: on newer kernels CAP_PERFMON alone opens maps, but not the files behind them.
    for name in ("maps", "root"):
        path = f"/proc/{pid}/{name}"
        try:
            path = f"{live_path(pid)}/{name}"
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except (FileNotFoundError, ProcessLookupError):
            return TargetProblem(what, why="the process has ended", hint=_LIST)
        except OSError as error:
            why = f"{path} can't be opened ({error.strerror})"
            if not capability_held("CAP_SYS_PTRACE"):
                why += ": the process belongs to someone else and this process lacks CAP_SYS_PTRACE"
                return PermissionProblem(what, why=why, hint="run it as root: sudo stallscope attach ...")
            why += " although CAP_SYS_PTRACE is there: another user namespace or a security module protects the process"
            return PermissionProblem(what, why=why, hint=_NOT_INIT if pid == 1 else _AUDIT)
    return None

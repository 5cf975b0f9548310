"""The lines of `stallscope doctor`: what this machine offers, what is lost without it, how to get it.

Features are tried, versions not compared: distributions port features back, and containers take rights away.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from stallscope.capture.linkstyle import COOKIE_PROGRAM
from stallscope.capture.object_loader import MapSpec, create_map
from stallscope.capture.procfs import live_path
from stallscope.capture.rights import (
    CONTAINER_HINT,
    capability_held,
    container,
    errno_of,
    has_uprobe_multi,
    in_user_namespace,
    load_probe,
    lockdown_mode,
    own_status,
    read_text,
    require_attach_rights,
    require_traceable,
    try_bpf,
    try_perf,
)
from stallscope.paths import BPF_OBJECT

__all__ = ["CAPABILITIES", "NEEDED", "Check", "preflight", "require_attach_rights", "target_checks", "unusable"]

_RINGBUF = 27
_HOST_PID_NAMESPACE = "pid:[4026531836]"  # fixed in the kernel: PROC_PID_INIT_INO
NEEDED = ("ring buffer", "perf_event_open")
_SUDO = "run as root, or grant the capability"
CAPABILITIES = {
    "CAP_BPF": "no BPF program can be loaded",
    "CAP_PERFMON": "no probe can be attached, no library be seen while it loads",
    "CAP_SYS_PTRACE": "processes of other users can't be traced",
    "CAP_DAC_READ_SEARCH": "libraries in other users' folders can't be opened",
}
NOT_NEEDED = {"CAP_SYS_RESOURCE": "before kernel 5.11 only", "CAP_SYS_ADMIN": "CAP_BPF and CAP_PERFMON suffice"}


class Check(NamedTuple):
    """One line; `state` is "ok", "missing", "unknown", or "not needed" for what is absent and not missed."""

    name: str
    state: str
    detail: str
    what_you_lose: str = ""
    how_to_get_it: str = ""


def _spare(name: str, present: bool, detail: str) -> Check:
    """A line about something that attach can do without."""
    return Check(name, "ok" if present else "not needed", detail)


def _line(name: str, present: bool | None, detail: str, lose: str = "", cure: str = "") -> Check:
    """What is lost is said only where something is missing, or may be."""
    if present:
        return Check(name, "ok", detail)
    return Check(name, "missing" if present is False else "unknown", detail, lose, cure)


def _tried(name: str, error: int, lose: str, since: str) -> Check:
    if error in (errno.EPERM, errno.EACCES):
        return _line(name, None, "not permitted to try", lose, "run doctor as root")
    return _line(name, not error, os.strerror(error) if error else "works", lose, f"kernel {since} or newer")


def _kernel_checks() -> Iterator[Check]:
    yield Check("kernel", "ok", platform.release())
    btf = os.access("/sys/kernel/btf/vmlinux", os.R_OK)
    lose, cure = "children and exit codes are not followed", "a kernel with CONFIG_DEBUG_INFO_BTF"
    yield _line("BTF", btf, "readable" if btf else "no /sys/kernel/btf/vmlinux", lose, cure)
    multi = has_uprobe_multi()
    found = {True: 0, False: errno.EINVAL, None: errno.EPERM}[multi]
    yield _tried(
        "uprobe_multi", found, "few functions can be probed (docs/limits.md), and detaching takes seconds", "6.6"
    )
    ring = errno_of(lambda: create_map("preflight", MapSpec(_RINGBUF, 0, 0, 1 << 16, 0)))
    yield _tried("ring buffer", ring, "nothing can be recorded", "5.8")
    yield _tried(
        "bpf cookie", errno_of(lambda: load_probe(COOKIE_PROGRAM)), "each probe needs a program of its own", "5.15"
    )


def _capability_checks() -> Iterator[Check]:
    for name, lose in CAPABILITIES.items():
        held = capability_held(name)
        yield _line(name, held, "effective" if held else "not effective", lose, _SUDO)
    for name, why in NOT_NEEDED.items():
        held = capability_held(name)
        yield _spare(name, held, "effective" if held else f"not effective ({why})")


def _guard_checks() -> Iterator[Check]:
    by_bpf, by_perf, mode = try_bpf(), try_perf(), own_status("Seccomp")
    both = by_bpf == by_perf == errno.EPERM
    filtered = both and mode == "2"
    yield _line(
        "seccomp", not filtered, f"mode {mode or '?'}", "bpf() and perf_event_open() are forbidden", CONTAINER_HINT
    )
    yield _lockdown_check(both and not filtered)
    works = os.strerror(by_perf) if by_perf else "works"
    yield _line("perf_event_open", not by_perf, works, "libraries that load later are not seen", _SUDO)
    for name in ("perf_event_paranoid", "unprivileged_bpf_disabled", "yama/ptrace_scope"):
        yield Check(name, "ok", read_text(f"/proc/sys/kernel/{name}") or "not there or not readable")


def _lockdown_check(suspected: bool) -> Check:
    mode = lockdown_mode()
    if mode is None and not suspected:
        return Check("lockdown", "ok", "not shown by securityfs, and nothing is refused as it would")
    free = mode != "confidentiality" and not suspected
    detail = mode or "not shown, but EPERM without a filter"
    return _line("lockdown", free, detail, "BPF and perf are refused", "boot without lockdown=confidentiality")


def _place_checks() -> Iterator[Check]:
    yield Check("container", "ok", container() or "no sign of one")
    namespace = str(Path("/proc/self/ns/pid").readlink())
    host = namespace == _HOST_PID_NAMESPACE
    lose, cure = "only processes in this namespace are seen", "start the container with --pid=host"
    yield _line("pid namespace", host, "the host's" if host else namespace, lose, cure)
    if in_user_namespace():
        yield _line("user namespace", False, "not the host's", "capabilities count in here only", "be the host's root")
    traced = any(Path(folder, "events").exists() for folder in ("/sys/kernel/tracing", "/sys/kernel/debug/tracing"))
    yield _spare("tracefs", traced, "mounted" if traced else "not mounted or not readable")


def _backend_checks(object_file: Path) -> Iterator[Check]:
    folder = next((f for f in _bcc_folders() if (f / "bcc" / "__init__.py").exists()), None)
    built = object_file.is_file()
    found = _bcc_version(folder) if folder else "not found"
    if folder or not built:
        yield _line("bcc", folder is not None, found, "no tracing at all", "apt install python3-bpfcc, or make build")
    else:
        yield _spare("bcc", False, "not found (the prebuilt object is used)")
    if built or not folder:
        yield _line(
            "prebuilt object", built, "built" if built else f"no {object_file}", "no tracing at all", "make build"
        )
    else:
        yield _spare("prebuilt object", False, f"no {object_file} (bcc is used)")


def _bcc_version(folder: Path) -> str:
    text = read_text(str(folder / "bcc" / "version.py")) or ""
    found = re.search(r"""['"]([^'"]+)['"]""", text)
    return f"{found[1] if found else 'some version'} in {folder}"


def _bcc_folders() -> Iterator[Path]:
    yield Path("/usr/lib/python3/dist-packages")
    yield from sorted(Path("/usr/lib").glob("python3*/site-packages"))
    with contextlib.suppress(ImportError, ValueError):
        spec = find_spec("bcc")
        if spec and spec.origin:
            yield Path(spec.origin).parent.parent


def preflight(object_file: Path = BPF_OBJECT) -> list[Check]:
    """All checks that need no target; under 50 ms, and nothing stays changed."""
    checks = [*_kernel_checks(), *_capability_checks(), *_guard_checks(), *_place_checks()]
    return [*checks, *_backend_checks(object_file)]


def unusable(checks: list[Check]) -> list[Check]:
    """Those without which nothing can be traced at all."""
    state = {check.name: check.state for check in checks}
    lacking = [c for c in checks if c.name in NEEDED and c.state != "ok"]
    if state["bcc"] != "ok" and state["prebuilt object"] != "ok":
        lacking += [c for c in checks if c.name == "prebuilt object"]
    return lacking


def target_checks(pid: int) -> list[Check]:
    """Whether a process can be looked into. Raises TargetProblem when there is none, or none to trace."""
    require_traceable(pid, f"cannot examine pid {pid}")
    return [
        _readable(pid, "maps", "its libraries can't be found: no attach"),
        _readable(pid, "root", "its libraries can't be opened: no attach"),
        _readable(pid, "mem", "calls under way at the attach are not found"),
    ]


def _readable(pid: int, name: str, lose: str) -> Check:
    path = f"/proc/{pid}/{name}"
    try:
        os.close(os.open(f"{live_path(pid)}/{name}", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return _line(path, False, error.strerror or "", lose, "run as root, or grant CAP_SYS_PTRACE")
    return Check(path, "ok", "readable")

"""What is said when rights are missing: run in child processes that give rights away first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stallscope.capture.preflight import preflight, require_attach_rights, unusable
from stallscope.capture.rights import refusal
from stallscope.errors import TargetProblem

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
ASK = """
import json, os, sys
from stallscope.capture.preflight import require_attach_rights
from stallscope.errors import StallscopeError
try:
    require_attach_rights(int(sys.argv[1]) or os.getpid())
    print(json.dumps(["none", "", "", 0]))
except StallscopeError as error:
    print(json.dumps([type(error).__name__, error.why, error.hint, int(error.exit_code)]))
"""
# A classic BPF program: load the system call's number; EPERM for the two numbers given, else allow.
FILTER = """
import ctypes, os, platform, struct, sys
numbers = {"x86_64": (321, 298), "aarch64": (280, 241)}[platform.machine()]
code = [(0x20, 0, 0, 0)]
for i, number in enumerate(numbers[:int(os.environ["FILTER_CALLS"])]):
    code += [(0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | 1)]
code.append((0x06, 0, 0, 0x7FFF0000))
raw = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *c) for c in code))
program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(raw)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program, 0, 0) == 0
"""


def ask(*prefix: str, script: str = ASK, pid: int = 0, **environment: str) -> tuple[str, str, str, int]:
    """(error type, why, hint, exit code) of require_attach_rights in a child; pid 0 = the child itself."""
    command = [*prefix, sys.executable, "-c", script, str(pid)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "agent"), **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    kind, why, hint, code = json.loads(done.stdout)
    return kind, why, hint, code


@pytest.fixture
def without(needs_root: None, needs_bpf: None, needs_tool: Callable[[str], str]) -> Callable[[str], list[str]]:
    """Gives a command prefix that drops capabilities."""
    capsh, shell = needs_tool("capsh"), 'exec "$0" "$@"'
    return lambda dropped: [capsh, f"--drop={dropped}", "--", "-c", shell]


@pytest.fixture
def nobodys_process(needs_root: None) -> Iterator[int]:
    process = subprocess.Popen(["sleep", "60"], user=NOBODY, group=NOBODY, extra_groups=[])
    yield process.pid
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("dropped", "named", "setting"),
    [
        ("cap_bpf,cap_sys_admin", "CAP_BPF", "kernel.unprivileged_bpf_disabled="),
        ("cap_perfmon,cap_sys_admin", "CAP_PERFMON", "kernel.perf_event_paranoid="),
        ("cap_bpf,cap_perfmon,cap_sys_admin", "CAP_BPF and CAP_PERFMON", "kernel.perf_event_paranoid="),
    ],
)
def test_missing_capability_is_named(
    without: Callable[[str], list[str]], dropped: str, named: str, setting: str
) -> None:
    kind, why, hint, code = ask(*without(dropped))
    assert (kind, code) == ("PermissionProblem", 3)
    assert f"lacks {named} (" in why and setting in why
    assert hint


def test_bpf_and_perfmon_suffice(without: Callable[[str], list[str]]) -> None:
    assert ask(*without("cap_sys_admin,cap_sys_resource"))[0] == "none"


def test_other_users_process_needs_ptrace(without: Callable[[str], list[str]], nobodys_process: int) -> None:
    kind, why, _, code = ask(*without("cap_sys_ptrace"), pid=nobodys_process)
    assert (kind, code) == ("PermissionProblem", 3)
    assert "CAP_SYS_PTRACE" in why and f"/proc/{nobodys_process}/" in why
    assert ask(pid=nobodys_process)[0] == "none"


def test_seccomp_is_told_apart(needs_bpf: None) -> None:
    kind, why, hint, code = ask(script=FILTER + ASK, FILTER_CALLS="2")
    assert (kind, code) == ("PermissionProblem", 3)
    assert "seccomp" in why and "Seccomp: 2" in why
    assert "CAP_" not in why and "seccomp" in hint


def test_seccomp_with_capabilities_missing_too(without: Callable[[str], list[str]]) -> None:
    """As in a container of Docker: the filter has to go before any capability helps."""
    _, why, hint, _ = ask(*without("cap_bpf,cap_perfmon,cap_sys_admin"), script=FILTER + ASK, FILTER_CALLS="2")
    assert "seccomp" in why
    assert "--cap-add BPF" in hint


def test_seccomp_on_bpf_alone(needs_bpf: None) -> None:
    assert "seccomp" in ask(script=FILTER + ASK, FILTER_CALLS="1")[1]


def test_lockdown_is_guessed_only_without_a_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    from stallscope.capture import rights

    monkeypatch.setattr(rights, "try_bpf", lambda: 1)
    monkeypatch.setattr(rights, "try_perf", lambda: 1)
    monkeypatch.setattr(rights, "own_status", lambda field: {"Seccomp": "0", "CapEff": "ffffffffffffffff"}[field])
    monkeypatch.setattr(rights, "lockdown_mode", lambda: "confidentiality")
    found = refusal()
    assert found and "lockdown is in mode confidentiality" in found.why
    monkeypatch.setattr(rights, "lockdown_mode", lambda: None)
    found = refusal()
    assert found and "lockdown or a security module" in found.why


def test_root_of_a_user_namespace(needs_root: None, needs_bpf: None, needs_tool: Callable[[str], str]) -> None:
    unshare = needs_tool("unshare")
    if subprocess.run([unshare, "-Ur", "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    kind, why, _, _ = ask(unshare, "-Ur")
    assert kind == "PermissionProblem" and "user namespace" in why


def test_no_such_process() -> None:
    with pytest.raises(TargetProblem, match="no such process"):
        require_attach_rights(4_190_000)


def test_all_that_is_needed_is_there_and_found_fast(needs_bpf: None, bpf_object: Path) -> None:
    start = time.perf_counter()
    checks = preflight(bpf_object)
    took = time.perf_counter() - start
    assert not unusable(checks)
    assert took < 0.5  # 6 ms on an idle machine
    names = [check.name for check in checks]
    assert len(set(names)) == len(names)
    assert {"kernel", "BTF", "uprobe_multi", "CAP_BPF", "seccomp", "lockdown", "container", "bcc"} <= set(names)


def test_loading_without_rights_names_the_cause(without: Callable[[str], list[str]], bpf_object: Path) -> None:
    """Not bcc's "Failed to compile BPF module", which is what it says when a map may not be created."""
    script = """
import sys
from pathlib import Path
from stallscope.capture.loader import load
from stallscope.errors import PermissionProblem
for backend in ("auto", "bcc", "object"):
    try:
        load(backend, object_file=Path(sys.argv[1]))
    except PermissionProblem as error:
        print(error.why)
"""
    command = [*without("cap_bpf,cap_sys_admin"), sys.executable, "-c", script, str(bpf_object)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "agent")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("lacks CAP_BPF") == 3, done

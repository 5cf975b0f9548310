"""`stallscope doctor` as a person or a script sees it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def doctor(*arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return stallscope("doctor", *arguments, prefix=prefix)


def stallscope(*arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-m", "stallscope.cli.main", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "agent")}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_table_fits_a_terminal(needs_bpf: None) -> None:
    done = doctor()
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in done.stdout
    assert done.returncode in (0, 1) and lines[-1]


def test_json_agrees_with_the_exit_code(needs_bpf: None) -> None:
    done = doctor("--json")
    answer = json.loads(done.stdout)
    assert (answer["attach"] == "possible") == (done.returncode == 0)
    assert answer["target"] is None
    for check in answer["checks"]:
        assert set(check) == {"name", "state", "detail", "what_you_lose", "how_to_get_it"}
        assert check["state"] in ("ok", "missing", "unknown", "not needed")


def test_a_process_with_a_cuda_library(needs_bpf: None, needs_tool: Callable[[str], str], tmp_path: Path) -> None:
    cc, library = needs_tool("cc"), tmp_path / "libcudart.so.12"
    (tmp_path / "empty.c").write_text("int something(void) { return 1; }")
    subprocess.run([cc, "-shared", "-fPIC", "-o", library, tmp_path / "empty.c"], check=True)
    waits = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(1, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", waits, str(library)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"1\n"
        answer = json.loads(doctor("--json", str(process.pid)).stdout)
        assert f"maps CUDART: {library}" in doctor(str(process.pid)).stdout.replace("\n", "")
        process.kill()
    assert answer["target"]["libraries"] == [{"library": "CUDART", "path": str(library)}]
    assert [(check["name"], check["state"]) for check in answer["target"]["checks"][-1:]] == [("shim", "not needed")]
    assert [check["state"] for check in answer["target"]["checks"][:-1]] == ["ok"] * 4


def test_what_would_be_probed(needs_bpf: None) -> None:
    """The same files and numbers as attach reports, and nothing is linked."""
    from harness import TARGETS, Program, Tracer

    with Program([TARGETS / "million", "1", "1", "300"]) as program:
        program.wait_for("ready")
        target = json.loads(doctor("--json", str(program.pid)).stdout)["target"]
        shown = doctor(str(program.pid)).stdout.replace("\n", "")
        with Tracer([program.pid]).attached() as tracer:
            program.say()
            program.truth()
            notes = tracer.report()["capture"]["notes"]
    assert [(file["library"], file["way"]) for file in target["would_probe"]] == [
        ("CUDART", "filtered"), ("CUDA", "filtered")]  # fmt: skip
    for file in target["would_probe"]:
        assert f"{file['path']}: {file['functions']} functions of {file['library']} probed" in notes
        assert 0 < file["timed"] < file["functions"] and len(file["build_id"]) == 40
        assert f"would probe {file['library']} in {file['path']}" in shown
    assert target["cost_per_call_ns"]["source"] == "estimated" and "(estimated" in shown
    assert any(sentence.startswith("NCCL: not in the process") for sentence in target["would_stay_unseen"])


def test_what_would_stay_unseen(needs_bpf: None, needs_tool: Callable[[str], str], tmp_path: Path) -> None:
    """A stripped static program, and a file that only has the runtime's name."""
    from harness import TARGETS, Program

    subprocess.run([needs_tool("strip"), "-o", tmp_path / "app", TARGETS / "forker_static"], check=True)
    (tmp_path / "x.c").write_text("int something(void) { return 1; }")
    library = tmp_path / "libcudart.so.12"
    subprocess.run([needs_tool("cc"), "-shared", "-fPIC", "-o", library, tmp_path / "x.c"], check=True)
    with Program([tmp_path / "app"], env={"LD_PRELOAD": str(library)}) as program:
        program.wait_for("ready")
        target = json.loads(doctor("--json", str(program.pid)).stdout)["target"]
    assert target["would_probe"] == []
    unseen = "\n".join(target["would_stay_unseen"])
    assert f"stripped static runtime in {tmp_path / 'app'}: none of its calls until libcuda is loaded" in unseen
    assert f"{library} looks like CUDART and defines none of its functions" in unseen


def test_not_permitted_is_exit_3(needs_bpf: None, needs_root: None, needs_tool: Callable[[str], str]) -> None:
    drop = (needs_tool("capsh"), "--drop=cap_bpf,cap_sys_admin", "--", "-c", 'exec "$0" "$@"')
    done = doctor("--json", prefix=drop)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["attach"]) == (3, "not permitted")
    assert "CAP_BPF" in answer["why"]
    states = {check["name"]: check["state"] for check in answer["checks"]}
    assert (states["CAP_BPF"], states["CAP_PERFMON"], states["uprobe_multi"]) == ("missing", "ok", "unknown")
    assert "attach is not permitted: this process lacks CAP_BPF" in doctor(prefix=drop).stdout


@pytest.mark.parametrize("capability", ["CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"])
def test_each_capability_has_its_line(
    needs_bpf: None, needs_root: None, needs_tool: Callable[[str], str], capability: str
) -> None:
    drop = (needs_tool("capsh"), f"--drop={capability.lower()}", "--", "-c", 'exec "$0" "$@"')
    checks = {check["name"]: check for check in json.loads(doctor("--json", prefix=drop).stdout)["checks"]}
    assert checks[capability]["state"] == "missing"
    assert checks[capability]["what_you_lose"] and checks[capability]["how_to_get_it"]


def test_no_such_process() -> None:
    done = doctor("4190000")
    assert done.returncode == 1
    assert done.stderr.startswith("stallscope: cannot examine pid 4190000: there is no such process\n  next: ")


def test_a_kernel_thread(needs_root: None) -> None:
    # Always pid 2 where it is visible at all.
    comm = Path("/proc/2/comm")
    if not comm.exists() or comm.read_text() != "kthreadd\n":
        pytest.skip("no kernel thread is visible in this pid namespace")
    for command in ("doctor", "attach"):
        done = stallscope(command, "2")
        assert done.returncode == 1 and done.stdout == ""
        assert "pid 2 (kthreadd): it is a kernel thread" in done.stderr and "next: " in done.stderr


def test_an_ended_process_that_nobody_waited_for() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        done = doctor(str(process.pid))
    assert done.returncode == 1 and "the process has ended" in done.stderr


@pytest.mark.parametrize("columns", [60, 80])
def test_a_narrow_terminal(needs_bpf: None, columns: int) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {**os.environ, "PYTHONPATH": str(ROOT / "agent"), "TERM": "xterm"}
    command = [sys.executable, "-m", "stallscope.cli.main", "doctor", str(os.getpid())]
    with subprocess.Popen(command, env=env, stdout=theirs) as process:
        os.close(theirs)
        text = b""
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while data := os.read(ours, 65536):
                text += data
    os.close(ours)
    assert process.returncode in (0, 1)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text.decode()).splitlines()
    assert len(lines) > 20 and max(map(len, lines)) <= columns
    # What attach does without is not shown as a fault.
    assert b"\x1b[31mmissing" not in text or process.returncode == 1

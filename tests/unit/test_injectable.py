"""What is known beforehand of an injection, and the words for it; places in a process's memory. Nothing is injected."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stallscope.capture import injectable, injection, injectplan, remoteexec
from stallscope.capture.injectable import require_injectable
from stallscope.capture.injectplan import ROOM, NoPlace, find_gap, find_room
from stallscope.capture.procfs import executable_mappings
from stallscope.cli import attachway
from stallscope.errors import CaptureProblem, PermissionProblem, StallscopeError, TargetProblem


def test_another_machine_and_no_library(tmp_path: Path) -> None:
    with pytest.raises(CaptureProblem, match="made for x86-64, and this is aarch64"):
        require_injectable(os.getpid(), machine="aarch64")
    with pytest.raises(CaptureProblem, match="the library is not built"):
        require_injectable(os.getpid(), tmp_path / "none.so", "x86_64")


def test_no_process() -> None:
    with pytest.raises(TargetProblem, match="there is no such process"):
        require_injectable(1 << 30)


@pytest.mark.parametrize(("scope", "words"), [("0", "belongs to someone else"), ("1", "for descendants only"),
                                              ("2", "with CAP_SYS_PTRACE only"), ("3", "to nobody")])  # fmt: skip
def test_what_yama_says(scope: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four parts, the setting by its name."""
    monkeypatch.setattr(injectable, "read_text", lambda path: scope)
    monkeypatch.setattr(injectable, "capability_held", lambda name: False)
    problem = injectable._denied("cannot inject into pid 1 (x)", PermissionError(13, "Permission denied"))
    assert isinstance(problem, PermissionProblem) and problem.exit_code == 3
    assert words in problem.why and "CAP_SYS_PTRACE" in problem.why and problem.hint.startswith("run it as root")


def test_room_and_gap() -> None:
    """Zeros that can be executed, at the end of a mapping; memory that nobody has."""
    mappings = executable_mappings(os.getpid())
    room = find_room(os.getpid(), mappings)
    assert any(m.end - 4096 <= room and room + ROOM <= m.end for m in mappings)
    gaps = {find_gap(os.getpid(), 0x30000) for _ in range(20)}
    assert len(gaps) > 1  # two injectors must not choose the same one
    used = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text(errors="replace").splitlines()]
    for gap in gaps:
        assert gap % 4096 == 0
        assert all(gap + 0x30000 <= int(start, 16) or int(end, 16) <= gap for start, end in used)
    with pytest.raises(NoPlace, match="leaves room for code"):
        find_room(os.getpid(), [])


def test_why_there_is_no_libc() -> None:
    """Only a program without a loader is one that is linked statically."""
    mapping = executable_mappings(os.getpid())[0]
    loader, program = (mapping._replace(path=f"/lib/{name}") for name in ("ld-linux-x86-64.so.2", "program"))
    for mappings, words in (([program], "linked statically"), ([program, loader], "only begun"), ([], "no memory")):
        found = injectplan._no_libc(mappings)
        assert words in str(found) and found.is_for_good == (words == "linked statically")


TRACED = (  # a parent that traces its child and never lets it go on
    "import os, sys, time\npid = os.fork()\nif pid == 0: exec(sys.argv[1])\n"
    "os.waitpid(pid, os.WUNTRACED)\nprint(pid, flush=True)\nsys.stdin.read()\nos.kill(pid, 9)"
)


@pytest.mark.parametrize(("child", "why", "hint"), [
    ("import os; os.kill(os.getpid(), 19)", "are stopped", "kill -CONT"),
    ("import ctypes, os; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), 19)", "tracer has stopped", "tracer"),
])  # fmt: skip
def test_why_no_thread_can_be_asked(child: str, why: str, hint: str) -> None:
    """Each state has its own remedy."""
    words = [sys.executable, "-c", TRACED, child]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        found = injection._why_nobody(int(parent.stdout.readline()))
        parent.stdin.close()
    assert why in found[0] and hint in found[1]
    assert injection._why_nobody(os.getpid())[0] == "no thread of it can be asked"


def test_names_of_what_is_avoided() -> None:
    for name in ("ld-linux-x86-64.so.2", "ld-2.31.so", "ld.so.1"):
        assert injectplan.LOADER.fullmatch(name), name
    for name in ("libjemalloc.so.2", "libtcmalloc_minimal.so.4", "libmimalloc.so.2.1", "libtsan.so.2"):
        assert injectplan.ALLOCATOR.fullmatch(name), name
    assert not injectplan.LOADER.fullmatch("libdl.so.2") and not injectplan.ALLOCATOR.fullmatch("libc.so.6")


def test_the_script_is_python_whatever_the_path() -> None:
    text = remoteexec.script(Path("/a folder/with 'quotes' and %s\\n.so"), "entry", 1 << 40)
    tree = ast.parse(text)
    (call,) = [
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "start_new_thread"
    ]
    assert ast.literal_eval(call.args[1])[:3] == ("/a folder/with 'quotes' and %s\\n.so", "entry", 1 << 40)


def test_auto_says_why_neither_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both reasons, BPF's first; with --method bpf only that."""

    def refuse(pid: int) -> None:
        raise PermissionProblem(f"cannot attach to pid {pid}", why="no CAP_BPF", hint="sudo")

    def no(pid: int) -> None:
        raise TargetProblem(f"cannot inject into pid {pid}", why="a seccomp filter", hint="-")

    monkeypatch.setattr("stallscope.capture.preflight.require_attach_rights", refuse)
    monkeypatch.setattr("stallscope.capture.injectable.require_injectable", no)
    with pytest.raises(PermissionProblem, match="no CAP_BPF; and --method inject: a seccomp filter"):
        attachway.choose("auto", [os.getpid()])
    with pytest.raises(StallscopeError, match=r"no CAP_BPF\n"):
        attachway.choose("bpf", [os.getpid()])
    monkeypatch.setattr("stallscope.capture.injectable.require_injectable", lambda pid: None)
    way = attachway.choose("auto", [os.getpid()])
    assert way.method == "inject" and "BPF can't be used: no CAP_BPF" in way.note

"""How a command is started with the shim in it: what ld.so can be told, what the command gets of us, signals."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stallscope.cli import launch as module
from stallscope.cli.launch import OWN_FAILURE, Command, Preload
from stallscope.errors import CaptureProblem


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "libstallscope.so"
    path.touch()
    return path


def test_nothing_built(tmp_path: Path) -> None:
    with pytest.raises(CaptureProblem, match="the shim is not built") as found:
        Preload("full", tmp_path / "none.so")
    assert "make build" in found.value.hint


def test_the_callers_preload_comes_after_ours(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/a.so /b.so")
    monkeypatch.setenv("STALLSCOPE_SHIM", "dir:/elsewhere")
    preload = Preload("lite", library)
    environment = preload.environment()
    assert environment["LD_PRELOAD"] == f"{library}:/a.so /b.so"
    assert environment["STALLSCOPE_SHIM"] == f"socket:{preload.folder}/segments"
    assert environment["STALLSCOPE_SHIM_MODE"] == "lite"
    assert preload.folder and stat.S_IMODE(preload.folder.stat().st_mode) == 0o700
    preload.close()
    assert not preload.folder.exists()
    monkeypatch.delenv("LD_PRELOAD")
    assert Preload("full", library).environment()["LD_PRELOAD"] == str(library)


@pytest.mark.parametrize("name", ["a folder", "a:folder", "tab\tfolder"])
def test_a_path_that_would_be_split(tmp_path: Path, name: str) -> None:
    """ld.so is told of a link; who outlives us at his next exec needs it still."""
    library = tmp_path / name / "libstallscope.so"
    library.parent.mkdir()
    library.touch()
    preload = Preload("full", library)
    assert preload.folder and preload.preloaded == f"{preload.folder}/libstallscope.so"
    assert Path(preload.preloaded).resolve() == library
    preload.keep = True
    preload.close()
    assert Path(preload.preloaded).exists()
    preload.keep = False
    preload.close()
    assert not Path(preload.preloaded).exists()


def test_a_folder_for_temporary_files_that_would_be_split(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one whose name leaves no room for a socket's."""
    for name in ("with space", "x" * 100):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(module.tempfile, "gettempdir", lambda name=name: str(tmp_path / name))
        preload = Preload("full", library)
        assert preload.handover is not None and preload.folder and preload.folder.parent == Path(module.FOLDERS[0])
        preload.close()


def test_no_folder_at_all(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Segments are looked for then; only a path that needs a link can't be had."""

    def refuse(**_: object) -> str:
        raise OSError("read-only")

    monkeypatch.setattr(module.tempfile, "mkdtemp", refuse)
    preload = Preload("full", library)
    assert preload.handover is None and "STALLSCOPE_SHIM" not in preload.environment()
    preload.close()
    spaced = tmp_path / "a b"
    spaced.mkdir()
    (spaced / "libstallscope.so").touch()
    with pytest.raises(CaptureProblem, match="can't name"):
        Preload("full", spaced / "libstallscope.so")


def test_the_command_has_our_descriptors_and_no_blocked_signals() -> None:
    """A job server's pipe, for one. Ours are close-on-exec."""
    ours, passed = os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(passed, True)
    text = (
        "import os, signal, sys; fds = set(map(int, os.listdir('/proc/self/fd')));"
        f"import resource; limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0];"
        f"blocked = bool(signal.pthread_sigmask(0, []));"
        f"sys.exit((not {{{passed}}} <= fds) + 2 * ({ours} in fds) + 4 * blocked + 8 * (limit != 200))"
    )
    command = Command(
        [sys.executable, "-c", text], dict(os.environ), (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    try:
        command.start()
        command.wait()
    finally:
        command.unblock()
    assert command.exit_code() == 0
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    for fd in (ours, passed):
        os.close(fd)


def test_signals_go_to_the_command() -> None:
    """Those that are sent to us."""
    command = Command(["sleep", "60"], dict(os.environ))
    try:
        command.start()
        assert command.poll() is None
        os.kill(os.getpid(), signal.SIGTERM)
        command.wait()
    finally:
        command.unblock()
    assert command.poll() == signal.SIGTERM and command.exit_code() == 128 + signal.SIGTERM


def test_what_came_after_the_end_is_nobodys() -> None:
    """A signal for a command that has ended does not end us."""
    command = Command(["true"], dict(os.environ))
    command.start()
    command.wait()
    os.kill(os.getpid(), signal.SIGHUP)
    command.unblock()
    command.unblock()
    assert command.exit_code() == 0


@pytest.mark.parametrize(("word", "error"), [
    ("/nonexistent", FileNotFoundError), ("/etc/passwd", PermissionError), ("a\0b", OSError),
])  # fmt: skip
def test_what_is_no_command(word: str, error: type[OSError]) -> None:
    command = Command([word], dict(os.environ))
    with pytest.raises(error):
        command.start()
    command.unblock()
    assert command.pid is None and command.exit_code() == OWN_FAILURE


def test_ctrl_c_reaches_the_command_once(tmp_path: Path) -> None:
    """The terminal sends it to the whole foreground group; a second one would cut short what the first began."""
    pty = pytest.importorskip("pty")
    pid, terminal = pty.fork()
    if not pid:
        text = (
            "import signal, sys, time; from stallscope.cli.launch import Command;"
            "c = Command(['sh', '-c', \"trap 'echo caught' INT; echo ready; sleep 4; sleep 1\"], {}); c.start();"
            "c.wait(); c.unblock(); sys.exit(c.exit_code())"
        )
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job, such as a whole test run, ignores it
        os.execv(sys.executable, [sys.executable, "-c", text])
    said = b""
    while b"ready" not in said:
        said += os.read(terminal, 1000)
    time.sleep(1)
    os.write(terminal, b"\x03")
    with pytest.raises(OSError):  # EIO: nobody has the other end any more
        while True:
            said += os.read(terminal, 1000)
    assert os.waitpid(pid, 0)[1] == 0
    assert said.count(b"caught") == 1
    os.close(terminal)


def test_ignored_signals_stay_ignored() -> None:
    """nohup."""
    text = (
        "import signal, os, sys; from stallscope.cli.launch import Command;"
        "c = Command(['sh', '-c', 'kill -HUP $$; exit 4'], {}); c.start(); os.kill(os.getpid(), signal.SIGHUP);"
        "c.wait(); c.unblock(); sys.exit(c.exit_code())"
    )
    done = subprocess.run(["nohup", sys.executable, "-c", text], capture_output=True, timeout=60)
    assert done.returncode == 4

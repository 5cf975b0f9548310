"""A package that only root can read: what the aggregator needs must be in memory before it becomes nobody."""

from __future__ import annotations

import http.server
import json
import os
import pty
import re
import site
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from daemon_kit import Daemon, fresh_user, job, until
from harness import TARGETS, Program

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("needs_bpf", "needs_root")


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter whose packages, ours included, are all found by way of a folder of mode 0700."""
    private = tmp_path / "private"
    packages = private / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    packages.mkdir(parents=True)
    for folder in site.getsitepackages():
        for entry in Path(folder).iterdir() if Path(folder).is_dir() else ():
            if not entry.name.endswith(".pth") and "editable" not in entry.name:
                (packages / entry.name).symlink_to(entry)
    (packages / "stallscope").symlink_to(ROOT / "agent" / "stallscope")
    (private / "bin").mkdir()
    (private / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    (private / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    private.chmod(0o700)
    return private / "bin" / "python"


def trace(python: Path, *words: str | Path, tty: bool = False) -> tuple[int, str, str]:
    """Attach to a program with launches, waits, NCCL where there is one; exit code, report, talk."""
    with Program([TARGETS / "million", "2000", "20", "300"]) as program:
        program.wait_for("ready")
        ours, theirs = pty.openpty() if tty else os.pipe()
        command = [python, "-m", "stallscope.cli.main", "attach", str(program.pid), "--sample", "1/1", *words]
        tracer = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, text=True)
        os.close(theirs)
        parts: list[bytes] = []
        reader = threading.Thread(target=_drain, args=(ours, parts))
        reader.start()
        assert tracer.stderr is not None
        talk = [tracer.stderr.readline()]
        program.say()
        program.truth()
        talk.append(tracer.stderr.read())
        code = tracer.wait(60)
        reader.join(10)
        os.close(ours)
    return code, b"".join(parts).decode(), "".join(talk)


def _drain(fd: int, parts: list[bytes]) -> None:
    while True:
        try:
            data = os.read(fd, 65536)
        except OSError:  # a terminal whose other end is closed
            return
        if not data:
            return
        parts.append(data)


def test_it_is_private(python: Path) -> None:
    """Else the others prove nothing."""
    find = "import numpy, rich, stallscope; print(numpy.__file__, rich.__file__, stallscope.__file__)"
    found = subprocess.run([python, "-I", "-c", find], capture_output=True, text=True, check=True).stdout.split()
    assert len(found) == 3 and all(name.startswith(str(python.parents[1])) for name in found)
    drop = "import os; os.setuid(65534); import numpy.ma"
    done = subprocess.run([python, "-c", "import numpy;" + drop], capture_output=True, text=True)
    assert done.returncode and "numpy.ma" in done.stderr


@pytest.mark.parametrize("kind", ["json", "plain", "terminal"])
def test_attach_and_report(python: Path, tmp_path: Path, kind: str) -> None:
    words = ["--json"] if kind == "json" else []
    recording = tmp_path / "a.stall"
    code, out, talk = trace(python, "-o", recording, *words, tty=kind == "terminal")
    assert code == 0 and "Traceback" not in talk, talk
    if kind == "json":
        assert {call["api"] for call in json.loads(out)["calls"]} >= {"cudaLaunchKernel", "cudaStreamSynchronize"}
    else:
        assert "where the time went" in out and "Traceback" not in out
    again = subprocess.run(
        [python, "-m", "stallscope.cli.main", "report", recording, *words], capture_output=True, text=True, check=True
    ).stdout
    assert again == out if kind != "terminal" else _plain(again) == _plain(out)


def _plain(text: str) -> str:
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())


@pytest.mark.parametrize("words", [["--json"], []])
def test_everything_a_stream_can_hold(python: Path, tmp_path: Path, words: list[str]) -> None:
    """NCCL, errors, gaps, calls in flight: through the aggregator alone."""
    del tmp_path
    script = f"""
import os, socket, subprocess, sys
sys.path.insert(0, {str(ROOT / "tests" / "unit")!r})
from aggregate_kit import small
ours, theirs = socket.socketpair()
command = [sys.executable, "-I", "-m", "stallscope.cli.aggregator", "--socket-fd", str(theirs.fileno()),
           "--uid", "65534", "--gid", "65534", *{words!r}]
process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
theirs.close()
ours.sendall(b"".join(small().encoded()))
ours.close()
sys.exit(process.wait())
"""
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and "cudaStreamSynchronize" in done.stdout


class _Hook(http.server.BaseHTTPRequestHandler):
    """Keeps what is posted."""

    got: list[dict[str, Any]] = []  # noqa: RUF012 - of the one test that uses it

    def do_POST(self) -> None:
        self.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_hooks_and_metrics_of_a_daemon(python: Path) -> None:
    """Name resolution, HTTP, JSON, a command, the report: all of it after the aggregator has become nobody."""
    _Hook.got.clear()
    with (
        tempfile.TemporaryDirectory(prefix="stallscope-daemon-") as name,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hook) as server,
        socket.socket() as spare,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        spare.bind(("127.0.0.1", 0))
        port = spare.getsockname()[1]
        spare.close()
        folder, user = Path(name), fresh_user()
        (folder / "out").mkdir(mode=0o777)
        (folder / "out").chmod(0o777)
        command = ["/bin/sh", "-c", 'cat > "$0"', str(folder / "out" / "message")]
        settings = f"[incidents]\nwebhook = 'http://localhost:{server.server_address[1]}/x'\ncommand = {command}\n"
        settings += f"[metrics]\nport = {port}\n"
        with Daemon(folder, user, settings, words=[str(python), "-m", "stallscope.cli.main"]) as daemon:
            daemon.start("all")
            daemon.wait_for("watching this node")
            with job(folder, user, "--ranks=2", "--duration=60", "--fault=never:rank=1,step=60"):
                line = daemon.wait_for("incident NOT_ARRIVED rank 1 id ")
                until(lambda: _Hook.got and (folder / "out" / "message").exists(), "messages")
                until(lambda: daemon.ask("status")["aggregate"]["hooks"]["command"].get("sent"), "the command's end")
                assert _Hook.got[0] == json.loads((folder / "out" / "message").read_text())
                assert line.split()[5].removesuffix(":") == _Hook.got[0]["id"]
                assert daemon.ask("report")["incidents"][0]["class"] == "NOT_ARRIVED"
                metrics = until(lambda: _counted(port), "the incident in /metrics")
                assert 'stallscope_notifications_total{hook="webhook",outcome="sent"}' in metrics
            daemon.stop()
            assert "Traceback" not in daemon.lines["all"].rest()
        server.shutdown()


def _counted(port: int) -> str | None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text if 'stallscope_incidents_total{class="NOT_ARRIVED"} 1.0' in text else None

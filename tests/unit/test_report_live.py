"""The aggregating process itself: a socket in, a report and a recording out."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from aggregate_kit import START, Kit, hello, small
from test_output_incidents import SECOND, incident

from stallscope.cli.aggregator import receive
from stallscope.diagnose.follow import Follower
from stallscope.diagnose.incident import Collective, Episode, Incident
from stallscope.output.announce import Announcer
from stallscope.wire.frames import Frame, Kind

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "agent"), "PYTHONIOENCODING": "utf-8"}


def start(*words: str, record: Path | None = None) -> tuple[subprocess.Popen, socket.socket]:
    ours, theirs = socket.socketpair()
    fds, more = [theirs.fileno()], list(words)
    if record is not None:
        fds.append(os.open(record, os.O_WRONLY | os.O_CREAT, 0o600))
        more += ["--record-fd", str(fds[1])]
    process = subprocess.Popen(
        [sys.executable, "-m", "stallscope.cli.aggregator", "--socket-fd", str(fds[0]), *more],
        pass_fds=fds, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV,
    )  # fmt: skip
    theirs.close()
    for fd in fds[1:]:
        os.close(fd)
    return process, ours


def live(data: bytes, *words: str, record: Path | None = None, step: int = 700) -> tuple[int, bytes, bytes]:
    process, sock = start(*words, record=record)
    for i in range(0, len(data), step):
        sock.sendall(data[i : i + step])
    sock.close()
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def report(path: Path, *words: str) -> subprocess.CompletedProcess:
    code = ("import argparse, sys; from stallscope.cli import report as r; p = argparse.ArgumentParser();"
            "r.add_parser(p.add_subparsers()); a = p.parse_args(sys.argv[1:]); sys.exit(a.run(a))")  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", code, "report", str(path), *words], env=ENV, capture_output=True, timeout=30
    )


@pytest.mark.parametrize("words", [("--json",), ()])
def test_live_and_replayed_to_the_byte(tmp_path: Path, words: tuple[str, ...]) -> None:
    path = tmp_path / "a.rec"
    code, out, err = live(b"".join(small().encoded()), *words, record=path)
    again = report(path, *words)
    assert (code, err) == (0, b"") and out
    assert (again.returncode, again.stdout) == (0, out)


@pytest.mark.parametrize("cut", [1, 40, 333])
@pytest.mark.parametrize("words", [("--json",), ()])
def test_live_and_replayed_of_a_killed_capture(tmp_path: Path, cut: int, words: tuple[str, ...]) -> None:
    path = tmp_path / "a.rec"
    code, out, _ = live(b"".join(small().encoded())[:-cut], *words, record=path)
    again = report(path, *words)
    assert code == again.returncode == 0 and again.stdout == out and b"without a farewell" in b" ".join(out.split())
    assert b"is not whole: last whole frame ends at byte" in again.stderr and b"next:" in again.stderr


@pytest.mark.parametrize("bad", [b"\xff" * 32, b"\x01\0\0\0\x06\0\0\0\x80"])
def test_live_and_replayed_of_hostile_bytes(tmp_path: Path, bad: bytes) -> None:
    frames, path = small().encoded(), tmp_path / "a.rec"
    code, out, err = live(b"".join([*frames[:9], bad, *frames[9:]]), "--json", record=path)
    again = report(path, "--json")
    assert code == 0 and again.stdout == out and b"no longer read" in out
    assert b"Traceback" not in err + again.stderr


def test_nothing_captured_says_why() -> None:
    kit = Kit()
    kit.process()
    kit.add(Kind.EXIT, proc=1, at_ns=START + 9, code=0, signal=None)
    code, out, err = live(b"".join(kit.bye().encoded()), "--json")
    text = err.decode()
    assert code == 4 and b'"events": 0' in out
    for word in (
        "pid 4242 (python3)",
        "libcudart.so, libcuda.so, libnccl.so",
        "none was mapped",
        "with code 0",
        "next: ",
    ):
        assert word in text, text
    code, out, err = live(b"", "--json")
    assert code == 4 and out and b"next: " in err and b"Traceback" not in err


def test_a_full_disk_costs_only_the_file() -> None:
    code, out, err = live(b"".join(small().encoded()), "--json", record=Path("/dev/full"))
    assert code == 1 and b'"events": 9' in out
    assert b"the recording /dev/full is incomplete: No space left" in err and b"next: " in err


def _ignored(pid: int) -> int:
    return int(re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1], 16)


def test_signals_do_not_end_it(tmp_path: Path) -> None:
    process, sock = start("--json")
    frames = small().encoded()
    sock.sendall(b"".join(frames[:-1]))
    ignored, deadline = 1 << (signal.SIGTERM - 1), time.monotonic() + 10
    while not _ignored(process.pid) & ignored and time.monotonic() < deadline:
        time.sleep(0.02)  # before that, the signal kills it as it would any Python
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    sock.sendall(frames[-1])
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"") and b'"ended": "duration"' in out


def test_nobody_reads_the_report() -> None:
    process, sock = start("--json")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    sock.sendall(b"".join(small().encoded()))
    sock.close()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1 and err == b""


def test_without_privileges(needs_root: None, tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    code, out, err = live(b"".join(small().encoded()), "--uid", "65534", "--gid", "65534", record=path)
    assert (code, err) == (0, b"") and b"cudaStreamSynchronize" in out
    assert path.stat().st_size > 100


class Alarm:
    """A diagnosis that finds an incident at its third look, and sees it end at the fifth."""

    def __init__(self) -> None:
        self.looks = self.ends = 0
        self.incidents: list[Incident] = []
        self.episodes: list[Episode] = []
        self.collectives: list[Collective] = []

    def step(self) -> None:
        self.looks += 1
        if self.looks == 3:
            self.incidents.append(incident())
        if self.looks == 5:
            self.incidents[0].end_ns, self.incidents[0].outcome = START + 4 * SECOND, "resolved"

    def finish(self) -> None:
        self.ends += 1


def test_incidents_are_told_while_the_capture_runs() -> None:
    kit, follower, err = Kit(), Follower(), io.StringIO()
    for i in range(6):
        kit.add(Kind.TICK, at_ns=START + i)
    *ticks, last = kit.encoded()
    follower.watch = alarm = Alarm()  # type: ignore[assignment]
    ours, theirs = socket.socketpair()
    reader = threading.Thread(target=receive, args=(theirs, follower, None, Announcer(err)))
    reader.start()
    for tick in ticks:
        ours.sendall(tick)
    deadline = time.monotonic() + 10
    while "resolved" not in err.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    told = err.getvalue()
    ours.sendall(last)
    ours.close()
    reader.join(10)
    theirs.close()
    assert [line.split()[0] for line in told.splitlines()] == ["incident", "next:", "incident"]
    assert err.getvalue() == told and (alarm.looks, alarm.ends) == (6, 1)


def test_no_look_after_the_end() -> None:
    follower = Follower()
    follower.watch = alarm = Alarm()  # type: ignore[assignment]
    tick = (Kind.TICK, {"at_ns": START + 1})
    for kind, body in [(Kind.HELLO, hello()), tick, (Kind.BYE, {"at_ns": START + 2, "reason": "x"}), tick]:
        follower.apply(Frame(kind, body))
    assert alarm.looks == 1

"""What a person gets for a wrong pid, missing rights, a file that is there: four parts and the right exit code."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import BACKEND, STALLSCOPE, TARGETS, Program, Tracer

pytestmark = pytest.mark.usefixtures("needs_bpf")


def attach(*words: str | Path | int, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [*prefix, *STALLSCOPE, "attach", *BACKEND, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def unused_pid() -> int:
    """A pid that no process has."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_no_such_process() -> None:
    """Exit 1."""
    pid = unused_pid()
    done = attach(pid)
    assert done.returncode == 1
    assert f"cannot attach to pid {pid}: no such process\n  next: " in done.stderr
    assert done.stdout == ""


def test_nonsense_pid() -> None:
    """Exit 2."""
    for word in ("0", "-1", "x", "99999999999"):
        assert attach(word).returncode == 2


def test_process_without_cuda() -> None:
    """A note at once, waiting, exit 4 and an explanation that names what was looked for."""
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        done = attach(sleeper.pid, "--duration", "0.5")
    finally:
        sleeper.kill()
        sleeper.wait()
    assert done.returncode == 4
    assert "no CUDA in the target yet (looked for libcudart, libcuda, libnccl" in done.stderr
    assert "nothing captured" in done.stderr


def test_process_that_ends_while_attached() -> None:
    """Not an error of ours: a report, or the empty result that says so."""
    sleeper = subprocess.Popen(["sleep", "1.2"])
    try:
        done = attach(sleeper.pid)
    finally:
        sleeper.wait()
    assert done.returncode == 4
    assert "ended" in done.stderr


def test_process_that_ends_during_the_attach() -> None:
    """At any moment of the start: exit 1 (gone before) or 4 (gone in between), never a traceback."""
    for delay in (0.05, 0.2, 0.4, 0.6, 0.8):
        sleeper = subprocess.Popen(["sleep", "60"])
        tracer = subprocess.Popen([*STALLSCOPE, "attach", str(sleeper.pid)], stderr=subprocess.PIPE, text=True)
        time.sleep(delay)
        sleeper.kill()
        sleeper.wait()
        _, errors = tracer.communicate(timeout=30)
        assert tracer.returncode in (1, 4), errors
        assert "Traceback" not in errors


def test_without_rights() -> None:
    """Exit 3, and the capability by name."""
    if not shutil.which("setpriv"):
        pytest.skip("no setpriv")
    nobody = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")  # another user may not read a clone in /root
    with Program([TARGETS / "million", "1", "1", "300"]) as program:
        program.wait_for("ready")
        done = attach(program.pid, prefix=nobody)
    assert done.returncode == 3, done.stderr
    assert "CAP_BPF" in done.stderr
    assert "next:" in done.stderr


def test_what_is_not_built_is_refused() -> None:
    """An option that can't be honoured is exit 2, not silence."""
    for words in (["1", "--method", "ptrace"], ["1", "--force"], ["1", "--duration", "0"]):
        done = attach(*words)
        assert done.returncode == 2, words
    for command in ("top", "hub"):
        done = subprocess.run([*STALLSCOPE, command], capture_output=True, text=True)
        assert done.returncode == 2
        assert "not built yet" in done.stderr


def test_output_is_never_overwritten(tmp_path: Path) -> None:
    """Without --force; with it only a regular file; a link never."""
    there = tmp_path / "there"
    there.write_text("mine")
    link = tmp_path / "link"
    link.symlink_to(there)
    with Program([TARGETS / "million", "100", "1", "300"]) as program:
        program.wait_for("ready")
        for words in ([there], [link], [link, "--force"], [tmp_path, "--force"], ["/dev/null", "--force"]):
            done = attach(program.pid, "--duration", "0.2", "-o", *words)
            assert done.returncode == 1, words
            assert "next:" in done.stderr
        assert there.read_text() == "mine"
        with Tracer([program.pid], "-o", there, "--force").attached() as tracer:
            program.say()
            program.truth()
            tracer.report()
    assert there.read_bytes().startswith(b"STALLSCP")


def test_recording_belongs_to_the_caller_under_sudo(tmp_path: Path) -> None:
    """Opened with the caller's rights: his file, and not in a folder that he may not write."""
    mine = tmp_path / "mine"
    mine.mkdir()
    os.chown(mine, 4242, 4242)
    for part in (tmp_path, *tmp_path.parents[:2]):
        os.chmod(part, 0o755)
    environment = dict(os.environ, SUDO_UID="4242", SUDO_GID="4242")
    with Program([TARGETS / "million", "100", "1", "300"]) as program:
        program.wait_for("ready")
        refused = subprocess.run(
            [*STALLSCOPE, "attach", *BACKEND, str(program.pid), "-o", str(tmp_path / "no")],
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert refused.returncode in (1, 3)
        assert "next:" in refused.stderr
        with Tracer([program.pid], "-o", mine / "x.stall", env={"SUDO_UID": "4242", "SUDO_GID": "4242"}) as tracer:
            tracer.attached()
            program.say()
            program.truth()
            tracer.report()
    info = (mine / "x.stall").stat()
    assert (info.st_uid, info.st_mode & 0o777) == (4242, 0o600)


def test_without_bcc_the_object_is_used() -> None:
    """--backend object is what happens when bcc is missing; same counts."""
    with Program([TARGETS / "million", "2000", "20", "300"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--backend", "object").attached() as tracer:
            program.say()
            program.truth()
            report = tracer.report()
    assert report["calls"]


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def test_aggregator_parser_and_poller_have_no_privileges() -> None:
    """Ids, groups, capabilities, no way back."""
    with Program([TARGETS / "million", "1", "1", "300"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid]).attached() as tracer:
            children = tracer.children()
            assert len(children) == 3
            end = time.monotonic() + 10
            while any(_status(pid)["NoNewPrivs"] != "1" for pid in children):
                assert time.monotonic() < end  # nobody waits for the poller
                time.sleep(0.05)
            for pid in children:
                status = _status(pid)
                assert status["Uid"].split() == ["65534"] * 4
                assert status["Groups"].split() == []
                assert {status[name].strip("0") for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {""}
                assert status["NoNewPrivs"] == "1"


def test_reader_of_the_report_gone() -> None:
    """`attach … | head`: no traceback."""
    with Program([TARGETS / "million", "100", "1", "300"]) as program:
        program.wait_for("ready")
        tracer = subprocess.Popen(
            [*STALLSCOPE, "attach", *BACKEND, str(program.pid)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert tracer.stdout is not None
        tracer.stdout.close()
        time.sleep(1.5)
        program.say()
        program.truth()
        assert tracer.stderr is not None
        errors = tracer.stderr.read()
        tracer.wait(30)
    assert "Traceback" not in errors


def test_interrupted_during_the_start() -> None:
    """Ctrl-C before the probes are in: ends soon, leaves nothing."""
    with Program([TARGETS / "million", "1", "1", "300"]) as program:
        program.wait_for("ready")
        for delay in (0.1, 0.4, 0.7):
            tracer = subprocess.Popen(
                [*STALLSCOPE, "attach", *BACKEND, str(program.pid)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
            time.sleep(delay)
            os.killpg(tracer.pid, signal.SIGINT)
            _, errors = tracer.communicate(timeout=20)
            assert "Traceback" not in errors, errors
            assert tracer.returncode in (4, 130, 0), errors


BROKEN = """
import sys
from stallscope.capture.session import Session
look, looks = Session.look, []
def broken(self):
    looks.append(1)
    if len(looks) > 300:  # counters go out once a second
        raise OSError(12, "Cannot allocate memory")
    look(self)
Session.look = broken
from stallscope.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_what_was_captured_is_reported_when_the_capture_breaks() -> None:
    """An error of the loop: exit 1 and four parts on stderr, and on stdout what came before, as lower bounds."""
    with Program([TARGETS / "million", "100", "10", "60000000"]) as program:
        program.wait_for("ready")
        command = [sys.executable, "-c", BROKEN, "attach", str(program.pid), "--json"]
        tracer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert tracer.stderr is not None
        assert "attached to PID" in tracer.stderr.readline()
        program.say()
        out, errors = tracer.communicate(timeout=60)
    assert tracer.returncode == 1
    assert "the capture ended early: " in errors and "next: " in errors and "Traceback" not in errors
    report = json.loads(out)
    assert report["calls"]
    assert report["capture"]["events_is"] == "lower_bound"


def test_more_processes_than_the_usual_limit_of_files() -> None:
    """The soft limit is the shell's, not ours."""
    with Program([TARGETS / "million", "1", "1", "300"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid]).attached() as tracer:
            limits = Path(f"/proc/{tracer.process.pid}/limits").read_text().splitlines()
            soft, hard = next(line for line in limits if line.startswith("Max open files")).split()[3:5]
    assert soft == hard

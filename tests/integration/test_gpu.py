"""The GPU's testimony on the simulated NVML: jobs that spin, jobs that compute, NVML missing, failing, hanging."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import SIM_LIB, STALLSCOPE, TARGETS, Lines, Program, Tracer
from test_attach_counts import hooked, own

from stallscope.aggregate.state import State
from stallscope.capture.forward import Poller
from stallscope.diagnose.power import power_sentence
from stallscope.poller.sampler import HANGS
from stallscope.wire.frames import FILE_HEADER_BYTES, Decoder

pytestmark = pytest.mark.usefixtures("needs_bpf")
NVML = SIM_LIB / "libnvidia-ml.so.1"
IDLE_W, FULL_W = 65, 400
# `stallscope attach` with a stand-in for NVML: LIBRARY SETTINGS(JSON) WORDS…
ATTACH = """
import argparse, json, sys
from pathlib import Path
from stallscope.capture.forward import StandIn
from stallscope.cli import attach
from stallscope.cli.caller import caller
parser = argparse.ArgumentParser()
attach.add_parser(parser.add_subparsers())
stand_in = StandIn(Path(sys.argv[1]), json.loads(sys.argv[2]))
sys.exit(attach.Attach(parser.parse_args(["attach", *sys.argv[3:]]), caller(), nvml=stand_in).run())
"""


class Watched(Tracer):
    """`attach` with the simulated NVML."""

    def __init__(self, pids: list[int], *options: str | Path, **settings: str) -> None:
        words = [*map(str, pids), "--json", *map(str, options)]
        command = [sys.executable, "-c", ATTACH, str(NVML), json.dumps(settings), *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.errors = Lines(self.process.stderr)


@pytest.fixture
def figures() -> Iterator[str]:
    """A folder for the figures of simulated devices that the poller can read, whoever it becomes."""
    with tempfile.TemporaryDirectory(prefix="stallscope-test-") as folder:
        os.chmod(folder, 0o755)
        yield folder


@contextlib.contextmanager
def job(figures: str, truth: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A simulated job that waits for a line."""
    environment = {**os.environ, "STALLSCOPE_SIM_LIB": str(SIM_LIB), "STALLSCOPE_SIM_STATS": figures}
    command = [sys.executable, "-m", "stallscope.sim.job", "--hold", f"--truth={truth}", *words]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(20)


def replayed(path: Path) -> State:
    """The state that a recording leads to."""
    state = State()
    for frame in Decoder().feed(path.read_bytes()[FILE_HEADER_BYTES:]):
        state.apply(frame)
    assert state.dropped is None and state.complete
    return state


def test_waiting_ranks_spin_and_the_absent_one_is_idle(tmp_path: Path, figures: str) -> None:
    settings = {"STALLSCOPE_SIM_STATS": figures, "STALLSCOPE_SIM_DEVICES": "4"}
    file = tmp_path / "a.stall"
    with (
        job(figures, tmp_path / "truth", "--ranks=4", "--fault=never:rank=2", "--duration=12") as process,
        Watched([process.pid], "-o", file, **settings).attached() as tracer,
    ):
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.close()
        report = tracer.report()
    truth = json.loads((tmp_path / "truth").read_text())
    start, seen = truth["fault"]["start_ns"], truth["seen"]["at_ns"]
    pids = [rank["pid"] for rank in truth["ranks"]]
    assert seen - start > 4e9
    assert power_sentence(replayed(file), pids, start, seen) == (
        f"utilisation 100 %, power {IDLE_W} W of {FULL_W} W on 3 of 4 GPUs: spinning in NCCL, not computing; "
        f"utilisation 0 %, power {IDLE_W} W of {FULL_W} W on 1 of 4 GPUs: idle, no kernel runs"
    )
    assert [row["util_percent"] for row in report["gpu"]] == [100, 100, 0, 100]
    assert {row["power_w"] for row in report["gpu"]} == {float(IDLE_W)}


def test_a_computing_job_does_not_spin(tmp_path: Path, figures: str) -> None:
    """Kernels without a pause, and a wait for them: full power."""
    text = """
import sys
sys.path.insert(0, sys.argv[1])
from cuda_calls import *
rt = Runtime()
rt.memory("cudaMalloc", 1 << 20)
stream = rt.stream()
print("ready", flush=True)
sys.stdin.readline()
rt.launch(stream, 6_000_000_000)
rt.call("cudaStreamSynchronize", stream)
print("{}", flush=True)
"""
    file = tmp_path / "a.stall"
    words = [sys.executable, "-c", text, TARGETS.parents[1] / "tests" / "targets"]
    with Program(words, env={"STALLSCOPE_SIM_STATS": figures}) as program:
        program.wait_for("ready")
        with Watched([program.pid], "-o", file, STALLSCOPE_SIM_STATS=figures).attached() as tracer:
            begin = time.monotonic_ns()
            program.say()
            program.truth()
            end = time.monotonic_ns()
            report = tracer.report()
    said = power_sentence(replayed(file), [program.pid], begin, end)
    assert said == "utilisation 100 %, power 366 W of 400 W on the GPU: computing"
    (row,) = [row for row in report["gpu"] if row["traced"]]
    assert row["index"] == 0 and row["memory_used_bytes"] >= 1 << 20


def test_the_demo_shows_its_gpus() -> None:
    command = [*STALLSCOPE, "demo", "--ranks", "2", "--duration", "5", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [(row["index"], row["traced"]) for row in report["gpu"]] == [(0, True), (1, True)]
    assert all(row["util_percent"] > 10 and row["power_w"] > IDLE_W for row in report["gpu"])
    assert set(report["capture"]["cost"]["processes"]) == {"capture", "parser", "aggregate", "poller"}


@pytest.mark.parametrize(("word", "note"), [
    ("missing", "NVML is not installed (libnvidia-ml.so.1 not found)"), ("fail", "NVML fails: NVML_ERROR_UNKNOWN"),
    ("hang", HANGS), ("", None),
])  # fmt: skip
def test_nvml_in_every_mood_changes_nothing_else(word: str, note: str | None) -> None:
    """Counts are exact, attach and end take no longer, and what could not be learnt is said once."""
    with Program([TARGETS / "million", "2000", "20", "300"]) as program:
        program.wait_for("ready")
        begin = time.monotonic()
        with Watched([program.pid], STALLSCOPE_SIM_NVML=word).attached() as tracer:
            attached = time.monotonic() - begin
            time.sleep(5)  # longer than a call may take before it counts as hung
            program.say()
            truth = program.truth()
            begin = time.monotonic()
            report = tracer.report()
            ended = time.monotonic() - begin
    assert own(report) == hooked(truth["calls"])
    notes = [told for told in report["capture"]["notes"] if "NVML" in told]
    assert notes == ([note] if note else [])
    assert bool(report["gpu"]) == (note is None)
    assert attached < 20 and ended < 10


def test_a_poller_that_is_killed_or_stopped() -> None:
    """The capture goes on; the killed one is a note."""
    for number, told in ((signal.SIGKILL, 1), (signal.SIGSTOP, 0)):
        with Program([TARGETS / "million", "2000", "20", "300"]) as program:
            program.wait_for("ready")
            with Watched([program.pid]).attached() as tracer:
                (poller,) = [pid for pid in tracer.children() if b"poller" in Path(f"/proc/{pid}/cmdline").read_bytes()]
                os.kill(poller, number)
                time.sleep(0.5)
                program.say()
                truth = program.truth()
                report = tracer.report()
        assert own(report) == hooked(truth["calls"])
        assert len([note for note in report["capture"]["notes"] if "the poller process ended" in note]) == told
        assert not Path(f"/proc/{poller}").exists()


def test_ras_is_asked_on_this_host_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """From `Poller.ask` to the frame, through the process; where the port is taken by something else, it says so."""
    try:
        listener = socket.create_server(("127.0.0.1", 28028))
    except OSError:
        pytest.skip("port 28028 is in use")
    ids = (65534, 65534) if os.geteuid() == 0 else (os.getuid(), os.getgid())
    sent: list[tuple[Any, dict[str, Any]]] = []

    class Outbox:
        bulk_ok = True

        def send(self, kind: Any, body: dict[str, Any]) -> None:
            sent.append((kind, body))

    def answer() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(100)
            sock.sendall(b"220 mail.example.org ESMTP\r\n")

    with listener, contextlib.closing(Poller()) as poller:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        poller.start(*ids)
        poller.ask()
        end = time.monotonic() + 20
        while not any("source" in body for _, body in sent) and time.monotonic() < end:
            poller.forward(Outbox(), time.monotonic_ns())  # type: ignore[arg-type]
            time.sleep(0.02)
    (witness,) = [body for _, body in sent if "source" in body]
    assert witness["source"] == "ras"
    assert witness["says"] == (
        "NCCL's RAS service (port 28028) could not be asked: it does not speak the protocol of RAS"
    )

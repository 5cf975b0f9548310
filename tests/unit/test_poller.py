"""The poller process on the simulated NVML: what it says, and that nothing which NVML does delays or keeps it."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stallscope.poller.nvml import Look
from stallscope.poller.sampler import HANGS, Sampler
from stallscope.wire.frames import Decoder, Kind

ROOT = Path(__file__).resolve().parents[2]
SIM = ROOT / "build/sim/lib"
NVML = SIM / "libnvidia-ml.so.1"
NOBODY = 65534
PATIENCE_S = 60  # beside other suites, at the lowest priority
IDS = (NOBODY, NOBODY) if os.geteuid() == 0 else (os.getuid(), os.getgid())
pytestmark = pytest.mark.skipif(IDS[0] == 0, reason="a root without capabilities")


class Poller:
    """The process and the socket that capture holds."""

    def __init__(self, *words: str | Path, **environment: str) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-I", "-m", "stallscope.poller", str(theirs.fileno()), *map(str, (*IDS, *words))]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        self.sock.settimeout(PATIENCE_S)

    def hear(self) -> tuple[int, dict[str, Any]]:
        """(kind, body) of the next packet."""
        (frame,) = Decoder().feed(self.sock.recv(1 << 17))
        return frame.kind, frame.body

    def look(self) -> dict[str, Any]:
        """The next GPU frame."""
        kind, body = self.hear()
        assert kind == Kind.GPU and set(body) == {"at_ns", "note", "devices"}
        return body

    def silent(self, seconds: float) -> bool:
        self.sock.settimeout(seconds)
        try:
            self.sock.recv(1)
        except TimeoutError:
            return True
        finally:
            self.sock.settimeout(PATIENCE_S)
        return False


@contextlib.contextmanager
def poller(*words: str | Path, **environment: str) -> Iterator[Poller]:
    made = Poller(*words, **environment)
    try:
        yield made
    finally:
        made.sock.close()
        try:
            made.process.wait(5)
        finally:
            made.process.kill()
            made.process.wait()


@pytest.fixture
def figures() -> Iterator[str]:
    """A folder that the poller's user can read; pytest's own are for root alone."""
    folder = Path("/tmp") / f"stallscope-test-{os.getpid()}"
    folder.mkdir(mode=0o755)
    yield str(folder)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@contextlib.contextmanager
def program(text: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A process with a simulated runtime `rt` that has said "ready"."""
    head = "import ctypes, sys, time\nfrom cuda_calls import *\nrt = Runtime()\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests/targets"), "STALLSCOPE_SIM_LIB": str(SIM), **env}
    command = [sys.executable, "-c", f"{head}{text}\nprint('ready', flush=True)\nsys.stdin.read()\n"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def row(body: dict[str, Any], index: int = 0) -> list[Any]:
    return next(device for device in body["devices"] if device[0] == index)


# what it says


def test_a_device_at_work_and_one_that_waits(figures: str) -> None:
    text = """
rt.memory("cudaMalloc", 50 << 20)
rt.launch(rt.stream(), 60_000_000_000)
rt.call("cudaSetDevice", 1)
hold = ctypes.c_void_p()
rt.call("stallscope_sim_hold", rt.stream(), ctypes.byref(hold))
"""
    with program(text, STALLSCOPE_SIM_STATS=figures) as job, poller(NVML, STALLSCOPE_SIM_STATS=figures) as one:
        before = time.monotonic_ns()
        bodies = [one.look() for _ in range(3)]
        assert all(set(map(type, body["devices"])) == {list} and body["note"] is None for body in bodies)
        times = [body["at_ns"] for body in bodies]
        assert before - 2e9 < times[0] < times[1] < times[2] <= time.monotonic_ns()
        assert all(0.9e9 < b - a < 4e9 for a, b in itertools.pairwise(times))
        busy, waiting = row(bodies[2]), row(bodies[2], 1)
    assert busy[:3] == [0, "GPU-7374616c-6c73-636f-7065-2d73696d2d00", 100]
    assert 0.8 * 400_000 < busy[3] < 400_000 and busy[4:7] == [400_000, 1410, 1410]
    assert busy[7] >= 50 << 20 and busy[8] == 0 and busy[9] == [job.pid]
    assert waiting[2:6] == [100, 65_000, 400_000, 1410]


def test_throttle_reasons(figures: str) -> None:
    control = Path(figures) / "control"
    control.write_text("nvml.throttle mask=0x44 device=1\n")
    with poller(NVML, STALLSCOPE_SIM_FAULTS=str(control), STALLSCOPE_SIM_STATS=figures) as one:
        body = one.look()
    assert [device[8] & ~1 for device in body["devices"]] == [0, 0x44]


def test_without_nvml() -> None:
    """One frame with a note, then nothing; and it lives on, since RAS may be asked."""
    with poller() as one:
        body = one.look()
        assert body["devices"] == [] and body["note"] == "NVML is not installed (libnvidia-ml.so.1 not found)"
        assert one.silent(2.5) and one.process.poll() is None


@pytest.mark.parametrize(("word", "note"), [
    ("missing", "NVML is not installed (libnvidia-ml.so.1 not found)"), ("fail", "NVML fails: NVML_ERROR_UNKNOWN"),
])  # fmt: skip
def test_nvml_that_fails(word: str, note: str) -> None:
    with poller(NVML, STALLSCOPE_SIM_NVML=word) as one:
        assert one.look()["note"] == note
        assert one.silent(1.5)


def test_nvml_that_fails_for_a_while(figures: str) -> None:
    """All devices fail, then the library is there again."""
    control = Path(figures) / "control"
    control.write_text("")
    with poller(NVML, STALLSCOPE_SIM_FAULTS=str(control), STALLSCOPE_SIM_STATS=figures) as one:
        assert one.look()["note"] is None
        control.write_text("nvml.fail\n")
        body = next(body for _ in range(3) if (body := one.look())["note"])
        assert body["note"] == "NVML: GPU 0: NVML_ERROR_UNKNOWN (and 1 more)"
        assert [device[1:9] for device in body["devices"]] == [[None] * 8] * 2
        assert one.look()["note"] == "NVML fails: NVML_ERROR_UNKNOWN"
        control.write_text("")
        assert one.look()["note"] is None


def test_nvml_that_hangs(figures: str) -> None:
    """From its start; then for a while. The process answers all the time, and ends when it is let go."""
    control = Path(figures) / "control"
    control.write_text("nvml.hang\n")
    with poller(NVML, STALLSCOPE_SIM_FAULTS=str(control), STALLSCOPE_SIM_STATS=figures) as one:
        begin = time.monotonic()
        assert one.look() | {"at_ns": 0} == {"at_ns": 0, "note": HANGS, "devices": []}
        assert 2.5 < time.monotonic() - begin < 9
        assert one.silent(2)
        threads = len(os.listdir(f"/proc/{one.process.pid}/task"))
        assert threads == 2
        control.write_text("")
        assert one.look()["note"] is None
        control.write_text("nvml.hang\n")
        assert next(body for _ in range(4) if (body := one.look())["note"])["note"] == HANGS
        one.sock.close()
        assert one.process.wait(3) == 0


def test_a_hanging_one_can_be_killed() -> None:
    with poller(NVML, STALLSCOPE_SIM_NVML="hang") as one:
        one.look()
        one.process.kill()
        assert one.process.wait(2) == -9


def test_it_waits_for_nobody(figures: str) -> None:
    """A capture that does not read: packets are left out, the process ends at once when it is let go."""
    with poller(NVML, STALLSCOPE_SIM_STATS=figures) as one:
        one.look()
        one.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        time.sleep(3)
        one.sock.close()
        assert one.process.wait(3) == 0


def test_it_has_no_privileges(needs_root: None) -> None:
    with poller() as one:
        one.look()
        lines = Path(f"/proc/{one.process.pid}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert status["Uid"].split() == [str(NOBODY)] * 4 and status["NoNewPrivs"] == "1"
    assert {status[name].strip("0") for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {""}


NOTHING_MORE = """
import socket, sys, threading
import stallscope.poller.__main__
from stallscope.poller import nvml, ras, ras_answer
listener = socket.create_server(("127.0.0.1", 0))
def talk():
    for answer in (b"SERVER PROTOCOL 2\\nOK\\nOK\\n" + b'{"communicators": [{"ranks": [{"pid": 1}]}]}', b"x\\n"):
        sock, _ = listener.accept()
        sock.sendall(answer)
        sock.shutdown(socket.SHUT_WR)
before = set(sys.modules)
nvml.Nvml().look()
threading.Thread(target=talk, daemon=True).start()
port = listener.getsockname()[1]
asker = ras.Asker(port)
for _ in range(2):
    print(asker._hear().says)
listener.close()
assert asker._hear() is None
for answer in ("{", "NCCL version 2.27.3"):
    print(ras_answer.read_answer(answer).says)
print(sorted(set(sys.modules) - before))
"""


@pytest.mark.parametrize("library", [NVML, None])
def test_no_module_is_loaded_once_the_privileges_are_gone(library: Path | None) -> None:
    """The package may lie where only root can read."""
    head = f"import ctypes; ctypes.CDLL({str(library)!r}, mode=ctypes.RTLD_GLOBAL)\n" if library else ""
    command = [sys.executable, "-I", "-c", head + NOTHING_MORE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    answered, refused, *others = done.stdout.splitlines() or [done.stderr, ""]
    assert answered == "NCCL of unknown version: 1 communicator, 1 process; it sees no difference between ranks"
    assert refused.endswith("could not be asked: it does not speak the protocol of RAS")
    assert others == ["NCCL of unknown version; its answer is damaged", "NCCL 2.27.3: 0 communicators", "[]"]


# the thread that may hang


def test_one_thread_however_long_it_hangs() -> None:
    now, calls, gate = [0], [], threading.Event()

    def look() -> Look:
        calls.append(now[0])
        gate.wait(10)
        return Look([[0]], None)

    sampler = Sampler(look, clock=lambda: now[0])
    assert sampler.latest() is None
    sampler.start()
    end = time.monotonic() + 5
    while not calls and time.monotonic() < end:
        time.sleep(0.01)
    now[0] = 3_000_000_000
    assert sampler.latest() is None
    for later in (3_000_000_001, 900_000_000_000):
        now[0] = later
        assert sampler.latest() == (later, Look([], HANGS))
    assert calls == [0]
    gate.set()
    while (latest := sampler.latest()) and latest[1].note and time.monotonic() < end:
        time.sleep(0.01)
    assert latest is not None and latest[1] == Look([[0]], None)


def test_a_look_that_raises_is_told() -> None:
    sampler = Sampler(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    sampler.start()
    end = time.monotonic() + 5
    while (latest := sampler.latest()) is None and time.monotonic() < end:
        time.sleep(0.01)
    assert latest is not None and latest[1].note == (
        "NVML could not be read: ZeroDivisionError: integer division or modulo by zero"
    )

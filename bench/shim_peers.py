"""What others cost on the same stub call: LTTng-UST (two events a call), and bpftrace's latency histogram.

Each is measured in turns with ours, so that whatever slows the machine slows both.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import bpftrace
from driver import Driver
from stub_library import build_libraries, build_program

__all__ = ["Peer", "bpftrace_peer", "lttng_peer"]

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build" / "bench"
SESSION = "stallscope-bench"
Peer = Callable[[int], float]  # ns per call: bare (0), or with the tool on it (1)


def _lttng(*words: str) -> None:
    subprocess.run(["lttng", "--no-sessiond", *words], check=True, capture_output=True)


@contextlib.contextmanager
def _lttng_session() -> Iterator[None]:
    """A flight recorder, as ours is: nobody reads, the oldest is overwritten."""
    folder = tempfile.mkdtemp()
    daemon = subprocess.Popen(["lttng-sessiond", "--quiet"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(50):
            if not subprocess.run(["lttng", "--no-sessiond", "list"], capture_output=True).returncode:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(0.1)
        _lttng("create", SESSION, "--snapshot", "--output", folder)
        _lttng("enable-channel", "--userspace", "--overwrite", "ring")
        _lttng("enable-event", "--userspace", "stallscope_bench:*", "--channel", "ring")
        _lttng("start")
        yield
        _lttng("destroy", SESSION)
    finally:
        daemon.terminate()
        daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def lttng_peer(core: int) -> Iterator[Peer]:
    """Raises RuntimeError when it is not installed, CalledProcessError when it refuses."""
    if not shutil.which("lttng-sessiond") or not any(Path("/usr/include").glob("**/lttng/tracepoint.h")):
        raise RuntimeError("LTTng is not installed (apt install lttng-tools liblttng-ust-dev)")
    out = BUILD / "lttngcall"
    words = ["gcc", "-O2", "-std=gnu11", f"-I{HERE}", str(HERE / "lttngcall.c"), "-o", str(out)]
    subprocess.run([*words, str(BUILD / "libcudart.so.12"), f"-Wl,-rpath,{BUILD}", "-llttng-ust", "-ldl"], check=True)
    with _lttng_session():
        program = subprocess.Popen([str(out), str(core)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert program.stdin is not None and program.stdout is not None
        program.stdout.readline()

        def ns(way: int) -> float:
            assert program.stdin is not None and program.stdout is not None
            program.stdin.write(f"{way} 20000 5\n")
            program.stdin.flush()
            return float(program.stdout.readline())

        yield ns
        program.kill()
        program.wait()


@contextlib.contextmanager
def bpftrace_peer(core: int) -> Iterator[Peer]:
    """Raises RuntimeError when it can't run here."""
    if why := bpftrace.missing() or ("bpftrace needs root" if os.geteuid() else None):
        raise RuntimeError(why)
    libraries = build_libraries(1)
    other = min(os.sched_getaffinity(0))
    with Driver(build_program("driver"), core, libraries) as driver, bpftrace.Bpftrace(driver, libraries[0], 1, other):
        yield lambda way: driver.measure(way, 20000 if not way else 2000, 5)

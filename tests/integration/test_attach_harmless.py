"""Whatever happens to the tracer, the traced program runs on and no breakpoint stays."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from harness import SIM_LIB, TARGETS, Program, Tracer
from test_attach_counts import hooked, own

from stallscope.capture.parser_client import ParserClient
from stallscope.capture.procfs import executable_mappings
from stallscope.wire.hook_table import HOOKS

pytestmark = pytest.mark.usefixtures("needs_bpf")
WORDS = [TARGETS / "million", "600000", "300", "300"]


@pytest.fixture(scope="module")
def places() -> dict[Path, list[tuple[int, bytes]]]:
    """library → (file offset, byte) of every probe point of the simulated stack."""
    found = {}
    with contextlib.closing(ParserClient()) as parser:
        parser.start()
        for name in ("libcudart.so.12", "libcuda.so.1"):
            path = SIM_LIB / name
            data = path.read_bytes()
            with path.open("rb") as file:
                symbols = parser.symbols(file.fileno(), [h.name for h in HOOKS]).symbols
            offsets = {s.probe_offset for s in symbols.values()}
            found[path] = [(offset, data[offset : offset + 1]) for offset in sorted(offsets)]
    return found


def breakpoints(pid: int, places: dict[Path, list[tuple[int, bytes]]]) -> int:
    """How many probe points of the process are not as in the file."""
    changed = 0
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for m in executable_mappings(pid):
            for offset, byte in places.get(Path(m.path), []):
                if m.offset <= offset < m.offset + m.end - m.start:
                    memory.seek(m.start + offset - m.offset)
                    changed += memory.read(1) != byte
    return changed


def named(tracer: Tracer) -> dict[str, int]:
    """Pids of the tracer's processes by what they are."""
    found = {"capture": tracer.process.pid}
    with contextlib.suppress(OSError):
        for pid in tracer.children():
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            for name, mark in (
                ("aggregate", b"aggregator"),
                ("parser", b"stallscope.parser"),
                ("poller", b"stallscope.poller"),
                ("helper", b"bcc_helper"),
            ):
                if mark in words:
                    found[name] = pid
    return found


@pytest.mark.parametrize("turn", range(20))
def test_killed_at_a_random_moment(turn: int, places: dict[Path, list[tuple[int, bytes]]]) -> None:
    """SIGKILL to one of the tracer's processes, under load; then to the rest of them."""
    chance = random.Random(turn)
    victim = ("capture", "aggregate", "parser", "helper", "poller")[turn % 5]
    environment = {"STALLSCOPE_SIM_DRIVER": "exported", "MILLION_LINGER": "1"}
    with Program(WORDS, env=environment) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--sample", "1/2", "--backend", "auto") as tracer:
            program.say()
            time.sleep(chance.uniform(0.05, 1.8))
            pids = named(tracer)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids.get(victim, tracer.process.pid), signal.SIGKILL)
            if victim in ("capture", "aggregate"):
                tracer.process.wait(10)  # a dead aggregator ends the capture, which cleans up
            else:
                time.sleep(chance.uniform(0, 0.3))
                tracer.process.kill()
                tracer.process.wait(10)
            time.sleep(1.0)
            assert breakpoints(program.pid, places) == 0
            check_nothing_left(pids)
        program.say()
        truth = program.truth()
    assert sum(truth["calls"].values()) > 2_400_000


def command_line(pid: int) -> bytes:
    """Empty when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def check_nothing_left(pids: dict[str, int]) -> None:
    """The other processes end by themselves."""
    end = time.monotonic() + 20  # seconds on a full machine
    while left := [line for pid in pids.values() if (line := command_line(pid))]:
        assert time.monotonic() < end, f"still there: {left}"
        time.sleep(0.05)


def test_breakpoints_are_there_while_attached(places: dict[Path, list[tuple[int, bytes]]]) -> None:
    """The check above can fail: while attached it sees them."""
    with Program([TARGETS / "million", "1", "1", "300"]) as program:
        program.wait_for("ready")
        assert breakpoints(program.pid, places) == 0
        with Tracer([program.pid]).attached() as tracer:
            assert breakpoints(program.pid, places) > 100
            tracer.stop()
            tracer.process.wait(10)
        assert breakpoints(program.pid, places) == 0


def test_strangers_have_no_breakpoints(places: dict[Path, list[tuple[int, bytes]]]) -> None:
    """Links are filtered by process: another one that maps the same files is not touched."""
    with Program([TARGETS / "million", "1", "1", "300"]) as one, Program([TARGETS / "million", "1", "1", "300"]) as two:
        one.wait_for("ready")
        two.wait_for("ready")
        with Tracer([one.pid]).attached():
            assert breakpoints(one.pid, places) > 100
            assert breakpoints(two.pid, places) == 0


def test_parser_killed_is_started_again() -> None:
    """The capture goes on; a library that comes after it is still linked."""
    library = SIM_LIB / "libcudart.so.12"
    with Program([TARGETS / "lateload", library, "500", "1000", "100"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid]).attached() as tracer:
            os.kill(named(tracer)["parser"], signal.SIGKILL)
            time.sleep(0.1)
            program.say()
            truth, report = program.truth(), tracer.report()
    assert own(report)["cudaLaunchKernel"] > hooked(truth["calls"])["cudaLaunchKernel"] * 0.5


def test_full_disk_stops_the_recording_and_nothing_else(tmp_path: Path) -> None:
    """1 MiB of tmpfs: target and report are whole, and the report says what the recording is not."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=True)
    try:
        with Program([TARGETS / "million", "50000", "100", "300"]) as program:
            program.wait_for("ready")
            with Tracer([program.pid], "--sample", "1/1", "-o", place / "x.stall").attached() as tracer:
                program.say()
                truth, report = program.truth(), tracer.report(1)  # what was asked for, a recording, is not whole
                errors = tracer.errors.rest()
        assert own(report) == hooked(truth["calls"])
        assert "No space left" in errors
    finally:
        subprocess.run(["umount", str(place)], check=True)

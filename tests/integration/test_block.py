"""What capture does by itself while something does not go on: SUSPECT, HOST and STACK frames, the completion tap."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, Program, Tracer, recorded

from stallscope.wire.frames import FILE_HEADER_BYTES, Decoder, Kind

pytestmark = pytest.mark.usefixtures("needs_bpf")
INJECT = ROOT / "agent/stallscope/sim/job/inject.py"
Body = dict[str, Any]


def frames(path: Path) -> list[tuple[Kind, Body]]:
    """Of a recording, in order."""
    found = Decoder().feed(path.read_bytes()[FILE_HEADER_BYTES:])
    return [(Kind(frame.kind), frame.body) for frame in found]


def of(told: list[tuple[Kind, Body]], kind: Kind, proc: int | None = None) -> list[Body]:
    """Bodies of one kind, of one process."""
    return [body for k, body in told if k == kind and proc in (None, body.get("proc"))]


def suspects(told: list[tuple[Kind, Body]]) -> list[Body]:
    """Stacks that a block asked for, not those of the rounds through all threads."""
    return [body for body in of(told, Kind.STACK) if "round_ns" not in body]


def line_of(words: str) -> int:
    """Number of the one line of the injector that holds these words."""
    (found,) = [n for n, line in enumerate(INJECT.read_text().splitlines(), 1) if words in line]
    return found


def proc_of_rank(told: list[tuple[Kind, Body]], rank: int) -> int:
    """Key of a rank's process: a child has its parent's environment until it execs."""
    told_of = [*of(told, Kind.PROCESS), *of(told, Kind.IMAGE)]
    (found,) = {int(b["proc"]) for b in told_of if b["env"].get("RANK") == str(rank)}
    return found


def wait_until_quiet(launcher: int, ranks: int) -> None:
    """Until its ranks have loaded NCCL and none of them has used the processor for 2 s."""
    end, since, last = time.monotonic() + 60, time.monotonic(), -1
    while time.monotonic() < end and time.monotonic() - since < 2:
        time.sleep(0.1)
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        loaded = [pid for pid in children if "libnccl" in Path(f"/proc/{pid}/maps").read_text()]
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in loaded]
        used = sum(int(fields[11]) + int(fields[12]) for fields in stats)
        if used != last or len(loaded) < ranks:
            since, last = time.monotonic(), used


class Job:
    """The simulated job from its first call on, recorded."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.recording, self._truth = folder / "job.rec", folder / "truth.json"
        words = [
            sys.executable,
            "-I",
            "-m",
            "stallscope.sim.job",
            "--hold",
            "--load-time=0.5",
            f"--truth={self._truth}",
        ]
        self.program = Program([*words, *options])
        self.tracer = Tracer([self.program.pid], "-o", self.recording)

    def run(self) -> None:
        """Let it go, until both have ended."""
        with self.program, self.tracer:
            self.tracer.attached()
            self.program.say()
            self.tracer.report()
        self.told = frames(self.recording)
        self.truth = json.loads(self._truth.read_text())

    def proc(self, rank: int) -> int:
        """Key of a rank's process."""
        return proc_of_rank(self.told, rank)


@pytest.mark.parametrize(
    ("fault", "ahead", "syscall", "file", "words"),
    [
        ("never:rank=1,step=10", 0, "clock_nanosleep", None, "time.sleep(seconds)"),
        ("io:rank=1,step=10", 100, "read", "/batches", "os.read(file, 1)"),
    ],
)
def test_who_is_outside_is_seen(
    tmp_path: Path, fault: str, ahead: int, syscall: str, file: str | None, words: str
) -> None:
    """The others wait; of the one at fault the system call, the file and the Python line are told."""
    job = Job(tmp_path, "--ranks=3", "--dp=3", f"--fault={fault}", f"--ahead={ahead}", "--duration=8")
    job.run()
    (start, *_), began_ns = of(job.told, Kind.SUSPECT), job.truth["fault"]["start_ns"]
    assert start["on"]
    assert began_ns - 5e8 < start["since_ns"] < began_ns + 5e8
    assert 1e9 < start["at_ns"] - start["since_ns"] < 2e9
    culprit = job.proc(1)
    looks = [b for b in of(job.told, Kind.HOST, culprit) if b["at_ns"] < start["since_ns"] + 4.9e9]
    ages = [round((b["at_ns"] - start["since_ns"]) / 1e9) for b in looks]
    assert ages == [1, 2, 4]
    for look in looks:
        tid, name, state, called, wchan, held, cpu_ns = look["threads"][0]
        assert (tid, state, called) == (job.truth["ranks"][1]["pid"], "S", syscall)
        assert name and wchan and cpu_ns > 0
        assert held is None if file is None else held.endswith(file)
    assert [len(of(job.told, Kind.HOST, job.proc(rank))) for rank in (0, 2)] == [
        len(of(job.told, Kind.HOST, culprit))
    ] * 2
    stacks = [b for b in suspects(job.told) if b["at_ns"] < start["since_ns"] + 4.9e9]
    assert [b["proc"] for b in stacks] == [culprit] * 2
    for stack in stacks:
        assert (stack["why"], stack["by"], stack["tid"]) == (None, "memory", job.truth["ranks"][1]["pid"])
        path, line, function, _kind = next(frame for frame in stack["frames"] if frame[3] == "python")
        assert (path, line) == (str(INJECT), line_of(words))
        assert function.startswith("Injector.")


def test_a_death_is_told_at_once(tmp_path: Path) -> None:
    """The stream has it before the next tick; the others' wait for the dead one is a block."""
    job = Job(tmp_path, "--ranks=2", "--fault=die:rank=1,step=10", "--duration=5")
    seen: dict[int, int] = {}

    def follow() -> None:
        decoder, at = Decoder(), FILE_HEADER_BYTES
        while not seen and job.program.process.poll() is None:
            data = job.recording.read_bytes()[at:] if job.recording.exists() else b""
            at += len(data)
            for frame in decoder.feed(data):
                if frame.kind == Kind.EXIT:
                    seen[frame.body["proc"]] = time.monotonic_ns()
            time.sleep(0.005)

    follower = threading.Thread(target=follow)
    follower.start()
    job.run()
    follower.join()
    culprit = job.proc(1)
    assert list(seen) == [culprit]
    late_ns = seen[culprit] - job.truth["fault"]["start_ns"]
    print(f"a death was in the recording after {late_ns / 1e6:.0f} ms")
    assert late_ns < 0.25e9
    (end,) = of(job.told, Kind.EXIT, culprit)
    assert end["signal"] == 9
    (start, *_) = of(job.told, Kind.SUSPECT)
    assert start["on"] and start["at_ns"] > end["at_ns"]
    assert not of(job.told, Kind.HOST, culprit)
    assert of(job.told, Kind.HOST, job.proc(0))


def test_attached_to_a_block(tmp_path: Path) -> None:
    """No call returns any more: the calls found on the stacks are the block, looked at right after the attach."""
    words = [sys.executable, "-I", "-m", "stallscope.sim.job", "--fault=never:rank=1,step=5", "--ranks=2"]
    with Program([*words, "--duration=200"]) as program:
        wait_until_quiet(program.pid, ranks=2)
        recording = tmp_path / "late.rec"
        with Tracer([program.pid], "-o", recording, "--duration", "3").attached() as tracer:
            tracer.report()
    told = frames(recording)
    (found, *_) = of(told, Kind.INFERRED)
    (start,) = of(told, Kind.SUSPECT)
    assert start["on"] and start["since_ns"] == found["since_ns"]
    assert start["at_ns"] - found["since_ns"] < 0.9e9
    culprit = proc_of_rank(told, 1)
    looks = of(told, Kind.HOST, culprit)
    assert looks[0]["at_ns"] - start["at_ns"] < 0.3e9 and len(looks) >= 2
    assert all(look["threads"][0][3] == "clock_nanosleep" for look in looks)
    assert all(look["calls"] == 0 for look in looks)
    assert {b["proc"] for b in suspects(told)} == {culprit}
    frame = next(f for f in suspects(told)[0]["frames"] if f[3] == "python")
    assert frame[1] == line_of("time.sleep(seconds)")


def test_a_healthy_job_is_left_alone(tmp_path: Path) -> None:
    """No frame of a block; ticks four times a second, counters once."""
    job = Job(tmp_path, "--ranks=2", "--duration=5")
    job.run()
    # On a busy machine a rank may really wait so long; each such wait may have been a block, and nothing else.
    waited = sum(int((rows["dur_ns"] >= 900_000_000).sum()) for rows in recorded(job.recording).values())
    assert sum(b["on"] for b in of(job.told, Kind.SUSPECT)) <= waited
    assert waited or not [kind for kind, _ in job.told if kind in (Kind.HOST, Kind.STACK)]
    ticks = [b["at_ns"] for b in of(job.told, Kind.TICK)]
    seconds = (ticks[-1] - ticks[0]) / 1e9
    assert 2 * seconds < len(ticks) <= 4 * seconds + 2
    costs = of(job.told, Kind.COST)
    assert 0.6 * seconds < len(costs) <= seconds + 3


def test_a_checkpoint_shows_what_is_written(tmp_path: Path) -> None:
    """The others wait while rank 0 writes: by how much its file grew since the last look."""
    job = Job(tmp_path, "--ranks=2", "--checkpoint-every=1", "--checkpoint-write=3.5", "--duration=3")
    job.run()
    first, last = of(job.told, Kind.SUSPECT)[:2]
    assert (first["on"], last["on"]) == (True, False)
    assert first["since_ns"] == last["since_ns"]
    looks = of(job.told, Kind.HOST, job.proc(0))
    written = [look["writing"] for look in looks if look["writing"]]
    assert written
    for path, size in written:
        assert Path(path).name.startswith("checkpoint-") and 0 < size <= 4 << 20
    assert not any(look["writing"] for look in of(job.told, Kind.HOST, job.proc(1)))
    stacks = of(job.told, Kind.STACK, job.proc(0))
    assert any(frame[2].endswith("_write_checkpoint") for stack in stacks for frame in stack["frames"])


def test_the_tap_is_open_while_it_lasts(tmp_path: Path) -> None:
    """Every query in a block is recorded, one in 100000 outside of it; pending is no error."""
    recording = tmp_path / "tap.rec"
    states: set[str] = set()
    with Program([sys.executable, ROOT / "tests/targets/watchdog.py", "3", "1.5"]) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "-o", recording, "--sample", "1/100000").attached() as tracer:
            program.say()
            end = time.monotonic() + 4
            while time.monotonic() < end:
                for task in Path(f"/proc/{program.pid}/task").iterdir():
                    states.add((task / "stat").read_text().rpartition(")")[2].split()[0])
                time.sleep(0.002)
            truth, report = program.truth(), tracer.report()
    assert states <= set("RSD"), "the target was stopped"
    begin, end_ = of(frames(recording), Kind.SUSPECT)
    assert (begin["on"], end_["on"]) == (True, False)
    queries = recorded(recording)["cudaEventQuery"]
    entered = sorted(int(ts) for ts in queries["ts_ns"])
    # On a busy machine the rate changes a moment after it is told; at both edges one of program and probe may be inside.
    asked = [ns for ns in truth["asked"] if begin["at_ns"] + 2e8 < ns < end_["at_ns"] - 2e8]
    inside = [ns for ns in entered if begin["at_ns"] + 2e8 < ns < end_["at_ns"] - 2e8]
    assert len(asked) > 100 and abs(len(inside) - len(asked)) <= 2
    long_ones = queries["dur_ns"] >= 200_000
    outside = [ns for ns, slow in zip(queries["ts_ns"], long_ones, strict=True)
               if not slow and not begin["at_ns"] - 5e7 < ns < end_["at_ns"] + 2e8]  # fmt: skip
    assert len(outside) <= 2
    (call,) = [c for c in report["calls"] if c["api"] == "cudaEventQuery"]
    assert call["count"] == len(truth["asked"]) and call["errors"] == 0
    assert 600 in truth["results"] and 600 in queries["status"]

"""How processes end: code, signal, sender, want of memory, and the time that tidying up takes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, STALLSCOPE, Program, Tracer
from run_kit import Running, environment

from stallscope.wire.frames import FILE_HEADER_BYTES, Decoder, Kind

DEATHS = ROOT / "tests" / "targets" / "deaths.py"
FATES = ("exit7", "clean", "atexit", "segv", "abort", "killed", "termed", "handled")
CODES = {
    "exit7": (7, None), "clean": (0, None), "atexit": (0, None), "segv": (None, signal.SIGSEGV),
    "abort": (None, signal.SIGABRT), "killed": (None, signal.SIGKILL), "termed": (None, signal.SIGTERM),
    "handled": (3, None),
}  # fmt: skip
LIMIT = 96 << 20


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup with little memory, removed after."""
    if os.geteuid():
        pytest.skip("making a cgroup takes root")
    name = f"stallscope-test-{os.getpid()}"
    found = _make_v1(name) or _make_v2(name)
    if found is None:
        pytest.skip("no cgroup hierarchy with a memory controller that may be written")
    yield found
    for _ in range(50):
        with contextlib.suppress(OSError):
            found.rmdir()
            return
        time.sleep(0.1)
    raise AssertionError(f"{found} can't be removed: {(found / 'cgroup.procs').read_text()}")


def _make_v1(name: str) -> Path | None:
    folder = Path("/sys/fs/cgroup/memory") / name
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(LIMIT))
    except OSError:
        return None
    return folder


def _make_v2(name: str) -> Path | None:
    root = Path("/sys/fs/cgroup")
    folder = root / name
    try:
        if "memory" not in (root / "cgroup.subtree_control").read_text().split():
            (root / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
        (folder / "memory.max").write_text(str(LIMIT))
        (folder / "memory.swap.max").write_text("0")
    except OSError:
        return None
    return folder


def ready(line: str) -> dict[str, int]:
    found: dict[str, int] = json.loads(line.removeprefix("ready"))
    return found


def hello_of(recording: Path) -> dict[str, Any]:
    frames = Decoder().feed(recording.read_bytes()[FILE_HEADER_BYTES:])
    return next(frame.body for frame in frames if frame.kind == Kind.HELLO)


def check_senders(rows: dict[int, dict[str, Any]], pids: dict[str, int]) -> None:
    trainer = rows[pids["trainer"]]
    for fate, number in (("killed", signal.SIGKILL), ("termed", signal.SIGTERM), ("handled", signal.SIGTERM)):
        sender = rows[pids[fate]]["exit"]["sender"]
        assert (sender["proc"], sender["pid"], sender["signal"]) == (trainer["proc"], trainer["pid"], number), fate
        assert sender["name"] == trainer["name"]
    segv, abort = (rows[pids[fate]]["exit"]["sender"] for fate in ("segv", "abort"))
    assert (segv["proc"], segv["pid"], segv["name"]) == (None, None, "kernel")
    assert abort["pid"] == pids["abort"] and abort["proc"] == rows[pids["abort"]]["proc"]
    assert all(rows[pids[fate]]["exit"]["sender"] is None for fate in ("exit7", "clean", "atexit"))


def test_each_end_has_its_cause(needs_bpf: None, tmp_path: Path) -> None:
    recording = tmp_path / "ends.stall"
    with Program([sys.executable, DEATHS, *FATES]) as program:
        pids = ready(program.wait_for("ready"))
        with Tracer([program.pid], "-o", recording) as tracer:
            tracer.attached()
            time.sleep(1)
            program.say()
            tidied_ns = int(program.wait_for("tidy").split()[1])
            program.wait_for("over")
            program.say("end")
            report = tracer.report()
    rows = {p["pid"]: p for p in report["processes"]}
    ends = {fate: rows[pids[fate]]["exit"] for fate in FATES}
    assert {fate: (end["code"], end["signal"]) for fate, end in ends.items()} == CODES
    check_senders(rows, pids)
    assert all(end["oom"] is False for end in ends.values())
    # Its end took 2.0 s and what the machine made of the rest: the handler itself says when it began.
    took_ns = ends["atexit"]["at_ns"] + hello_of(recording)["start_mono_ns"] - tidied_ns
    assert took_ns >= 2e9 and abs(ends["atexit"]["exiting_ns"] - took_ns) < 1e8, (ends["atexit"], took_ns)
    assert ends["clean"]["exiting_ns"] < 1e9
    handled = ends["handled"]
    assert abs(handled["at_ns"] - handled["sender"]["at_ns"] - 5e8) < 3e8
    text = subprocess.run([*STALLSCOPE, "report", recording], capture_output=True, text=True, check=True).stdout
    assert f"SIGTERM from {rows[pids['trainer']]['name']} (pid {program.pid})" in text
    assert f"exit code 0, {ends['atexit']['exiting_ns'] / 1e9:.1f} s after it began to end" in text


def test_out_of_memory(needs_bpf: None, cgroup: Path) -> None:
    with Program([sys.executable, DEATHS, "oom", "clean"], env={"OOM_CGROUP": str(cgroup)}) as program:
        pids = ready(program.wait_for("ready"))
        with Tracer([program.pid]) as tracer:
            tracer.attached()
            program.say()
            program.wait_for("over")
            program.say("end")
            report = tracer.report()
    rows = {p["pid"]: p for p in report["processes"]}
    end = rows[pids["oom"]]["exit"]
    assert (end["signal"], end["oom"], "oom_is" in end) == (signal.SIGKILL, True, False)
    assert end["sender"]["name"] == "kernel"
    assert rows[pids["clean"]]["exit"]["oom"] is False


def test_another_process_of_the_cgroup_runs_out_of_memory(needs_bpf: None, cgroup: Path) -> None:
    """A trace collector, say: it is not traced, and its death is told."""
    hungry = "import sys; sys.path.insert(0, sys.argv[1]); import deaths; sys.stdin.readline(); deaths.run_out()"
    stays = f"open({str(cgroup / 'cgroup.procs')!r}, 'w').write('0'); input('here\\n')"
    with Program([sys.executable, "-c", stays]) as traced, Tracer([traced.pid]) as tracer:
        traced.wait_for("here")
        tracer.attached()
        env = dict(os.environ, OOM_CGROUP=str(cgroup))
        other = subprocess.Popen(
            [sys.executable, "-c", hungry, str(DEATHS.parent)], stdin=subprocess.PIPE, text=True, env=env
        )
        time.sleep(0.5)
        other.communicate("go\n", timeout=30)
        assert other.returncode == -signal.SIGKILL
        time.sleep(0.5)
        tracer.stop()
        report = tracer.report(4)
    told = [note for note in report["capture"]["notes"] if "for want of memory" in note]
    assert len(told) == 1 and f"(pid {other.pid})" in told[0] and told[0].endswith("it is not traced"), told


LOST = ("exit7", "late7", "segv", "killed", "termed", "fork", "oom")


def check_lost(report: dict[str, Any], jobs: dict[str, list[int]]) -> dict[str, str]:
    """WORKER_DIED, once for each job, within 5 s of the death; fate → how the summary says that the worker died."""
    rows = {p["pid"]: p for p in report["processes"]}
    told = {incident["victims"][0]["pid"]: incident for incident in report["incidents"]}
    assert sorted(told) == sorted(trainer for trainer, _ in jobs.values()) and len(report["incidents"]) == len(jobs)
    causes = {}
    for fate, (trainer, worker) in jobs.items():
        incident = told[trainer]
        assert (incident["class"], incident["outcome"]) == ("WORKER_DIED", "died"), fate  # the trainer, in the end
        assert [c["pid"] for c in incident["culprits"]] == [worker] and len(incident["victims"]) == 1
        assert incident["reported_ns"] - rows[worker]["exit"]["at_ns"] < 5e9, fate
        causes[fate] = incident["summary"].partition(f"pid {worker} (")[2].partition(");")[0]
    return causes


def test_trainers_that_wait_for_dead_workers(needs_bpf: None, cgroup: Path) -> None:
    with Program([sys.executable, DEATHS.parent / "losers.py", *LOST], env={"OOM_CGROUP": str(cgroup)}) as program:
        jobs = ready_jobs(program.wait_for("ready"))
        with Tracer([program.pid]) as tracer:
            tracer.attached()
            time.sleep(1)
            program.say()
            for number in range(len(jobs)):
                tracer.errors.wait_for(f"incident {number + 1}", 30)
            program.say("end")
            report = tracer.report()
    rows = {p["pid"]: p for p in report["processes"]}
    by = {fate: f"from {rows[trainer]['name']} (pid {trainer})" for fate, (trainer, _) in jobs.items()}
    assert check_lost(report, jobs) == {
        "exit7": "exit code 7", "late7": "exit code 7", "segv": "SIGSEGV, sent by the kernel",
        "oom": "SIGKILL: the kernel ended it for want of memory", "killed": f"SIGKILL {by['killed']}",
        "termed": f"SIGTERM {by['termed']}", "fork": f"SIGKILL {by['fork']}",
    }  # fmt: skip


def ready_jobs(line: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = json.loads(line.removeprefix("ready"))
    return found


def test_run() -> None:
    """Without privileges the sender is not known, and the report says so."""
    fates = ("exit7", "killed", "termed")
    with Running([sys.executable, str(DEATHS), *fates], "--json", env=environment()) as running:
        pids = ready(running.lines.wait_for("ready"))
        time.sleep(1.5)  # who made no CUDA call is found by a look a second
        running.say()
        running.lines.wait_for("over")
        running.say("end")
        text = running.lines.rest()
    report = json.loads(text[text.index('{\n "schema"') :])
    rows = {p["pid"]: p for p in report["processes"]}
    for fate in fates:
        end = rows[pids[fate]]["exit"]
        assert (end["code"], end["signal"]) in (CODES[fate], (None, None))  # kernels before 6.15 tell the parent alone
        assert end["sender"] is None and end["exiting_ns"] is None and end["oom"] in (False, None)
    assert any("whose sender is not known: that takes BPF" in note for note in report["capture"]["notes"])


def test_run_with_dead_workers(cgroup: Path) -> None:
    """Under `run` each is told, too; of its cause what is known without privileges."""
    env = environment(OOM_CGROUP=str(cgroup))
    with Running([sys.executable, str(DEATHS.parent / "losers.py"), *LOST], "--json", env=env) as running:
        jobs = ready_jobs(running.lines.wait_for("ready"))
        time.sleep(1.5)
        running.say()
        for number in range(len(jobs)):
            running.errors.wait_for(f"incident {number + 1}", 30)
        running.say("end")
        text = running.lines.rest()
    causes = check_lost(json.loads(text[text.index('{\n "schema"') :]), jobs)
    allowed = {"exit7": "exit code 7", "late7": "exit code 7", "segv": "SIGSEGV", "killed": "SIGKILL", "termed": "SIGTERM",
               "fork": "SIGKILL", "oom": "SIGKILL: the kernel ended it for want of memory"}  # fmt: skip
    assert all(causes[fate] in (allowed[fate], "exit code not known") for fate in LOST), causes

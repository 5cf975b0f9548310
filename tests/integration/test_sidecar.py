"""`stallscope sidecar` on this machine: late, restarted, several trainers, ends of every kind; no privileges."""

from __future__ import annotations

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
from harness import TARGETS, balance
from sidecar_kit import GROUP, Process, Sidecar, installed, preloaded, volume
from test_attach_counts import hooked, own

MILLION = [TARGETS / "million", "500", "20", "300"]
CHILD = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]  # a pid namespace of its own


@pytest.fixture
def folder() -> Iterator[Path]:
    with volume() as found:
        yield found


def trainer(folder: Path, *, before: list[str] | None = None, **env: str) -> Process:
    return Process([*(before or []), *MILLION], preloaded(folder, **env))


def by_rank(report: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {process["global_rank"]: process for process in report["processes"] if process["traced"]}


def calls_of(report: dict[str, Any], process: dict[str, Any]) -> dict[str, int]:
    calls = [call for call in report["calls"] if call["proc"] == process["proc"]]
    return dict(own({"calls": calls}))


def everything(truth: dict[str, Any]) -> dict[str, int]:
    """All calls of the program, also those before it said that it was ready."""
    return dict(hooked(truth["calls"]) + hooked(truth["before_calls"]))


def test_two_trainers_and_a_late_sidecar(folder: Path) -> None:
    """One has ended before it comes, one is killed under its eyes: all calls of both are counted, no file is left."""
    with trainer(folder, RANK="0") as first, trainer(folder, RANK="1") as second:
        for one in (first, second):
            one.lines.wait_for("ready")
        first.say()
        ended = first.truth()
        assert len(list(folder.glob("*.seg"))) == 2
        with Sidecar(folder, "--end-after", "1").watching() as sidecar:
            second.say()
            truth = second.truth()
            report = sidecar.report()
    found = by_rank(report)
    assert found.keys() == {0, 1}
    assert calls_of(report, found[0]) == everything(ended)
    assert calls_of(report, found[1]) == everything(truth)
    assert report["capture"]["lost"] == 0 and balance(report)[0] == balance(report)[1]
    assert all(process["exit"] for process in found.values())
    assert not list(folder.glob("*.seg"))


def test_it_sees_from_the_first_call_on(folder: Path) -> None:
    """A trainer that starts beside it: each call, once, however it ends."""
    with Sidecar(folder, "--end-after", "1").watching() as sidecar, trainer(folder, RANK="3") as program:
        program.lines.wait_for("ready")
        program.say()
        truth = program.truth()
        report = sidecar.report()
    (process,) = by_rank(report).values()
    assert (process["pid"], process["global_rank"]) == (truth["pid"], 3)
    assert calls_of(report, process) == everything(truth)
    assert process["exit"]["code"] in (0, None)


@pytest.mark.usefixtures("needs_root")
def test_another_pid_namespace(folder: Path) -> None:
    """Its pid is its own, its end is seen, nothing is made up; and pid 1 here is not taken for it."""
    with Sidecar(folder, before=[*CHILD, sys.executable, "-m", "stallscope.cli.main"]).watching() as sidecar:
        with trainer(folder, before=CHILD, RANK="5") as program:
            program.lines.wait_for("ready")
            program.say()
            truth = program.truth()
        assert truth["pid"] == 1
        end = time.monotonic() + 20
        while list(folder.glob("*.seg")) and time.monotonic() < end:
            time.sleep(0.05)
        (child,) = Path(f"/proc/{sidecar.process.pid}/task/{sidecar.process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
        report = sidecar.report()
    (process,) = by_rank(report).values()
    assert (process["pid"], process["ns_pid"], process["name"]) == (1, 1, "million")
    assert process["exit"]["code"] is None and process["exit"]["signal"] is None
    assert any("its own pid namespace" in note for note in report["capture"]["notes"])
    assert not list(folder.glob("*.seg"))


def test_a_killed_trainer_starts_again(folder: Path) -> None:
    """What was in flight when it was killed is told, and the next one is another process."""
    with Sidecar(folder, "--end-after", "1.5").watching() as sidecar:
        for rank in ("0", "0"):
            with trainer(folder, RANK=rank) as program:
                program.lines.wait_for("ready")
                program.process.send_signal(signal.SIGKILL)
                program.process.wait()
        report = sidecar.report()
    processes = [process for process in report["processes"] if process["traced"]]
    assert len(processes) == 2 and all(process["exit"] for process in processes)
    assert not list(folder.glob("*.seg"))


def test_an_exec_is_another_program(folder: Path) -> None:
    """Its segment has another name, and both are counted."""
    code = "import ctypes, os, sys; ctypes.CDLL('libcudart.so.12').cudaDeviceSynchronize(); os.execv(sys.argv[1], sys.argv[1:])"
    words = ["/usr/bin/python3", "-c", code, *MILLION]
    with Sidecar(folder, "--end-after", "1").watching() as sidecar:
        with Process(words, preloaded(folder)) as program:
            program.lines.wait_for("ready")
            assert len({path.name.partition(".")[0] for path in folder.glob("*.seg")}) == 1
            program.say()
            truth = program.truth()
        report = sidecar.report()
    found = sum((own({"calls": [call]}) for call in report["calls"]), start=type(hooked({}))())
    assert found["cudaDeviceSynchronize"] >= hooked(truth["calls"])["cudaDeviceSynchronize"] + 1
    assert not list(folder.glob("*.seg"))


def test_a_report_of_this_moment(folder: Path) -> None:
    """SIGUSR1: on stdout and in the file, and it goes on."""
    file = folder / "report.json"
    drop = [] if os.geteuid() else ["setpriv", f"--reuid={GROUP}", f"--regid={GROUP}", "--clear-groups"]
    before = [*drop, sys.executable, "-m", "stallscope.cli.main"]
    with Sidecar(folder, "--report", file, "--uid", str(os.geteuid()), before=before).watching() as sidecar:
        with trainer(folder, RANK="0") as program:
            program.lines.wait_for("ready")
            time.sleep(0.5)
            sidecar.stop(signal.SIGUSR1)
            end = time.monotonic() + 20
            while not file.exists() and time.monotonic() < end:
                time.sleep(0.05)
            first = json.loads(file.read_text())
            program.say()
            truth = program.truth()
        time.sleep(1)
        sidecar.stop()
        sidecar.lines.rest()
        assert sidecar.process.wait(60) == 0
    last = json.loads(file.read_text())
    (now,), (later,) = by_rank(first).values(), by_rank(last).values()
    assert now["exit"] is None and later["exit"] is not None
    assert calls_of(first, now) == dict(hooked(truth["before_calls"]))
    assert calls_of(last, later) == everything(truth)


def test_it_can_be_told_by_a_file(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "sidecar.toml"
    config.write_text(f'[sidecar]\ndir = "{folder}"\nend_after = 1\njson = true\nsample = "1/1"\n')
    words = [sys.executable, "-m", "stallscope.cli.main", "sidecar", "--config", str(config)]
    with Process(words) as sidecar:
        sidecar.errors.wait_for(f"watching {folder}")
        with trainer(folder) as program:
            program.lines.wait_for("ready")
            program.say()
            program.truth()
        report = json.loads(sidecar.lines.rest())
    assert report["capture"]["sampled_out"] == 0 and report["capture"]["events"] > 0


@pytest.mark.parametrize(("text", "why"), [
    ("[sidecar]\ndirr = 'x'\n", "sidecar.dirr is no setting"), ("[sidecar]\nuids = 'x'\n", "no list of user ids"),
    ("[sidecar]\nmode = 'fast'\n", "is none of keep"), ("sidecar = 5\n", "is no table"), ("[sidecar\n", "")])  # fmt: skip
def test_what_a_file_can_not_say(tmp_path: Path, text: str, why: str) -> None:
    config = tmp_path / "sidecar.toml"
    config.write_text(text)
    words = [sys.executable, "-m", "stallscope.cli.main", "sidecar", "--config", str(config)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and why in done.stderr and "next: see docs/sidecar.md" in done.stderr


def test_install(tmp_path: Path) -> None:
    """A copy that anybody may load, whole at every moment; what it prints is what a manifest needs."""
    said = installed(tmp_path / "lib")
    library = Path(said["LD_PRELOAD"])
    assert library.parent == tmp_path / "lib" and library.stat().st_mode & 0o777 == 0o755
    assert said["STALLSCOPE_SHIM"] == "dir:/volume"
    assert [path.name for path in library.parent.iterdir()] == ["libstallscope.so"]
    assert installed(tmp_path / "lib") == said


@pytest.mark.usefixtures("needs_root")
def test_who_closes_all_descriptors_lives_on(folder: Path) -> None:
    """As programs do that become daemons: its lock is gone, its calls still come, and its end can't be seen."""
    code = (
        "import ctypes, os, time\n"
        "cuda = ctypes.CDLL('libcudart.so.12')\n"
        "cuda.cudaDeviceSynchronize()\n"
        "time.sleep(0.5); os.closerange(3, 4096); end = time.monotonic() + 2; n = 1\n"
        "while time.monotonic() < end:\n"
        "    cuda.cudaDeviceSynchronize(); n += 1; time.sleep(0.01)\n"
        "print(n, flush=True)\n"
    )
    outside = [*CHILD, sys.executable, "-m", "stallscope.cli.main"]
    with Sidecar(folder, before=outside).watching() as sidecar:
        with Process([*CHILD, "/usr/bin/python3", "-c", code], preloaded(folder)) as program:
            made = int(program.lines.rest())
        (child,) = Path(f"/proc/{sidecar.process.pid}/task/{sidecar.process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
        report = sidecar.report()
    (process,) = [process for process in report["processes"] if process["traced"]]
    assert calls_of(report, process)["cudaDeviceSynchronize"] == made
    assert process["exit"] is None
    assert any("its end can't be seen" in note for note in report["capture"]["notes"])

"""`stallscope run`: equal numbers without privileges; streams, exit codes and signals as if it were not there."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, SIM_LIB, STALLSCOPE, TARGETS, balance
from run_kit import SHIM, Ran, Running, environment, everything, run
from test_attach_counts import WAYS, check_long_waits, hooked, own
from test_late_communicators import VERSION, pids_of

from stallscope.aggregate.identity import comm_hash

PYTHON = sys.executable


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def closes(report: dict[str, Any]) -> bool:
    left, made = balance(report)
    return left == made


@pytest.mark.parametrize("mode", ["full", "lite", "min"])
@pytest.mark.parametrize("way", WAYS)
def test_every_count_is_exact(way: str, mode: str) -> None:
    """In each mode and each way the runtime may reach the driver."""
    done = run([TARGETS / "million", 5000, 100, 300], "--mode", mode, env=environment(STALLSCOPE_SIM_DRIVER=way))
    assert done.code == 0
    assert own(done.report) == everything(done.truth())
    assert closes(done.report) and done.report["capture"]["lost"] == 0
    assert {call["source"] for call in done.report["calls"]} == {"shim"}
    assert done.report["capture"]["sources"] == ["shim"]


def test_a_million_calls(tmp_path: Path) -> None:
    """Counts exact, long waits within 5 % of the program's own clock."""
    recording = tmp_path / "million.stall"
    env = environment(STALLSCOPE_SIM_DRIVER="private")
    done = run([TARGETS / "million", 250_000, 1000, 300], "-o", recording, env=env)
    assert own(done.report) == everything(done.truth())
    assert closes(done.report) and sum(call["count"] for call in done.report["calls"]) >= 1_000_000
    check_long_waits(done.truth(), recording)


def test_the_recording_gives_the_report_to_the_byte(tmp_path: Path) -> None:
    recording = tmp_path / "live.stall"
    command = [*STALLSCOPE, "run", "-o", str(recording), "--json", "--", str(TARGETS / "million"), "5000", "100", "300"]
    live = subprocess.run(command, input="go\n", capture_output=True, text=True, env=environment(), check=True)
    replay = subprocess.run([*STALLSCOPE, "report", recording, "--json"], capture_output=True, text=True, check=True)
    assert live.stdout.endswith("}\n" + replay.stdout)


def test_the_commands_output_is_its_own() -> None:
    """The report for a person goes to stderr, as perf stat's does."""
    text = "import sys; sys.stdout.write(sys.stdin.read()); sys.stderr.write('bad ')"
    done = run([PYTHON, "-c", text], said="a\n\0b", as_json=False)
    assert (done.code, done.out, done.report) == (0, "a\n\0b", None)
    assert done.err.startswith("bad ") and "nothing captured" in done.err
    loud = run([TARGETS / "million", 500, 10, 300], as_json=False)
    assert "cudaStreamSynchronize" in loud.err and loud.out.startswith("ready\n{") and loud.out.count("\n") == 2


@pytest.mark.parametrize(("words", "code"), [
    (["true"], 0), (["sh", "-c", "exit 3"], 3), (["sh", "-c", "kill -9 $$"], 137), (["sh", "-c", "kill -SEGV $$"], 139),
    (["sh", "-c", "exit 125"], 125),
    (["nonexistent-command"], 127), (["./nonexistent"], 127), (["/etc/passwd"], 126), (["/"], 126),
])  # fmt: skip
def test_exit_codes(words: list[str], code: int) -> None:
    assert run(words, as_json=False).code == code


def test_own_failures(tmp_path: Path) -> None:
    """125 to 127 with a message in four parts, and the command has not run."""
    there = tmp_path / "there"
    there.touch()
    done = run(["touch", tmp_path / "ran"], "-o", there)
    assert done.code == 125 and "it exists and would be overwritten" in done.err and "\n  next: " in done.err
    assert not (tmp_path / "ran").exists()
    done = run(["nonexistent-command"])
    assert "cannot run nonexistent-command: No such file or directory\n  next: " in done.err


def test_the_library_is_not_built(tmp_path: Path) -> None:
    tree = tmp_path / "agent"
    shutil.copytree(ROOT / "agent" / "stallscope", tree / "stallscope", ignore=shutil.ignore_patterns("__pycache__"))
    done = run(["true"], env=environment(PYTHONPATH=str(tree)))
    assert done.code == 125
    assert "the shim is not built" in done.err and "make build" in done.err


def test_bad_arguments() -> None:
    for words in ([], ["--force", "--", "true"], ["--mode", "fast", "--", "true"], ["--sample", "2", "--", "true"]):
        done = subprocess.run([*STALLSCOPE, "run", *words], capture_output=True, text=True)
        assert done.returncode == 2 and "\n  next: " in done.stderr, words


def test_a_full_disk_costs_the_recording_only(tmp_path: Path, needs_root: None) -> None:
    """The command ends well, its report is whole, and the exit code says that something is missing."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "none", folder], check=True)
    try:
        done = run([TARGETS / "million", 2000, 100, 300], "-o", folder / "a.stall", "--sample", "1/1")
    finally:
        subprocess.run(["umount", folder], check=True)
    assert done.code == 125 and "is incomplete: No space left on device" in done.err
    assert own(done.report) == everything(done.truth())


def test_a_path_with_spaces_and_a_preload_of_the_users(tmp_path: Path) -> None:
    """Our library may lie anywhere; what the user preloads stays."""
    tree = tmp_path / "a b: c"
    (tree / "build" / "shim").mkdir(parents=True)
    shutil.copy(SHIM, tree / "build" / "shim")
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "agent" / "stallscope", tree / "agent" / "stallscope", ignore=skipped)
    (tmp_path / "mine.c").write_text('#include <stdlib.h>\n__attribute__((constructor)) static void f(void) {'
                                     ' setenv("MINE", "loaded", 1); }\n')  # fmt: skip
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "mine.so", tmp_path / "mine.c"], check=True)
    # PYTHONPATH can't name a folder with a colon.
    inner = f"import sys; sys.path.insert(0, {str(tree / 'agent')!r}); from stallscope.cli.main import entry; entry()"
    words = ["run", "--json", "--", "sh", "-c", f"echo $MINE; exec {TARGETS}/million 500 10 300"]
    done = subprocess.run(
        [PYTHON, "-c", inner, *words], input="go\n", capture_output=True, text=True,
        env=environment(LD_PRELOAD=str(tmp_path / "mine.so")), timeout=60,
    )  # fmt: skip
    found = Ran(done.returncode, done.stdout, done.stderr)
    assert found.code == 0, found.err
    assert found.out.startswith("loaded\n")
    assert own(found.report) == everything(found.truth())


def test_any_user(tmp_path: Path, needs_root: None) -> None:
    """No capability at all, a home that can't be written to."""
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o055)
    command = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]
    words = [*STALLSCOPE, "run", "--json", "--", str(TARGETS / "million"), "2000", "50", "300"]
    done = subprocess.run(
        [*command, *words], input="go\n", capture_output=True, text=True, env=environment(HOME="/nonexistent"),
        timeout=60, cwd="/",
    )  # fmt: skip
    found = Ran(done.returncode, done.stdout, done.stderr)
    if found.code == 126 or "Permission denied" in found.err:
        pytest.skip(f"another user can't read this tree: {found.err[-200:]}")
    assert found.code == 0, found.err
    assert own(found.report) == everything(found.truth())


def test_forks_and_execs() -> None:
    """Children that live for a moment, one that runs itself anew: each call once, each process by its name."""
    done = run([TARGETS / "forker", 8, 500, 100])
    truth = done.truth()
    assert own(done.report, truth["pid"]) == hooked(truth["calls"])
    for child in truth["children"]:
        assert own(done.report, child["pid"]) == hooked(child["calls"])
    assert closes(done.report)
    exits = {p["pid"]: p["exit"] for p in done.report["processes"]}
    assert exits[truth["pid"]]["code"] == 0


def test_more_short_lived_processes_than_slots() -> None:
    """Four hundred that live for a moment: what they handed over waits until there is room."""
    done = run([TARGETS / "forker", 400, 50, 100])
    truth = done.truth()
    for child in truth["children"]:
        assert own(done.report, child["pid"]) == hooked(child["calls"])
    assert closes(done.report) and done.report["capture"]["gaps"] == []


def test_counters_go_on_over_an_exec() -> None:
    done = run(["sh", "-c", f"exec {TARGETS}/execer main 50"])
    assert own(done.report)["cudaMalloc"] == done.truth()["calls"]["cudaMalloc"]
    assert closes(done.report)


def test_processes_without_cuda_are_inert() -> None:
    """A shell and a compiler make no segment."""
    done = run(["sh", "-c", "echo 'int x;' | gcc -c -x c - -o /dev/null && ls / | sort | head -1"])
    assert done.code == 0 and done.report["calls"] == [] and done.report["capture"]["gaps"] == []


def test_killed_inside_a_wait() -> None:
    """Its records and the call it was in are there; the signal is the exit code."""
    text = f"""
import ctypes, os, signal, threading
cudart = ctypes.CDLL({str(SIM_LIB / "libcudart.so.12")!r})
cudart.cudaFree(None)
cudart.cudaDeviceSynchronize()
cudart.stallscope_sim_set_next_kernel_ns.argtypes = [ctypes.c_uint64]
cudart.stallscope_sim_set_next_kernel_ns(60_000_000_000)
import sys; sys.path.insert(0, {str(ROOT / "tests" / "targets")!r})
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
class dim3(ctypes.Structure): _fields_ = [(n, ctypes.c_uint) for n in 'xyz']
cudart.cudaLaunchKernel(ctypes.c_void_p(1), dim3(1, 1, 1), dim3(1, 1, 1), None, ctypes.c_size_t(0), None)
cudart.cudaDeviceSynchronize()
"""
    done = run([PYTHON, "-c", text], "--sample", "1/1")
    assert done.code == 137, done.err
    waits = next(call for call in done.report["calls"] if call["api"] == "cudaDeviceSynchronize")
    assert waits["count"] == 2 and closes(done.report)
    (process,) = done.report["processes"]
    assert process["exit"]["signal"] == signal.SIGKILL


def test_who_clears_his_environment(tmp_path: Path) -> None:
    """Is followed, and so are his children."""
    text = f"""
import ctypes, os, subprocess, sys
os.environ.clear()
ctypes.CDLL({str(SIM_LIB / "libcudart.so.12")!r}).cudaFree(None)
assert "LD_PRELOAD" not in os.environ
if len(sys.argv) > 1:
    subprocess.run([sys.executable, "-c", sys.argv[1]], env={{"STALLSCOPE_SIM_LIB": {str(SIM_LIB)!r}}}, check=True)
"""
    done = run([PYTHON, "-c", text, text])
    assert done.code == 0, done.err
    assert Counter(c["api"] for c in done.report["calls"] if c["count"] - c["nested"])["cudaFree"] == 2
    assert len({c["pid"] for c in done.report["calls"]}) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signals_are_passed_on(number: signal.Signals) -> None:
    """To the command, which decides."""
    text = "import signal, sys; signal.signal({0}, lambda *_: sys.exit(42)); print('ready', flush=True); signal.pause()"
    with Running([PYTHON, "-c", text.format(int(number))]) as running:
        running.lines.wait_for("ready")
        running.process.send_signal(number)
        assert running.process.wait(30) == 42
    with Running(["sh", "-c", "echo ready; exec sleep 60"]) as running:
        running.lines.wait_for("ready")
        time.sleep(0.1)
        running.process.send_signal(number)
        assert running.process.wait(30) == 128 + number


def test_a_terminals_ctrl_c() -> None:
    """Twice: the command gets it once each time, and the report comes all the same."""
    pid, terminal = pty.fork()
    if not pid:
        text = (
            "import signal, sys, time\ntold, said = [], 0\n"  # not pause(): the signal may come just before it
            "signal.signal(2, lambda *_: told.append(1))\nprint('ready', flush=True)\n"
            "while said < 2:\n    time.sleep(0.02)\n    while said < len(told):\n"
            "        said += 1; print('got', said, flush=True)\nsys.exit(7)"
        )
        os.execve(PYTHON, [*STALLSCOPE, "run", "--", PYTHON, "-c", text], environment())
    said = b""

    def until(word: bytes) -> None:
        nonlocal said
        while word not in said:
            said += os.read(terminal, 4096)

    until(b"ready")
    os.write(terminal, b"\x03")
    until(b"got 1")
    time.sleep(0.3)
    assert b"got 2" not in said
    os.write(terminal, b"\x03")
    until(b"got 2")
    until(b"nothing captured")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    os.close(terminal)


def test_who_outlives_the_command() -> None:
    """Is told of, and left alone."""
    done = run(["sh", "-c", "setsid sleep 30 >/dev/null 2>&1 & sleep 1.5; echo $!"])
    assert done.code == 0
    assert any("still runs" in note for note in done.report["capture"]["notes"])
    os.kill(int(done.out), signal.SIGKILL)


def test_a_killed_tracer_costs_the_program_nothing() -> None:
    """It runs on, and another one reads what it has."""
    with Running([TARGETS / "million", 20_000, 100, 300], env=environment(MILLION_LINGER="1")) as running:
        running.lines.wait_for("ready")
        of_million = [
            p for p in children_of(running.process.pid) if "million" in Path(f"/proc/{p}/cmdline").read_text()
        ]
        (child,) = of_million
        running.process.kill()
        running.say()
        running.lines.wait_for("{")
        running.say()
        end = time.monotonic() + 30
        while Path(f"/proc/{child}").exists() and time.monotonic() < end:
            time.sleep(0.05)
        assert not Path(f"/proc/{child}").exists()


def test_the_aggregator_is_killed() -> None:
    """The command runs on to its end, and somebody says that the report is lost."""
    with Running([TARGETS / "million", 1000, 10, 300]) as running:
        running.lines.wait_for("ready")
        for pid in children_of(running.process.pid):
            if "aggregator" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
        running.say()
        assert running.lines.wait_for("{")
        assert running.process.wait(30) == 125
        assert "the report is lost" in running.errors.rest()


def test_exit_codes_of_the_whole_tree() -> None:
    """Of children, of theirs that were waited for, and of orphans that come to us."""
    text = "sh -c 'sleep 1.5; exit 4' & (sh -c 'sleep 1.6; kill -9 $$' &) ; sleep 0.1; sh -c 'sleep 1.7; exit 6'; wait"
    done = run(["bash", "-c", text])
    ends = [(p["exit"]["code"], p["exit"]["signal"]) for p in done.report["processes"] if p["name"] == "sh"]
    known = {(4, None), (None, 9), (6, None)}
    assert (None, 9) in ends and set(ends) <= {*known, (None, None)}
    if not any("whose parents alone know" in note for note in done.report["capture"]["notes"]):
        assert set(ends) == known


def test_communicators_of_a_job(tmp_path: Path) -> None:
    """Members, ranks, devices, ids and numbers of all of them, children too, are the job's own."""
    truth = tmp_path / "truth.json"
    command = [PYTHON, "-m", "stallscope.sim.job", "--ranks=4", "--duration=2", f"--truth={truth}"]
    done = run(command, env=environment(STALLSCOPE_SIM_DEVICES="4"))
    assert done.code == 0, done.err
    told = json.loads(truth.read_text())
    ranks = {pid: rank for rank, pid in enumerate(pids_of(told))}
    found = {tuple(ranks[m["pid"]] for m in sorted(c["members"], key=lambda m: m["rank"])): c
             for c in done.report["communicators"]}  # fmt: skip
    wanted = {tuple(c["ranks"]): c for c in told["communicators"] if len(c["ranks"]) > 1}
    assert found.keys() == wanted.keys() and len(found) == len(done.report["communicators"])
    for members, comm in wanted.items():
        row, uid = found[members], comm["unique_id"]
        assert (row["nranks"], row["identity"], row["unique_id"]) == (len(members), "verified", uid or None)
        assert [m["device"] for m in row["members"]] == list(members)
        assert len({m["next_seq"] for m in row["members"]}) == 1
        if uid:
            assert row["comm_hash"] == f"{comm_hash(bytes.fromhex(uid), VERSION) or 0:016x}"
    calls: Counter[str] = Counter()
    for rank in told["ranks"]:
        calls.update(hooked(rank["calls"]))
    seen = own(done.report)
    assert seen.pop("cuLaunchKernelEx") > 0  # NCCL's own launches, which the job does not count
    assert seen == calls and closes(done.report)

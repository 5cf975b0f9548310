"""Programs that do what a library in the way could disturb: they end with the same line with it and without it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from shim_kit import ROOT, Agent, environment, run
from variants import program

TARGETS, SIM = ROOT / "build" / "targets", ROOT / "build" / "sim" / "lib"
CASES = [("rough", mode) for mode in ("backtrace", "cancel", "longjmp", "altstack", "seccomp")]
CASES += [("throwing", mode) for mode in ("around", "inside", "cancel")]
CUDART = str(SIM / "libcudart.so.12")


def output(agent: Agent | None, *words: str) -> tuple[int, str]:
    """How it ends, and all that it prints."""
    env = environment(SIM, STALLSCOPE_SIM_LIB=str(SIM))
    if agent is None:
        del env["LD_PRELOAD"]
    else:
        env["STALLSCOPE_SHIM"] = f"socket:{agent.path}"
    command = [str(TARGETS / words[0]), *words[1:]]
    done = subprocess.run(command, env=env, input="go\n" * 9, capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_the_same_with_it_and_without_it(agent: Agent, name: str, mode: str) -> None:
    """And no call is lost from sight."""
    assert output(agent, name, mode) == output(None, name, mode)
    for read in agent.read:
        read.conserved()


@pytest.mark.parametrize(
    "words",
    [["odd", "plain", "1000"], ["odd", "nonleader-exec", "1000"], ["odd", "leaderless", "1000"],
     ["odd", "leaderless-load", "1000"], ["odd", "signals", "20000"], ["execer", "main", "100"], ["execer", "thread", "100"],
     ["lateload", CUDART, "100", "10000", "10"], ["forker"], ["forker_static"], ["inwait_static", "50"]],
    ids=lambda words: "-".join(w.rpartition("/")[2] for w in words),
)  # fmt: skip
def test_odd_programs(agent: Agent, words: list[str]) -> None:
    """Processes and threads that begin and end in odd ways: every call is told."""
    assert output(agent, *words)[0] == 0
    assert agent.read
    for read in agent.read:
        read.conserved()


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_programs_with_sanitizers(agent: Agent, stubs: Path, tmp_path: Path, sanitizer: str) -> None:
    """They ask dlsym for everything before anything is set up, us included."""
    static = {"address": "-static-libasan", "thread": "-static-libtsan"}[sanitizer]
    made = program(tmp_path, stubs, "program.c", f"-fsanitize={sanitizer}", static)
    truth = run([made, "threads", "10", "2", "50"], environment(stubs, STALLSCOPE_SHIM=f"socket:{agent.path}"))
    (read,) = agent.wait_for(1)
    assert read.conserved() == truth


def test_the_simulated_job(agent: Agent, tmp_path: Path) -> None:
    """Four ranks train; each call that they count themselves is counted, and no other."""
    truth = tmp_path / "truth.json"
    words = ["-m", "stallscope.sim.job", "--ranks", "4", "--steps", "20", "--duration", "60", "--truth", str(truth)]
    env = environment(SIM, STALLSCOPE_SHIM=f"socket:{agent.path}")
    python = str(ROOT / ".venv" / "bin" / "python")
    subprocess.run([python, *words], env=env, check=True, stdout=subprocess.DEVNULL)
    ranks = {rank["pid"]: rank["calls"] for rank in json.loads(truth.read_text())["ranks"]}
    reads = {read.segment.header.pid: read for read in agent.wait_for(4)}
    assert set(reads) == set(ranks)
    for pid, read in reads.items():
        read.conserved()
        own = {api: int(row["calls"] - row["nested"]) for api, row in read.latest.items()}
        launches = own.pop("cuLaunchKernelEx")  # NCCL's own
        assert launches > 20
        made = {api: count for api, count in own.items() if count}
        assert made == {api: count for api, count in ranks[pid].items() if api in made}
        assert read.segment.losses()["unwrapped"] == 0

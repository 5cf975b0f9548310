"""The simulated training job: each fault kind blocks exactly the ranks that the truth says, and healthy ranks end alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIM = ROOT / "build/sim/lib"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "agent"), "STALLSCOPE_SIM_LIB": str(SIM)}
Json = dict[str, Any]
# One half with hosts in step, the other 100 operations ahead.
HANGS = [
    ("never", 4, 0),
    ("io", 4, 100),
    ("in-init", 4, 0),
    ("in-init:comm=dp,rank=2", 4, 0),
    ("in-split", 4, 0),
    ("die:rank=3", 8, 0),
    ("skip", 4, 100),
    ("extra", 4, 0),
    ("wrong-op", 4, 100),
    ("wrong-count", 4, 0),
    ("swap", 4, 100),
    ("gpu-stuck", 4, 0),
    ("transport-stuck", 4, 100),
    ("in-abort", 4, 0),
    ("send-send", 4, 100),
    ("never:rank=5", 8, 100),
]
ENDS = [
    ("late:seconds=1.5", 4, 0),
    ("wrong-dtype", 2, 100),
    ("wrong-count:count=64", 4, 0),
    ("swap:with=dp", 4, 100),
    ("slow:factor=3", 4, 0),
    ("many-short:ms=20,times=10,last=0.3", 2, 0),
]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    subprocess.run(["make", "-s", "-C", str(ROOT / "native/sim")], check=True)


def command(truth: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "stallscope.sim.job", f"--truth={truth}", "--seed=1", *options]


def job(folder: Path, *options: str) -> Json:
    truth = folder / "truth.json"
    done = subprocess.run(
        command(truth, *options), env=ENVIRONMENT, timeout=60, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded: Json = json.loads(truth.read_text())
    return loaded


def waits(pid: int) -> bool:
    """Whether all threads of that process sleep: the kernel's view."""
    states = [Path(f"/proc/{pid}/task/{task}/stat").read_text() for task in os.listdir(f"/proc/{pid}/task")]
    return all(state.rpartition(")")[2].split()[0] == "S" for state in states)


@pytest.mark.parametrize(("fault", "ranks", "ahead"), HANGS, ids=[f"{f}-{r}-{a}" for f, r, a in HANGS])
def test_a_fault_blocks_whom_the_truth_says(tmp_path: Path, fault: str, ranks: int, ahead: int) -> None:
    at = "," if ":" in fault else ":"  # early: a busy machine makes few steps in the time
    truth = job(tmp_path, f"--fault={fault}{at}step=8", f"--ranks={ranks}", f"--ahead={ahead}", "--duration=2")
    plan, seen = truth["fault"], truth["seen"]
    assert plan["happened"] and plan["hangs"] and truth["ended_by_launcher"]
    assert seen["blocked"] == plan["must_block"], seen
    everybody = set(range(ranks))
    assert set(seen["outside"]) | set(seen["dead"]) == everybody - set(plan["must_block"]), seen
    assert seen["dead"] == ([plan["rank"]] if plan["kind"] == "die" else [])
    assert plan["culprits"] == [] if plan["kind"] == "transport-stuck" else plan["rank"] in plan["culprits"]
    heads = {int(rank) for rank in plan["heads"]} | ({plan["rank"]} if plan["kind"] == "gpu-stuck" else set())
    assert sorted(heads) == plan["must_block"], plan["heads"]
    known = {group["name"]: group for group in truth["communicators"]}
    assert known[plan["communicator"]["name"]] == plan["communicator"]
    assert plan["rank"] in plan["communicator"]["ranks"]
    assert max(seen["since_ns"].values()) < plan["start_ns"] + 1.5e9


@pytest.mark.parametrize(("fault", "ranks", "ahead"), ENDS, ids=[f"{f}-{r}-{a}" for f, r, a in ENDS])
def test_a_fault_that_ends_blocks_nobody_for_good(tmp_path: Path, fault: str, ranks: int, ahead: int) -> None:
    truth = job(tmp_path, f"--fault={fault}", f"--ranks={ranks}", f"--ahead={ahead}", "--steps=40", "--duration=30")
    plan = truth["fault"]
    assert plan["happened"] and not plan["hangs"] and not truth["ended_by_launcher"]
    assert [rank["steps"] for rank in truth["ranks"]] == [40] * ranks
    if plan["kind"] == "late":
        assert truth["seen"]["blocked"] == plan["must_block"] == [0, 2, 3]
        assert truth["seen"]["outside"] == [1]
        assert 1.5e9 <= plan["end_ns"] - plan["start_ns"] < 3e9
    else:
        assert plan["must_block"] == []
    if plan["kind"] == "many-short":
        lengths = [(end - start) / 1e9 for start, end in plan["pauses"]]
        assert len(lengths) == 11 and min(lengths) >= 0.02 and lengths[-1] >= 0.3 > lengths[0]


@pytest.mark.parametrize(
    "options",
    [
        ("--ranks=4",),
        ("--ranks=8", "--ahead=100"),
        ("--tp=2", "--pp=3", "--dp=1"),
        ("--pp=4", "--ahead=100"),
        ("--tp=3",),
        ("--ranks=1", "--ahead=5"),
        ("--ranks=2", "--loaders=2"),
        ("--ranks=4", "--slow-rank=2", "--checkpoint-every=0.3", "--checkpoint-write=0.2"),
    ],
    ids=" ".join,
)
def test_healthy_ranks_end_alike(tmp_path: Path, options: tuple[str, ...]) -> None:
    truth = job(tmp_path, *options, "--duration=1.5")
    steps = {rank["steps"] for rank in truth["ranks"]}
    assert len(steps) == 1 and min(steps) > 3, truth["ranks"]
    assert truth["fault"] is None and not truth["ended_by_launcher"]
    assert all(rank["ended"] for rank in truth["ranks"])


def test_a_checkpoint_is_written_bit_by_bit(tmp_path: Path) -> None:
    """A file that grows while rank 0 holds it open, as whoever looks from outside sees it."""
    options = ("--ranks=2", "--checkpoint-every=0.3", "--checkpoint-write=1", "--duration=3", "--steps=100000")
    process = subprocess.Popen(command(tmp_path / "truth.json", *options), env=ENVIRONMENT)
    sizes: dict[str, set[int]] = {}
    while process.poll() is None:
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            for path in Path(f"/proc/{child}/fd").glob("*"):
                try:
                    if os.readlink(path).endswith(".pt"):
                        sizes.setdefault(Path(os.readlink(path)).name, set()).add(path.stat().st_size)
                except OSError:
                    continue
        time.sleep(0.05)
    truth = json.loads((tmp_path / "truth.json").read_text())
    assert truth["ranks"][0]["checkpoints"] >= 1 and truth["ranks"][1]["checkpoints"] == 0
    assert len(sizes["checkpoint-000.pt"]) > 3 and max(sizes["checkpoint-000.pt"]) <= 4 << 20


def test_warm_up_and_short_batch_change_lengths_only(tmp_path: Path) -> None:
    """The last rank's first steps are longer, and all end alike; hosts in step wait for the flag and for the loss."""
    start_s = time.monotonic()
    warm = job(tmp_path, "--ranks=4", "--warm-up=2", "--uneven", "--steps=6", "--duration=30")
    warm_s = time.monotonic() - start_s
    usual = job(tmp_path, "--ranks=4", "--steps=6", "--duration=30")
    assert warm_s - (time.monotonic() - start_s - warm_s) > 1.0
    for truth in (warm, usual):
        assert [rank["steps"] for rank in truth["ranks"]] == [6] * 4
        assert {rank["calls"]["cudaStreamSynchronize"] for rank in truth["ranks"]} == {12}
        assert {rank["calls"]["cudaLaunchKernel"] for rank in truth["ranks"]} == {6 * 24}


def test_communicators_have_ids_or_parents(tmp_path: Path) -> None:
    truth = job(tmp_path, "--ranks=8", "--steps=3")
    groups = {group["name"]: group for group in truth["communicators"]}
    assert set(groups) == {"world", *(f"{kind}{n}" for kind in ("tp", "pp", "dp") for n in range(4))}
    ids = [group["unique_id"] for group in groups.values() if group["unique_id"]]
    assert len(set(ids)) == len(ids) == 9 and {len(unique) for unique in ids} == {256}
    assert groups["tp0"]["ranks"] == [0, 1] and groups["tp0"]["parent_unique_id"] == groups["world"]["unique_id"]
    assert groups["dp0"]["ranks"] == [0, 2] and groups["pp0"]["ranks"] == [0, 4]


def test_blocked_ranks_sleep_in_the_kernel(tmp_path: Path) -> None:
    """What the board says, as /proc sees it; a job that is told to end still writes its truth."""
    truth = tmp_path / "truth.json"
    options = ("--fault=never:step=3", "--ranks=4", "--duration=30")
    process = subprocess.Popen(command(truth, *options), env=ENVIRONMENT)
    time.sleep(3)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    end_s = time.monotonic() + 15  # on a busy machine the block comes later
    while not all((asleep := {int(pid): waits(int(pid)) for pid in children}).values()) and time.monotonic() < end_s:
        time.sleep(0.2)
    time.sleep(1)  # for the launcher to see that nothing moves
    process.terminate()
    process.wait(10)
    said = json.loads(truth.read_text())
    assert {rank["pid"] for rank in said["ranks"]} == set(asleep) and all(asleep.values())
    assert said["seen"]["blocked"] == said["fault"]["must_block"] == [0, 2, 3]
    assert not any(Path(f"/proc/{pid}").exists() for pid in asleep)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--fault=melt",), "unknown fault 'melt'"),
        (("--fault=never:rank=9",), "a rank of the job"),
        (("--fault=never:depth=9",), "depth=9"),
        (("--fault=never:rank=x",), "rank=x"),
        (("--fault=send-send", "--tp=2"), "send-send needs --pp"),
        (("--fault=swap:with=dp", "--tp=2"), "no such communicator"),
        (("--ranks=6", "--tp=4", "--dp=1"), "not --ranks 6"),
        (("--fault=in-init:comm=tp", "--ranks=4"), "ncclCommSplit makes tp"),
        (("--fault=in-split:comm=dp", "--ranks=4"), "ncclCommSplit makes tp"),
        (("--ranks=0",), "greater than 0"),
        (("--tp=0",), "greater than 0"),
    ],
)
def test_bad_options_are_explained(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    done = subprocess.run(command(tmp_path / "t", *options), env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr
    assert "Traceback" not in done.stderr

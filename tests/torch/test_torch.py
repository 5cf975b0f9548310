"""Real PyTorch, unmodified, on the simulated stack (`make test-torch`; not part of `make test`)."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch_kit import CHECKS, NCCL, python_command, torch_environment

SOURCE = ast.parse(CHECKS.read_text())
NAMES = [n.name for n in SOURCE.body if isinstance(n, ast.FunctionDef) and n.name.startswith("check_")]
ALONE = {"check_allocator", "check_ipc"}
Verdict = dict[str, Any]


def run_checks(*names: str, deadline_s: float = 200, **settings: str) -> dict[str, Verdict]:
    """name → verdict, from one process."""
    done = subprocess.run(
        [*python_command(), str(CHECKS), *names],
        env=torch_environment(**settings),
        capture_output=True,
        text=True,
        timeout=deadline_s,
    )
    verdicts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert done.returncode == 0, done.stderr[-4000:]
    return {verdict["name"]: verdict for verdict in verdicts}


@pytest.fixture(scope="module")
def together() -> dict[str, Verdict]:
    """Of all checks that may share a process: one start of torch for all of them."""
    return run_checks(*(name for name in NAMES if name not in ALONE))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ALONE])
def test_check(name: str, together: dict[str, Verdict]) -> None:
    assert name in together, "the process ended before"
    assert together[name]["ok"], together[name]["why"]


def test_memory_shared_with_another_process() -> None:
    verdict = run_checks("check_ipc")["check_ipc"]
    assert verdict["ok"], verdict["why"]


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_allocators(setting: str) -> None:
    """Virtual memory management, and stream-ordered allocation."""
    verdict = run_checks("check_allocator", PYTORCH_ALLOC_CONF=setting)["check_allocator"]
    assert verdict["ok"], verdict["why"]


def test_private_way_to_the_driver() -> None:
    """Not `inside`: torch itself calls libcuda, which would be a second driver beside the runtime's."""
    names = ["check_copies", "check_autograd", "check_events", "check_graph"]
    verdicts = run_checks(*names, STALLSCOPE_SIM_DRIVER="private")
    assert [name for name in names if not verdicts[name]["ok"]] == []


def test_without_a_device() -> None:
    script = (
        "import torch; print(torch.cuda.is_available(), torch.cuda.device_count(), (torch.ones(3) * 2).sum().item())"
    )
    done = subprocess.run(
        [*python_command(), "-c", script],
        env=torch_environment(STALLSCOPE_SIM_DEVICES="0"),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.split() == ["False", "0", "6.0"], done.stderr


def test_visible_devices() -> None:
    script = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid)"
    done = subprocess.run(
        [*python_command(), "-c", script],
        env=torch_environment(CUDA_VISIBLE_DEVICES="3,1"),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.split() == ["2", "7374616c-6c73-636f-7065-2d73696d2d03"], done.stderr


# several ranks

needs_nccl = pytest.mark.skipif(not NCCL.exists(), reason=f"{NCCL} is not built")


def ranks(program: str, count: int, tmp_path: Path, deadline_s: float = 150, **settings: str) -> list[dict[str, Any]]:
    """One process a rank; what each wrote. Exit codes under "code"."""
    folder = Path(__file__).parent
    environment = torch_environment(MASTER_ADDR="127.0.0.1", WORLD_SIZE=str(count), OMP_NUM_THREADS="1", **settings)
    processes = []
    for rank in range(count):
        own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "RENDEZVOUS": f"file://{tmp_path}/meet"}
        command = [*python_command(), str(folder / program), str(tmp_path / f"rank{rank}.json")]
        with (tmp_path / f"rank{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
    found = []
    try:
        for rank, process in enumerate(processes):
            code = process.wait(deadline_s)
            path = tmp_path / f"rank{rank}.json"
            said = json.loads(path.read_text()) if path.exists() else {}
            found.append({**said, "code": code, "log": (tmp_path / f"rank{rank}.log").read_text()[-6000:]})
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found


@needs_nccl
@pytest.mark.parametrize("count", [2, 4])
def test_collectives_are_bit_equal_to_gloo(count: int, tmp_path: Path) -> None:
    for said in ranks("collectives.py", count, tmp_path):
        assert said["code"] == 0, said["log"]
        assert said["unequal"] == []
        assert said["compared"] >= 30


@needs_nccl
@pytest.mark.parametrize("count", [2, 4])
def test_ddp(count: int, tmp_path: Path) -> None:
    for said in ranks("ddp.py", count, tmp_path):
        assert said["code"] == 0, said["log"]
        assert said["steps"] == 5


@needs_nccl
def test_a_rank_that_never_joins_trips_the_watchdog(tmp_path: Path) -> None:
    """The watchdog of PyTorch itself, at its time-out: it names the collective and ends the process."""
    said = ranks("absent.py", 3, tmp_path, TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="500")
    assert said[2]["code"] == 0, said[2]["log"]
    for rank in (0, 1):
        assert said[rank]["code"] != 0
        assert "Watchdog caught collective operation timeout" in said[rank]["log"]
        assert "ALLREDUCE" in said[rank]["log"]
        assert said[rank]["blocked_s"] < 2, "the call itself must not block"

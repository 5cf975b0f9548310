"""What NVML says of ranks that wait in NCCL for one that never comes."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from torch_kit import NCCL, python_command, torch_environment

IDLE_MW = 65_000
ASK = """
import pynvml, time
pynvml.nvmlInit()
devices = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(3)]
for _ in range(10):
    busy = [pynvml.nvmlDeviceGetUtilizationRates(d).gpu for d in devices]
    time.sleep(0.1)
print(*busy, *[pynvml.nvmlDeviceGetPowerUsage(d) for d in devices])
"""


@pytest.mark.skipif(not NCCL.exists(), reason=f"{NCCL} is not built")
def test_waiting_ranks_are_busy_at_idle_power(tmp_path: Path) -> None:
    environment = torch_environment(STALLSCOPE_SIM_MACHINE=f"test {os.getpid()}", WORLD_SIZE="3")
    program, processes = Path(__file__).parent / "absent.py", []
    try:
        for rank in range(3):
            own = {**environment, "RANK": str(rank), "RENDEZVOUS": f"file://{tmp_path}/meet"}
            command = [*python_command(), str(program), str(tmp_path / f"rank{rank}.json")]
            processes.append(subprocess.Popen(command, env=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        end = time.monotonic() + 60
        while not (tmp_path / "rank0.json").exists() or not (tmp_path / "rank1.json").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        done = subprocess.run(
            [*python_command(), "-c", ASK], env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.stdout.split() == ["100", "100", "0", *[str(IDLE_MW)] * 3], done.stderr
    finally:
        for process in processes:
            process.kill()
            process.wait()

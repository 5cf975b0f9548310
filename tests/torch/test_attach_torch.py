"""`stallscope attach` on programs with real PyTorch: exact counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from torch_kit import NCCL, python_command, torch_environment

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "integration"))

from harness import Program, Tracer, counts  # noqa: E402

pytestmark = pytest.mark.usefixtures("needs_bpf")


def nothing_lost(report: dict[str, dict[str, int]]) -> bool:
    return report["capture"]["lost"] == 0


@pytest.mark.parametrize("way", ["exported", "private"])
def test_counts_of_a_torch_program(way: str) -> None:
    environment = torch_environment(STALLSCOPE_SIM_DRIVER=way)
    with Program([*python_command(), HERE / "traced.py"], sim=False, env=environment) as program:
        program.wait_for("ready")
        with Tracer([program.pid]).attached() as tracer:
            program.say()
            truth = program.truth()
            report = tracer.report()
    found = counts(report)
    assert {api: found.get(api, 0) for api in truth} == truth
    assert nothing_lost(report)


@pytest.mark.skipif(not NCCL.exists(), reason=f"{NCCL} is not built")
def test_collectives_of_two_ranks(tmp_path: Path) -> None:
    programs = []
    try:
        for rank in range(2):
            environment = torch_environment(RANK=str(rank), WORLD_SIZE="2", RENDEZVOUS=f"file://{tmp_path}/meet")
            programs.append(Program([*python_command(), HERE / "traced_rank.py"], sim=False, env=environment))
        for program in programs:
            program.wait_for("ready")
        with Tracer([program.pid for program in programs]).attached() as tracer:
            for program in programs:
                program.say()
            truths = [json.loads(program.wait_for("{")) for program in programs]
            for program in programs:
                program.say()
            report = tracer.report()
        for program, truth in zip(programs, truths, strict=True):
            found = counts(report, program.pid)
            assert {api: found.get(api, 0) for api in truth} == truth
        assert nothing_lost(report)
    finally:
        for program in programs:
            program.process.kill()
            program.process.wait()

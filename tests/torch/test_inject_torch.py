"""A library put into running programs with real PyTorch: exact counts, and a hundred times in and out."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from torch_kit import NCCL, python_command, torch_environment

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "integration"))

from harness import Program, Tracer, counts  # noqa: E402
from inject_kit import Worst  # noqa: E402

from stallscope.capture.injection import inject  # noqa: E402
from stallscope.capture.parser_client import ParserClient  # noqa: E402

TIMES = int(os.environ.get("STALLSCOPE_INJECT_TIMES", "10"))
MOST_STOPPED_NS = 60_000_000


def test_counts_of_a_torch_program() -> None:
    with Program([*python_command(), HERE / "traced.py"], sim=False, env=torch_environment()) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--method", "inject").attached() as tracer:
            program.say()
            truth = program.truth()
            report = tracer.report()
    found = counts(report)
    assert {api: found.get(api, 0) for api in truth} == truth
    assert report["capture"]["lost"] == 0
    assert {call["source"] for call in report["calls"]} == {"shim"}


@pytest.mark.skipif(not NCCL.exists(), reason=f"{NCCL} is not built")
def test_collectives_of_two_ranks(tmp_path: Path) -> None:
    """Communicators that are older than the library: read from memory, and numbered by NCCL's own count."""
    programs: list[Program] = []
    try:
        for rank in range(2):
            environment = torch_environment(RANK=str(rank), WORLD_SIZE="2", RENDEZVOUS=f"file://{tmp_path}/meet")
            programs.append(Program([*python_command(), HERE / "traced_rank.py"], sim=False, env=environment))
        for program in programs:
            program.wait_for("ready")
        with Tracer([program.pid for program in programs], "--method", "inject").attached() as tracer:
            for program in programs:
                program.say()
            truths = [json.loads(program.wait_for("{")) for program in programs]
            time.sleep(2)  # what NCCL counts is read while no call is under way
            for program in programs:
                program.say()
            report = tracer.report()
        for program, truth in zip(programs, truths, strict=True):
            found = counts(report, program.pid)
            assert {api: found.get(api, 0) for api in truth} == truth
        assert report["capture"]["lost"] == 0
        (comm,) = report["communicators"]
        assert sorted(member["rank"] for member in comm["members"]) == [0, 1]
        assert len({member["next_seq"] for member in comm["members"]}) == 1
    finally:
        for program in programs:
            program.process.kill()
            program.process.wait()


def test_in_and_out_many_times(parser: ParserClient) -> None:
    """A program that trains on: its own results stay right, no thread is stopped for longer than 60 ms."""
    worst = Worst()
    with Program([*python_command(), HERE / "steady.py"], sim=False, env=torch_environment()) as program:
        program.wait_for("ready")
        for _ in range(TIMES):
            injection = inject(program.pid, parser)
            worst.add(injection)
            time.sleep(0.02)
            assert injection.release() == (injection.slots, 0)
            injection.close()
        program.say()
        truth = program.truth()
    print(f"{TIMES} times, {worst}")
    assert truth["steps"] > 0 and truth["wrong"] == 0
    assert worst.slots > 50  # or it did nothing
    assert worst.stopped_ns <= MOST_STOPPED_NS, worst

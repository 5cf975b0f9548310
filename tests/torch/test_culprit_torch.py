"""Real DDP jobs of four ranks of which one does what it should not: named, by `stallscope attach` beside the job."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch_kit import NCCL, python_command, torch_environment

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "integration"))

from harness import Program, Tracer  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("needs_bpf"),
    pytest.mark.skipif(not NCCL.exists(), reason=f"{NCCL} is not built"),
]

WORLD, START_S, END_S = 4, 300.0, 300.0  # four times PyTorch to import, on what may be a busy machine
LIMIT_S = 5
Json = dict[str, Any]


class Job(NamedTuple):
    """A job that is over. `ranks`: what each wrote; `codes`: how each ended; `fault`: what the one at fault wrote."""

    report: Json
    pids: list[int]
    codes: list[int]
    ranks: list[Json]
    fault: Json

    def faulty_at_s(self) -> float:
        """When the fault began, from the start of the capture."""
        unix_minus_mono_ns = time.time_ns() - time.monotonic_ns()
        start_ns = int(self.report["capture"]["start_unix_ns"]) - unix_minus_mono_ns
        return float(self.fault["at_ns"] - start_ns) / 1e9

    def incident(self) -> Json:
        """The only one."""
        said = [(one["class"], one["summary"]) for one in self.report["incidents"]]
        assert len(said) == 1, said
        found: Json = self.report["incidents"][0]
        return found

    def world(self) -> Json:
        """The communicator of all ranks."""
        (found,) = (comm for comm in self.report["communicators"] if comm["nranks"] == WORLD)
        return dict(found)


def play(folder: Path, *options: str, early: bool = True, **settings: str) -> Job:
    """One job; traced from its first call, or from its first steps on."""
    environment = torch_environment(**settings)
    command = [*python_command(), HERE / "launch.py", str(WORLD), HERE / "training.py", folder, *options]
    with Program(command, sim=False, env=environment) as program:
        program.wait_for("ready")
        if not early:
            program.say()
            _wait_for_first_steps(folder)
        with Tracer([program.pid]).attached() as tracer:
            if early:
                program.say()
            pids = [int(word) for word in program.wait_for("pids").split()[1:]]
            codes = [int(word) for word in program.wait_for("codes", START_S + END_S).split()[1:]]
            report = tracer.report()
    files = [folder / f"rank{rank}.json" for rank in range(WORLD)]
    ranks = [json.loads(path.read_text()) if path.exists() else {} for path in files]
    faults = [json.loads(path.read_text()) for path in folder.glob("*.fault")]
    return Job(report, pids, codes, ranks, faults[0] if faults else {})


def _wait_for_first_steps(folder: Path) -> None:
    end = time.monotonic() + START_S
    while len(list(folder.glob("*.going"))) < WORLD:
        assert time.monotonic() < end, [path.read_text()[-500:] for path in folder.glob("*.log")]
        time.sleep(0.1)


def is_about(job: Job, kind: str, rank: int) -> Json:
    """The one incident is of that class, rank and the communicator of the gradients."""
    incident, world = job.incident(), job.world()
    assert incident["class"] == kind
    assert [(c["global_rank"], c["pid"]) for c in incident["culprits"]] == [(rank, job.pids[rank])]
    assert sorted(v["global_rank"] for v in incident["victims"]) == [r for r in range(WORLD) if r != rank]
    assert world["uid"] is not None
    assert (incident["comm"], incident["comm_uid"]) == (world["id"], world["uid"])
    assert incident["op"] == "ncclAllReduce"
    return incident


@pytest.mark.parametrize("early", [True, False], ids=["from-the-start", "in-the-middle"])
def test_a_rank_that_sleeps_before_backward(early: bool, tmp_path: Path) -> None:
    options = ["--steps", "90" if early else "600", "--at", "40" if early else "500"]
    job = play(tmp_path, *options, "--fault", "sleep", "--rank", "2", early=early)
    incident = is_about(job, "NOT_ARRIVED", 2)
    assert job.codes == [0] * WORLD
    assert 0 < incident["reported_ns"] / 1e9 - job.faulty_at_s() < LIMIT_S
    innermost = next(f for f in incident["culprits"][0]["stack"] if f["kind"] == "python")
    assert (innermost["file"], innermost["line"]) == (str(HERE / "training.py"), job.fault["line"])
    assert (innermost["function"], innermost["kind"]) == ("Training.step", "python")
    assert incident["culprits"][0]["waiting_in"]["syscall"] == "clock_nanosleep"
    assert (incident["outcome"], incident["label"]) == ("resolved", None)
    assert 11.5e9 < incident["duration_ns"] < 14e9
    if early:
        says_what_was_called(job)


def says_what_was_called(job: Job) -> None:
    """Gradients, and losses of both pairs, by the program's own count; of nothing else floats were reduced."""
    world = job.world()["id"]
    rows = [row for row in job.report["collectives"] if row["op"] == "ncclAllReduce"]
    assert {row["dtype"] for row in rows} == {"float32"}
    found = {row["comm"]: (row["calls"], row["bytes"], "calls_is" in row) for row in rows}
    truth = job.ranks[0]
    assert found.pop(world) == (truth["reduces"], truth["reduced_bytes"], False)
    assert list(found.values()) == [(truth["losses"], 4 * truth["losses"], False)] * (WORLD // 2)
    for row in rows:
        assert row["calls_per_step"] == pytest.approx(row["calls"] / truth["steps"], rel=0.01)


def test_a_healthy_job(tmp_path: Path) -> None:
    job = play(tmp_path, "--seconds", "60")
    assert job.codes == [0] * WORLD
    assert job.report["incidents"] == []
    says_what_was_called(job)


def test_a_rank_that_raises(tmp_path: Path) -> None:
    """Its interpreter tidies up first; the others are ended by PyTorch's watchdog."""
    job = play(
        tmp_path, "--fault", "raise", "--rank", "3", "--timeout", "15", TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="500"
    )
    incident = is_about(job, "DIED", 3)
    assert job.codes == [-6, -6, -6, 1]
    assert (incident["outcome"], incident["label"]) == ("timed_out", None)


def test_a_rank_with_fewer_batches(tmp_path: Path) -> None:
    job = play(
        tmp_path, "--fault", "short", "--rank", "1", "--timeout", "15", TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="500"
    )
    incident = is_about(job, "LEFT", 1)
    assert job.codes == [-6, 0, -6, -6]
    assert incident["outcome"] == "timed_out"


def test_pytorch_gives_up_before_the_rank_comes(tmp_path: Path) -> None:
    options = ["--fault", "sleep-long", "--rank", "1", "--timeout", "8"]
    job = play(tmp_path, *options, TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="500")
    incident = is_about(job, "NOT_ARRIVED", 1)
    assert [job.codes[rank] for rank in (0, 2, 3)] == [-6] * 3
    assert incident["outcome"] == "timed_out"
    assert 7e9 < incident["duration_ns"] < 25e9

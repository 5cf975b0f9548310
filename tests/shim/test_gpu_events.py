"""Pairs of events through the real library, in two ranks on the simulated stack: what is told, and that nothing changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sim"))

from gpu_kit import FINISHED, QUEUED, STARTED
from nccl_kit import Nccl
from shim_kit import ROOT, SHIM, Agent, Read

PYTHON = str(ROOT / ".venv" / "bin" / "python")
EVENTS, NO_EVENTS, RISK = 8, 9, 6
COMM_WORD = 5


class End(NamedTuple):
    """Of one rank: what it said, and what its segment holds."""

    said: dict[str, Any]
    read: Read

    def told(self) -> list[tuple[int, int, int]]:
        """(kind, number, communicator), in order."""
        recs = self._recs()
        return [(int(r["kind"]), int(r["n"]), int(r["a"][COMM_WORD])) for r in recs]

    def when(self, kind: int, n: int) -> int:
        """The instant of one record of the world's."""
        recs = self._recs()
        fits = (recs["kind"] == kind) & (recs["n"] == n) & (recs["a"][:, COMM_WORD] == self.said["comm"])
        (at,) = recs["ts_ns"][fits]
        return int(at)

    def _recs(self) -> Any:
        recs = self.read.drain().recs
        recs = recs[recs["kind"] >= STARTED]
        assert (recs["flags"] == 0).all(), "no plugin told it"
        return recs[np.argsort(recs["ts_ns"], kind="stable")]


def play(agent: Agent, scenario: str, setting: str = "events", **more: str) -> list[End]:
    """The scenario on two ranks that end by themselves, without a word on stderr."""
    env = dict(
        os.environ, LD_PRELOAD=str(SHIM), STALLSCOPE_SHIM=f"socket:{agent.path}", STALLSCOPE_SHIM_GPU=setting, **more
    )
    words = [PYTHON, str(Path(__file__).parent / "events_program.py"), scenario, Nccl().unique_id().hex()]
    processes = [
        subprocess.Popen([*words, str(rank)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [(process.returncode, end[1]) for process, end in zip(processes, ended, strict=True)] == [(0, "")] * 2
    said = [json.loads(out) for out, _ in ended]
    reads = {read.segment.header.pid: read for read in agent.read}
    return [End(one, reads[one["pid"]]) for one in said]


def test_a_gpu_that_comes_late_is_seen_while_it_does_not_come(agent: Agent) -> None:
    fine, late = play(agent, "stuck")
    for end in (fine, late):
        comm, rest = end.said["comm"], [(FINISHED, 0), (QUEUED, 1), (STARTED, 1), (FINISHED, 1)]
        # The third stands behind it, and ends within the same look.
        rest += [(QUEUED, 2), (STARTED, 2), (FINISHED, 2)]
        assert Counter(end.told()) == Counter((kind, n, comm) for kind, n in rest)
        assert end.when(QUEUED, 1) < end.when(FINISHED, 1) <= end.when(FINISHED, 2)
        assert end.read.segment.gpu == EVENTS
        assert not any(end.read.segment.gpu_untold().values())
        assert end.said["threads"].count("stallscope") == 1
        assert (end.said["kept"], end.said["after"]) == (True, 0), "the runtime's last error is the program's"
    opened = late.said["opened"]
    assert fine.when(STARTED, 1) < opened - 3e8, "the one that waits is seen to have begun"
    assert late.when(QUEUED, 1) < opened - 3e8 < late.when(STARTED, 1)


def test_of_a_job_that_goes_on_nothing_is_told_but_where_it_stands(agent: Agent) -> None:
    for end in play(agent, "steps"):
        kinds = Counter(kind for kind, _, _ in end.told())
        assert kinds == {FINISHED: 2}, "the newest of each communicator"
        assert sorted(n for _, n, _ in end.told()) == [199, 200]
        assert not any(end.read.segment.gpu_untold().values())


def test_a_capture_goes_on_beside_it(agent: Agent) -> None:
    for end in play(agent, "graph"):
        assert end.said["nodes"] == 2, "the simulated NCCL's kernel and what it does; none of ours"
        assert {comm for _, _, comm in end.told()} == {end.said["comm"]}, "what is captured is not told"
        assert (QUEUED, 1, end.said["comm"]) in end.told()


def test_children_and_other_programs(agent: Agent) -> None:
    for end in play(agent, "forks"):
        assert end.said["child"] == 0
        assert (FINISHED, 1, end.said["comm"]) in end.told(), "the parent goes on"


def test_the_end_of_a_program_waits_for_nothing(agent: Agent) -> None:
    begin = time.monotonic()
    for end in play(agent, "ends"):
        assert (QUEUED, 1, end.said["comm"]) in end.told()
    assert time.monotonic() - begin < 20, "its kernel never ends"


def test_an_abort_in_a_block(agent: Agent) -> None:
    for end in play(agent, "aborts"):
        assert (QUEUED, 1, end.said["comm"]) in end.told()


@pytest.mark.parametrize(("setting", "more", "state"), [
    ("auto", {}, EVENTS), ("", {}, RISK), ("events", {"STALLSCOPE_SIM_DRIVER": "inside"}, NO_EVENTS),
])  # fmt: skip
def test_the_setting(agent: Agent, setting: str, more: dict[str, str], state: int) -> None:
    """The simulated NCCL is one in which a plugin may do harm. Inside: there is no libcuda to ask."""
    for end in play(agent, "nothing", setting, **more):
        assert end.read.segment.gpu == state
        assert end.said["threads"].count("stallscope") == (state == EVENTS)

"""No call is lost from sight, whatever the program does: records + lost + left out by sampling + under way = calls."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from shim_kit import Agent, Read, environment, run

from stallscope.capture.segment import Mode, Segment
from stallscope.wire.hook_table import BY_NAME

LAUNCH, WAIT = BY_NAME["cudaLaunchKernel"].id, BY_NAME["cudaStreamSynchronize"].id


def env(agent: Agent, stubs: Path, **more: str) -> dict[str, str]:
    return environment(stubs, STALLSCOPE_SHIM=f"socket:{agent.path}", **more)


@pytest.mark.parametrize("mode", ["full", "lite", "min"])
def test_plain_calls(agent: Agent, stubs: Path, mode: str) -> None:
    """Counts are exact in every mode; the words of a record are the function and the stream."""
    truth = run([stubs / "program", "calls", "20000"], env(agent, stubs, STALLSCOPE_SHIM_MODE=mode))
    (read,) = agent.wait_for(1)
    assert read.conserved() == truth
    assert (read.recs["a"][:, 0] == 0x1234).all()
    assert (read.recs["a"][:, 7] == 0x5678).all()
    recorded = len(read.recs)
    assert recorded == 20_000 if mode != "min" else 5 < recorded < 50
    # Not of each call: counters of some machines go in steps that are longer than a stub takes.
    assert (read.recs["dur_ns"] > 0).any() == (mode != "lite")


@pytest.mark.parametrize(("calls", "nccl"), [(3_000_000, 0), (300_000, 1)])
def test_signals_in_the_middle_of_calls(agent: Agent, stubs: Path, calls: int, nccl: int) -> None:
    """A handler that calls hooked functions, thousands of times, some of them while a record is written."""
    words = [str(stubs / "program"), "storm", str(calls), str(nccl)]
    with subprocess.Popen(words, env=env(agent, stubs), stdout=subprocess.PIPE, text=True) as process:
        (read,) = agent.wait_for(1)
        while process.poll() is None:
            read.drain(rounds=1)
        assert process.stdout is not None
        truth = json.loads(process.stdout.readline())
    assert truth.pop("in_handler") > 10
    assert read.conserved() == {api: count for api, count in truth.items() if count}
    entries = read.recs[(read.recs["hook"] == BY_NAME["ncclAllReduce"].id) & (read.recs["kind"] == 1)]
    numbers = entries["n"][entries["flags"] & 1 == 0]
    assert len(np.unique(numbers)) == len(numbers)  # no number was given twice


@pytest.mark.parametrize(("at_once", "groups"), [(1, 800), (100, 8)])
def test_short_threads(agent: Agent, stubs: Path, at_once: int, groups: int) -> None:
    """Rings are used again, and each record names its own thread."""
    truth = run([stubs / "program", "threads", str(at_once), str(groups), "10"], env(agent, stubs))
    (read,) = agent.wait_for(1)
    assert read.conserved() == truth == {"cudaLaunchKernel": 8000}
    # On a busy machine the thread that makes the segment may be put aside for long: others go on without it.
    assert read.segment.losses()["no_ring"] < at_once
    tids, counts = np.unique(read.recs["tid"], return_counts=True)
    assert (counts % 10 != 0).sum() < at_once
    assert len(tids) > at_once / 2
    assert 0 not in tids


def test_more_threads_than_rings(agent: Agent, stubs: Path) -> None:
    """Their calls are counted, and counted as lost."""
    truth = run([stubs / "program", "threads", "400", "1", "25"], env(agent, stubs))
    (read,) = agent.wait_for(1)
    assert read.conserved() == truth == {"cudaLaunchKernel": 10_000}
    lost = read.segment.losses()["no_ring"]
    # 144 threads without a ring, and first calls of the others while one of them makes the segment.
    assert 0 < lost <= 144 * 25 + 256
    assert sum(read.events.values()) == 10_000 - lost


def test_forks(agent: Agent, stubs: Path) -> None:
    """Each child makes a segment of its own and leaves its parent's alone."""
    truth = run([stubs / "program", "forks", "20", "50"], env(agent, stubs))
    reads = agent.wait_for(21)
    made = Counter[int]()
    for read in reads:
        made[read.segment.header.pid] += read.conserved()["cudaLaunchKernel"]
    parent = reads[0].segment.header.pid
    assert made.pop(parent) == truth["cudaLaunchKernel"] == 1000
    assert set(made.values()) == {50}
    assert len(made) == 20


def test_vforks(agent: Agent, stubs: Path) -> None:
    """A child on its parent's memory writes to its parent's ring."""
    truth = run([stubs / "program", "vforks", "200"], env(agent, stubs))
    (read,) = agent.wait_for(1)
    assert read.conserved() == truth == {"cudaLaunchKernel": 400}


def test_segmentation_fault(agent: Agent, stubs: Path) -> None:
    """What was published can be read afterwards."""
    truth = run([stubs / "program", "segv", "5000"], env(agent, stubs), -signal.SIGSEGV)
    (read,) = agent.wait_for(1)
    assert read.conserved() == truth


def test_killed_in_a_call(agent: Agent, stubs: Path) -> None:
    """The call that it was in is still told."""
    words = [str(stubs / "program"), "killed", "5000"]
    with subprocess.Popen(words, env=env(agent, stubs), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        truth, hanging = process.stdout.readline(), process.stdout.readline()
        assert hanging == "hanging\n"
        before_ns = time.monotonic_ns()
        process.kill()
    (read,) = agent.wait_for(1)
    made = read.conserved(in_flight={"cudaStreamSynchronize": 1})
    assert made == {"cudaLaunchKernel": 5000, "cudaStreamSynchronize": 1}
    assert "5000" in truth
    (row,) = read.segment.inflight(read.clock)
    (frame,) = row.frames
    assert (frame.hook, frame.a[0], row.tid) == (WAIT, 0x77, process.pid)
    assert before_ns - 60_000_000_000 < frame.ts_ns < before_ns + 1_000_000


def test_longjmp_out_of_calls(agent: Agent, stubs: Path) -> None:
    """Calls that never returned are lost, and later ones are nobody's part."""
    truth = run([stubs / "program", "jumps", "100"], env(agent, stubs))
    (read,) = agent.wait_for(1)
    assert read.conserved() == truth
    assert read.segment.losses()["stale"] == 100
    assert not read.recs["flags"].any()


def test_thread_that_ends_in_a_call(agent: Agent, stubs: Path) -> None:
    """An event of its own."""
    truth = run([stubs / "program", "ends"], env(agent, stubs))
    (read,) = agent.wait_for(1)
    assert read.conserved() == truth
    (row,) = read.recs[read.recs["hook"] == WAIT]
    assert row["kind"] == 3


@pytest.mark.parametrize(("status", "errors"), [(0, 0), (600, 0), (700, 1), (999, 1), (-1, 1)])
def test_results(agent: Agent, stubs: Path, status: int, errors: int) -> None:
    """A failed call is always told in full; cudaErrorNotReady is no error."""
    run([stubs / "program", "fails", str(status)], env(agent, stubs))
    (read,) = agent.wait_for(1)
    read.drain()
    (query,) = read.recs[read.recs["hook"] == BY_NAME["cudaEventQuery"].id]
    assert query["status"] == status
    assert query["a"][0] == 9
    rows = read.counts()
    assert rows["cudaEventQuery"]["errors"] == rows["cudaStreamSynchronize"]["errors"] == errors
    assert bool(query["flags"] & 16) == bool(errors)


def test_errno_is_kept(agent: Agent, stubs: Path) -> None:
    """Also by the first call, which makes the segment."""
    run([stubs / "program", "errno"], env(agent, stubs))
    agent.wait_for(1)


@pytest.mark.parametrize("mode", ["full", "min"])
def test_no_system_call_on_the_way(agent: Agent, stubs: Path, mode: str) -> None:
    """A filter kills the program at any system call during seven hundred thousand calls."""
    truth = run([stubs / "program", "quiet", "100000"], env(agent, stubs, STALLSCOPE_SHIM_MODE=mode))
    (read,) = agent.wait_for(1)
    made = read.conserved()
    assert made["cudaLaunchKernel"] == truth["cudaLaunchKernel"] == 100_001
    assert made["ncclAllReduce"] == 100_001


def test_the_agent_changes_the_mode(agent: Agent, stubs: Path) -> None:
    """At once, without losing count: how many are recorded, and all of what tells of completion."""
    words = [str(stubs / "program"), "obeys"]
    with subprocess.Popen(
        words, env=env(agent, stubs), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        (read,) = agent.wait_for(1)
        for mode, one_in, tap, calls in ((Mode.MIN, 1000.0, False, 5000), (Mode.FULL, 1.0, False, 5000),
                                         (Mode.FULL, 1e12, False, 5000), (Mode.MIN, 1e12, False, -300),
                                         (Mode.MIN, 1e12, True, -400)):  # fmt: skip
            read.segment.set_mode(mode, one_in, tap=tap, long_ns=1_000_000_000)
            process.stdin.write(f"{calls}\n")
            process.stdin.flush()
            process.stdout.readline()
            read.drain()
        process.stdin.close()
    assert read.conserved() == {"cudaLaunchKernel": 15_001, "cudaEventQuery": 700}
    assert 5001 < read.events["cudaLaunchKernel"] < 5100
    assert read.events["cudaEventQuery"] == 401  # the first call of all is always chosen


def test_a_late_agent(agent: Agent, stubs: Path) -> None:
    """It finds the segment by the name of its descriptor; what was overwritten meanwhile is counted."""
    words = [str(stubs / "program"), "obeys"]
    with subprocess.Popen(words, env=environment(stubs), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:
        assert p.stdin is not None and p.stdout is not None
        p.stdout.readline()
        p.stdin.write("100000\n")
        p.stdin.flush()
        p.stdout.readline()
        links = [fd for fd in Path(f"/proc/{p.pid}/fd").iterdir() if "memfd:stallscope-segment" in os.readlink(fd)]
        assert len(links) == 1
        assert int(links[0].name) >= 700
        fd = os.open(links[0], os.O_RDWR)
        read = Read(Segment(fd), agent.clock)
        os.close(fd)
        assert read.conserved() == {"cudaLaunchKernel": 100_001}
        assert sum(read.events.values()) == 32767
        losses = read.segment.losses()  # what was overwritten before the first look is no loss of the reader's
        assert (losses["history"], losses["overwritten"]) == (100_001 - 32766 - 1, 0)
        p.stdin.close()
    read.segment.close()

"""Vital rings keep what a reader has not taken yet, and the newest where there is no reader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from shim_kit import Agent, Read, environment, run

from stallscope.capture.segment import Segment
from stallscope.wire.hook_table import BY_NAME

SCRIPT = """
import ctypes, sys
nccl = ctypes.CDLL(sys.argv[1] + "/libnccl.so.2")
q = ctypes.c_uint64
made = 0
print("ready", flush=True)
for line in sys.stdin:
    for _ in range(int(line)):
        nccl.ncclAllReduce(q(made), q(2), q(8), 7, 0, q(0x5000), q(0x99), q(0))
        made += 1
    print(made, flush=True)
"""
SLOTS = 4096  # two records an operation
MANY = 3 * SLOTS
LEASE_S = 5
REDUCE, ENTER = BY_NAME["ncclAllReduce"].id, 1


class Obeys:
    """A program that makes as many operations as it is told."""

    def __init__(self, agent: Agent, stubs: Path) -> None:
        env = environment(stubs, STALLSCOPE_SHIM=f"socket:{agent.path}")
        words = ["/usr/bin/python3", "-c", SCRIPT, str(stubs)]
        self.process = subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def make(self, count: int) -> int:
        """So many operations; how many there are then."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@pytest.fixture
def program(agent: Agent, stubs: Path) -> Iterator[Obeys]:
    """With one operation made, so that there is a segment."""
    made = Obeys(agent, stubs)
    made.make(1)
    yield made
    made.process.kill()
    made.process.wait()


def numbers(read: Read) -> list[int]:
    """Of the operations whose entries were read, in order."""
    rows = read.recs[(read.recs["hook"] == REDUCE) & (read.recs["kind"] == ENTER)]
    found: list[int] = rows["n"].tolist()
    assert (rows["a"][:, 0] == rows["n"]).all()
    assert (np.diff(rows["ts_ns"].astype("i8")) >= 0).all()
    return found


def test_the_newest_stay_while_nobody_reads(agent: Agent, program: Obeys) -> None:
    """Without a hole up to the last one; what was before is no loss, and when it ended is known."""
    made = program.make(MANY)
    (read,) = agent.wait_for(1)
    assert read.conserved() == {"ncclAllReduce": made}
    told = numbers(read)
    assert told == list(range(made - len(told), made)) and SLOTS // 2 - 16 <= len(told) <= SLOTS // 2
    losses = read.segment.losses()
    assert losses["history"] == made - len(told)
    assert (losses["vital_full"], losses["overwritten"], losses["corrupt"]) == (0, 0, 0)
    first = read.recs[0]
    written_ns = int(first["ts_ns"]) + (int(first["dur_ns"]) if first["kind"] != ENTER else 0)
    assert abs(read.segment.whole_since_ns(read.clock) - written_ns) <= 2  # rounded


def test_old_launches_are_left_out(agent: Agent, stubs: Path) -> None:
    """Where a reader that comes late says so; the newest are taken."""
    run([stubs / "program", "calls", "5000"], environment(stubs, STALLSCOPE_SHIM=f"socket:{agent.path}"))
    (read,) = agent.wait_for(1)
    read.segment.come_late(100)
    assert read.conserved() == {"cudaLaunchKernel": 5000}
    assert read.events == {"cudaLaunchKernel": 100}
    losses = read.segment.losses()
    assert (losses["history"], losses["overwritten"]) == (4900, 0)
    assert read.segment.whole_since_ns(read.clock) == 0


@pytest.mark.parametrize("by", ["drain", "hold"])
def test_what_a_reader_has_not_taken_stays(agent: Agent, program: Obeys, by: str) -> None:
    """The newest are turned away then, and counted."""
    (read,) = agent.wait_for(1)
    read.drain()
    if by == "hold":
        time.sleep(0.6 * LEASE_S)
        read.segment.hold()
        time.sleep(0.6 * LEASE_S)
    made = program.make(MANY)
    assert read.conserved() == {"ncclAllReduce": made}
    told = numbers(read)
    assert told == list(range(1 + SLOTS // 2))
    losses = read.segment.losses()
    assert (losses["history"], losses["overwritten"]) == (0, 0)
    assert losses["vital_full"] == 2 * MANY - SLOTS
    program.make(10)
    assert read.conserved() == {"ncclAllReduce": made + 10}
    assert numbers(read)[-10:] == list(range(made, made + 10))


def test_who_only_looks_holds_nothing(agent: Agent, program: Obeys) -> None:
    """A look at whose segment it is, or by doctor."""
    (read,) = agent.wait_for(1)
    read.segment.hold()
    made = program.make(MANY)
    assert numbers(read.drain())[-1] == made - 1


def test_a_reader_that_lets_go(agent: Agent, program: Obeys) -> None:
    """From then on the newest stay at once; the next one begins with them."""
    (read,) = agent.wait_for(1)
    read.drain()
    read.segment.close()
    made = program.make(MANY)
    after = Read(Segment(agent.fds[0]), agent.clock)
    after.drain()
    told = numbers(after)
    assert told == list(range(made - len(told), made)) and len(told) > SLOTS // 2 - 16
    assert after.conserved() == {"ncclAllReduce": len(told)}  # it counts from where it came
    assert after.segment.losses()["vital_full"] == 0
    after.segment.close()


KILLED = """
import sys, time
from stallscope.capture.segment import Clock, Segment
segment = Segment(int(sys.argv[1]))
segment.drain(1, 1, Clock(), 8192)
print("read", flush=True)
time.sleep(100)
"""


def test_a_reader_that_is_killed(agent: Agent, program: Obeys) -> None:
    """What it had not taken stays for as long as it may be alive; then the newest do."""
    agent.wait_for(1)
    words = [sys.executable, "-c", KILLED, str(agent.fds[0])]
    with subprocess.Popen(words, stdout=subprocess.PIPE, pass_fds=agent.fds, text=True) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == "read\n"
        since = time.monotonic()
        reader.send_signal(signal.SIGKILL)
    program.make(MANY)
    (looks,) = agent.wait_for(1)
    if time.monotonic() - since < LEASE_S:
        assert looks.segment.losses()["vital_full"] == 2 * MANY - SLOTS
    time.sleep(LEASE_S + 0.2)
    made = program.make(MANY)
    after = Read(Segment(os.dup(agent.fds[0])), agent.clock)
    told = numbers(after.drain())
    assert told == list(range(made - len(told), made)) and len(told) > SLOTS // 2 - 16
    after.segment.close()

"""Pairs of events alone: what is recorded when, what is asked, and what is told of it. The driver is a stand-in."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gpu_kit import FINISHED, QUEUED, STARTED
from pairs_kit import (
    COMM,
    EVENTS,
    FEW,
    IN_PROGRESS,
    NO_EVENTS,
    OTHER,
    PLACES,
    REFUSALS,
    SHARED,
    SIDE,
    STREAM,
    TICK_S,
    UNTRIED,
    Pairs,
    build,
)  # fmt: skip

from stallscope.wire.hook_table import BY_NAME


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pairs"), *SHARED)


@pytest.fixture
def pairs(library: Path, tmp_path: Path) -> Any:
    """A fresh one: its state belongs to the library, so each test loads a copy."""
    copy = tmp_path / library.name
    copy.write_bytes(library.read_bytes())
    made = Pairs(copy)
    yield made
    assert made.kit.wrong == 0, "asked in another mode or context, or of what is destroyed"
    made.kit.query_status = 1  # the thread has nothing more to ask


def test_one_event_before_the_call_one_behind_it(pairs: Pairs) -> None:
    pairs.enter("ncclAllReduce")
    assert [r.stream for r in pairs.records()] == [STREAM]
    pairs.leave("ncclAllReduce")
    assert [r.stream for r in pairs.records()] == [STREAM]
    assert pairs.kit.created == 2


def test_of_what_ends_soon_only_the_newest_is_told(pairs: Pairs) -> None:
    pairs.kit.reaches_at_once = 1
    for _ in range(100):
        pairs.call()
    assert pairs.kinds(1) == [(FINISHED, 99)]
    assert pairs.kinds() == []


def test_an_operation_that_waits_in_the_queue(pairs: Pairs) -> None:
    pairs.reach(*pairs.pair())
    begin, done = pairs.pair()
    behind = pairs.pair()
    assert sorted(pairs.kinds(3)) == [(FINISHED, 0), (QUEUED, 1), (QUEUED, 2)]
    pairs.reach(behind[0])
    assert pairs.kinds() == [], "a communicator's kernels run one after the other, on whatever streams"
    pairs.reach(begin)
    assert pairs.kinds(1) == [(STARTED, 1)]
    pairs.reach(done)
    assert pairs.kinds(2) == [(FINISHED, 1), (STARTED, 2)]
    pairs.reach(behind[1])
    assert pairs.kinds(1) == [(FINISHED, 2)]
    assert pairs.kinds() == [], "that the newest has ended is said already"


def test_the_newest_of_each_stream(pairs: Pairs) -> None:
    pairs.reach(*pairs.pair())
    pairs.reach(*pairs.pair(stream=SIDE))
    pairs.pair()
    assert sorted(pairs.kinds(3)) == [(FINISHED, 0), (FINISHED, 1), (QUEUED, 2)]


def test_that_one_ended_says_nothing_of_another_stream(pairs: Pairs) -> None:
    pairs.pair(stream=SIDE)
    for _ in range(3):
        pairs.pair()
    pairs.reach(*pairs.pair())
    assert pairs.kinds(5) == [(QUEUED, n) for n in range(5)]


def test_few_of_many_that_wait_are_told(pairs: Pairs) -> None:
    for _ in range(50):
        pairs.call()
    assert pairs.kinds(8) == [(QUEUED, n) for n in range(8)]


@pytest.mark.parametrize(
    ("name", "word"),
    [(name, word) for name in BY_NAME if BY_NAME[name].kind in ("collective", "p2p") and "Signal" not in name
     for word in ["count"]],
)  # fmt: skip
def test_every_operation_with_a_stream(pairs: Pairs, name: str, word: str) -> None:
    """And none of nothing, but for transfers."""
    pairs.call(name, **{word: 0})
    assert bool(pairs.records()) == (BY_NAME[name].kind == "p2p")
    number = pairs.call(name)
    assert [r.stream for r in pairs.records()] == [STREAM, STREAM]
    assert (QUEUED, name, number, COMM) in pairs.told(1)


def test_a_group_is_one_kernel_of_each_communicator(pairs: Pairs) -> None:
    pairs.enter("ncclGroupStart")
    pairs.leave("ncclGroupStart")
    for comm in (COMM, OTHER, COMM):
        pairs.call(comm=comm, stream=STREAM if comm == COMM else SIDE)
    pairs.call("ncclSend", comm=COMM)
    pairs.enter("ncclGroupStart")
    pairs.call("ncclGroupEnd")
    assert pairs.records() == [], "NCCL only takes notes"
    pairs.enter("ncclGroupEnd")
    assert [r.stream for r in pairs.records()] == [STREAM, SIDE]
    pairs.leave("ncclGroupEnd")
    assert [r.stream for r in pairs.records()] == [STREAM, SIDE]
    assert pairs.told(2) == [(QUEUED, "ncclAllReduce", 0, COMM), (QUEUED, "ncclAllReduce", 0, OTHER)]


def test_a_group_over_streams_has_no_pair(pairs: Pairs) -> None:
    pairs.enter("ncclGroupStart")
    pairs.call()
    pairs.call(stream=SIDE)
    pairs.call(comm=OTHER)
    pairs.call("ncclGroupEnd")
    assert [r.stream for r in pairs.records()] == [STREAM] * 2
    assert {comm for _, _, _, comm in pairs.told(1)} == {OTHER}


@pytest.mark.parametrize("status", [IN_PROGRESS, 3])
def test_what_was_not_launched_when_the_call_returned_is_not_told(pairs: Pairs, status: int) -> None:
    pairs.call(status=status)
    assert [r.stream for r in pairs.records()] == [STREAM]
    pairs.kit.reaches_at_once = 1
    assert pairs.kinds() == []
    pairs.call()
    assert pairs.kinds(1) == [(FINISHED, 1)]
    assert pairs.figures == {"untold": 1}


@pytest.mark.parametrize("state", [{"capturing": 1}, {"capturing": 2}, {"capture_status": 906}])
def test_nothing_on_a_stream_that_captures_or_may(pairs: Pairs, state: dict[str, int]) -> None:
    for name, value in state.items():
        setattr(pairs.kit, name, value)
    pairs.call()
    assert (pairs.records(), pairs.figures) == ([], {})


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_a_default_stream_is_one_of_the_current_context(pairs: Pairs, stream: int) -> None:
    pairs.call(stream=stream)
    assert [r.stream for r in pairs.records()] == [stream] * 2
    pairs.kit.current = 0xBAD
    pairs.call(stream=stream)
    assert pairs.records() == []
    pairs.call(stream=STREAM)
    assert [r.stream for r in pairs.records()] == [STREAM] * 2, "a stream of its own knows its context"


@pytest.mark.parametrize("state", [{"device": 1}, {"ranks": 1}, {"ranks": -1}])
def test_of_another_device_alone_or_not_ready(pairs: Pairs, state: dict[str, int]) -> None:
    for name, value in state.items():
        setattr(pairs.kit, name, value)
    pairs.call()
    assert (pairs.records(), pairs.figures) == ([], {})
    pairs.kit.ranks, pairs.kit.device = 2, 0
    pairs.call(comm=OTHER)
    assert (len(pairs.records()), pairs.kit.watchers) == (2, 1), "one thread"


def test_a_communicator_that_never_tells_is_given_up(pairs: Pairs) -> None:
    pairs.kit.device = 1
    for _ in range(REFUSALS):
        pairs.call()
    assert pairs.figures == {}
    pairs.call()
    assert pairs.figures == {"unbound": 1}
    pairs.kit.device = 0
    pairs.call()
    assert (pairs.records(), pairs.kinds()) == ([], [])


def test_without_a_driver_there_are_none(pairs: Pairs) -> None:
    pairs.kit.has_no_driver = 1
    assert pairs.lib.kit_state() == UNTRIED, "it may be loaded later"
    pairs.call()
    assert pairs.lib.kit_state() == NO_EVENTS
    pairs.kit.has_no_driver = 0
    pairs.call()
    assert (pairs.records(), pairs.kit.watchers) == ([], 0)


@pytest.mark.parametrize("state", ["record_status", "create_status"])
def test_what_the_driver_refuses_is_counted(pairs: Pairs, state: str) -> None:
    setattr(pairs.kit, state, 700)
    pairs.call()
    assert (pairs.records(), pairs.figures) == ([], {"untold": 1})
    setattr(pairs.kit, state, 0)
    assert pairs.kinds() == []
    pairs.call()
    assert pairs.kinds(1) == [(QUEUED, 1)]


def test_of_a_broken_context_nothing_more_is_told(pairs: Pairs) -> None:
    pairs.call()
    pairs.kit.query_status = 700
    assert pairs.kinds() == []
    asked = pairs.lib.kit_queries()
    assert pairs.kinds() == []
    assert pairs.lib.kit_queries() == asked


def test_places_are_not_taken_from_what_waits(pairs: Pairs) -> None:
    for _ in range(PLACES + 3):
        pairs.call()
    assert pairs.figures == {"exhausted": 3}
    records = pairs.records()
    pairs.reach(*(r.event for r in records))
    assert (FINISHED, PLACES - 1) in pairs.kinds(1)
    pairs.call()
    assert len(pairs.records()) == 2
    assert pairs.kit.created == 2 * PLACES


def test_of_very_many_every_so_manieth_has_a_pair(tmp_path: Path) -> None:
    """Which ones is said by their number, alike on all ranks."""
    pairs = Pairs(build(tmp_path, *SHARED, rate=FEW))
    pairs.kit.reaches_at_once = 1
    end, made = time.monotonic() + 0.3, 0
    while time.monotonic() < end:
        for _ in range(20):
            pairs.call()
        made += 20
        time.sleep(0.0005)
    assert 0 < len(pairs.records()) < made
    for _ in range(3):
        time.sleep(20 * TICK_S)
        pairs.call()
        assert len(pairs.records()) == 2, "all of few"


def test_an_end_frees_the_events(pairs: Pairs) -> None:
    pairs.call()
    pairs.enter("ncclCommDestroy")
    assert (pairs.kit.created, pairs.kit.destroyed) == (2, 2)
    assert pairs.kinds() == []
    pairs.call()
    assert pairs.kit.created == 4
    assert pairs.kinds(1) == [(QUEUED, 1)]


def test_an_abort_leaves_them(pairs: Pairs) -> None:
    pairs.call()
    pairs.enter("ncclCommAbort")
    assert pairs.kit.destroyed == 0
    assert pairs.kinds() == []
    pairs.call()
    assert pairs.kinds(1) == [(QUEUED, 1)]


def test_more_communicators_than_places(pairs: Pairs) -> None:
    for i in range(130):
        pairs.call(comm=0x10000 + i)
    assert len(pairs.records()) == 2 * 128
    assert pairs.figures == {"unbound": 2}


def test_a_call_that_never_returned(pairs: Pairs) -> None:
    """An exception passed it: the next one goes on."""
    pairs.enter("ncclAllReduce")
    pairs.kit.reaches_at_once = 1
    pairs.call()
    assert pairs.kinds(1) == [(FINISHED, 1)]


def test_errno_is_kept(pairs: Pairs) -> None:
    for value in (0, errno.EDEADLK):
        ctypes.set_errno(value)
        pairs.call()
        assert ctypes.get_errno() == value


def test_after_a_fork_the_child_has_none(pairs: Pairs) -> None:
    pairs.call()
    pairs.records()
    assert pairs.lib.kit_state() == EVENTS
    child = os.fork()
    if child == 0:
        threads = len(os.listdir("/proc/self/task"))
        pairs.call()
        fine = threads == 1 and not pairs.records() and pairs.lib.kit_state() == NO_EVENTS
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pairs.call()
    assert pairs.kinds(2) == [(QUEUED, 0), (QUEUED, 1)]


PROGRAM = """
import os, sys
sys.path.insert(0, {here!r})
from pathlib import Path
from pairs_kit import Pairs
pairs = Pairs(Path({library!r}))
pairs.call()
(task,) = set(os.listdir("/proc/self/task")) - {{str(os.getpid())}}
pairs.told()  # while it starts, glibc itself blocks all
lines = Path(f"/proc/self/task/{{task}}/status").read_text().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("SigBlk")))
"""


def test_its_thread_takes_no_signal_and_ends_with_the_program(library: Path) -> None:
    """But for the two that glibc needs: 32 to cancel, 33 to change the user of all threads."""
    program = PROGRAM.format(here=str(Path(__file__).parent), library=str(library))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    blocked = int(done.stdout, 16)
    assert (done.returncode, done.stderr) == (0, "")
    assert not [s for s in range(1, 65) if s not in (9, 19, 32, 33) and not blocked >> (s - 1) & 1]
    assert not blocked & (1 << 31 | 1 << 32)


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_stress_under_sanitizers(tmp_path: Path, sanitizer: str) -> None:
    program = build(tmp_path, "-DKIT_MAIN", f"-fsanitize={sanitizer}")
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")

"""Operations numbered from records: collectives, pairs, groups, lost records, attaches in the middle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from aggregate_kit import CALL, ENTER, START, Kit, call

from stallscope.aggregate.arrivals import Arrivals
from stallscope.aggregate.numbering import COLLECTIVE, OTHER
from stallscope.aggregate.ring import Ring
from stallscope.aggregate.state import State
from stallscope.diagnose.judge import judge
from stallscope.diagnose.look import Looker
from stallscope.diagnose.view import IN_SYNC, USER
from stallscope.wire.frames import Frame, Kind

POINTER = {1: 0x5000, 2: 0x6000}
STREAM = 0x77


class Job(Kit):
    """Two ranks, processes 1 and 2, on one communicator."""

    def __init__(self, *, created: bool = True) -> None:
        super().__init__()
        self.numbers = {1: 0, 2: 0}
        for proc in (1, 2):
            self.process(proc, pid=4000 + proc, env={"RANK": str(proc - 1)})
            self.link("NCCL", proc)
        for proc in (1, 2) if created else ():
            self.init_rank(proc - 1, proc=proc, pointer=POINTER[proc])

    def init_rank(self, rank: int, **more: Any) -> None:
        """A creation that has ended by the next record."""
        super().init_rank(rank, **more)
        self.now += 6_000_000

    def call(self, proc: int, api: str, *words: int, at: int | None = None, skip: int = 0) -> None:
        """An entry with its number; `skip` numbers before it were lost."""
        self.numbers[proc] += skip
        n = self.numbers[proc]
        self.recs.append(self.record(api, ENTER, slot=proc, tid=4000 + proc, n=n, at=at, a=words))
        self.count(api, proc, calls=1 + skip)
        self.numbers[proc] += 1

    def reduce(self, proc: int, elements: int = 8, **more: Any) -> None:
        """ncclAllReduce of float32."""
        self.call(proc, "ncclAllReduce", 1, 2, elements, 7, 0, POINTER[proc], STREAM, **more)

    def send(self, proc: int, peer: int, api: str = "ncclSend") -> None:
        """ncclSend or ncclRecv."""
        self.call(proc, api, 1, 64, 7, peer, POINTER[proc], STREAM)

    def group(self, proc: int, api: str) -> None:
        """ncclGroupStart or ncclGroupEnd."""
        kind = CALL if api == "ncclGroupStart" else ENTER
        self.recs.append(self.record(api, kind, slot=proc, tid=4000 + proc))
        self.count(api, proc, calls=1)

    def state(self) -> State:
        """All of it, after a tick."""
        self.add(Kind.TICK, at_ns=self.now)
        state = State()
        for kind, body in self.frames:
            state.apply(Frame(kind, body))
        assert state.dropped is None
        return state


def arrived(state: State) -> list[int]:
    return state.operations.arrivals.arrived[state.operations.arrivals.rank_rows(0)].tolist()


def keys(state: State, rank: int) -> list[Any]:
    return [operation.key for operation in Looker(state, state.now_ns).view.ranks[rank].operations]


def test_collectives_are_numbered_by_each_rank() -> None:
    job = Job()
    for proc, times in ((1, 3), (2, 2)):
        for _ in range(times):
            job.reduce(proc)
    state = job.state()
    assert arrived(state) == [3, 2]
    assert keys(state, 0) == [(0, "c", 0), (0, "c", 1), (0, "c", 2)]
    lags = state.operations.arrivals.lagging(state.now_ns)
    assert [(lag.comm, lag.number, lag.missing) for lag in lags] == [(0, 2, [1])]


def test_a_collective_of_nothing_is_none() -> None:
    job = Job()
    job.reduce(1, elements=0)
    job.reduce(1)
    state = job.state()
    assert arrived(state) == [1, 0]
    kinds = state.operations.issuers[1].log.newest(2)["kind"].tolist()
    assert kinds == [OTHER, COLLECTIVE]


def test_pairs_are_numbered_apart_from_collectives() -> None:
    job = Job()
    job.send(1, 1)
    job.reduce(1)
    job.send(1, 1)
    job.send(2, 0, "ncclRecv")
    state = job.state()
    assert keys(state, 0) == [(0, "p", 0, 1, 0), (0, "c", 0), (0, "p", 0, 1, 1)]
    assert keys(state, 1) == [(0, "p", 0, 1, 0)]


def test_a_group_is_issued_by_its_end() -> None:
    job = Job()
    job.group(1, "ncclGroupStart")
    job.reduce(1)
    job.send(1, 1)
    open_state = job.state()
    assert (arrived(open_state), keys(open_state, 0)) == ([0, 0], [])
    job.group(1, "ncclGroupEnd")
    state = job.state()
    operations = Looker(state, state.now_ns).view.ranks[0].operations
    assert arrived(state) == [1, 0]
    assert len({operation.batch for operation in operations}) == 1
    assert {operation.enter_ns for operation in operations} == {int(job.now)}


def test_a_hole_in_the_numbers_is_a_lost_record_and_counts() -> None:
    job = Job()
    job.reduce(1)
    job.reduce(1, skip=2)
    state = job.state()
    place = state.operations.issuers[1].places[POINTER[1]]
    assert (arrived(state), place.missed) == ([4, 0], 2)


def test_what_was_lost_in_the_middle_shifts_only_what_came_after_it() -> None:
    job = Job()
    for skip in (0, 0, 3, 0):
        job.reduce(1, skip=skip)
    assert keys(job.state(), 0) == [(0, "c", 0), (0, "c", 1), (0, "c", 5), (0, "c", 6)]


def test_a_record_behind_later_ones_gets_the_number_that_was_left_for_it() -> None:
    """And the same one a second time none."""
    job = Job()
    for n in (0, 2, 1, 1, 3, 2):
        job.numbers[1] = n
        job.reduce(1, elements=8 + n)
        job.add(Kind.TICK, at_ns=job.now)
    state = job.state()
    found = Looker(state, state.now_ns).view.ranks[0].operations
    assert [(op.key[-1], op.signature.elements) for op in found] == [(0, 8), (2, 10), (1, 9), (3, 11)]
    assert (arrived(state)[0], state.operations.issuers[1].places[POINTER[1]].missed) == (4, 0)


def test_the_place_of_a_lost_number_does_not_keep_an_old_operation() -> None:
    arrivals = Arrivals()
    comm = arrivals.add(2, START)
    columns = arrivals.history(comm)[0].shape[1]
    arrivals.came(comm, 0, np.arange(columns), np.full(columns, START), np.ones(columns, np.uint64))
    arrivals.came(comm, 0, np.array([columns + 5]), np.array([START + 1]), np.ones(1, np.uint64))
    assert arrivals.history(comm)[0][0, :7].tolist() == [0, 0, 0, 0, 0, START + 1, START]


def test_a_hole_among_sends_leaves_nothing_to_build_on() -> None:
    job = Job()
    job.send(1, 1)
    job.reduce(1, skip=1)
    state = job.state()
    assert not state.operations.arrivals.trusted[0]
    assert not Looker(state, state.now_ns).view.comms[0].aligned


def test_another_communicator_at_the_same_address_starts_anew() -> None:
    job = Job()
    job.reduce(1)
    job.numbers[1] = 0
    other = bytes(range(9, 17)) + bytes(120)
    job.init_rank(0, proc=1, pointer=POINTER[1], uid=other)
    job.reduce(1)
    state = job.state()
    fresh = state.operations.issuers[1].places[POINTER[1]]
    assert (fresh.collectives, fresh.comm) == (1, 1)
    assert keys(state, 0)[-1][1:] == ("c", 0)
    assert len(keys(state, 0)) == 1, "the other one's operations are numbers of another communicator"


def test_without_a_known_beginning_numbers_prove_nothing() -> None:
    job = Job(created=False)
    job.reduce(1)
    state = job.state()
    view = Looker(state, state.now_ns).view
    assert (view.ranks[0].operations, view.ranks[0].gap) == ([], True)


def test_many_processes_in_one_frame_keep_their_own_numbers() -> None:
    job = Job()
    for at in range(50):
        job.reduce(1 + at % 2)
    assert arrived(job.state()) == [25, 25]


@pytest.mark.parametrize("sizes", [[3], [64, 1], [1] * 70, [200], [5, 500, 7]])
def test_the_ring_keeps_the_newest(sizes: list[int]) -> None:
    ring, told = Ring(np.dtype("<i8"), 128), 0
    for size in sizes:
        ring.append(np.arange(told, told + size))
        told += size
    kept = min(told, len(ring))
    assert ring.newest(kept).tolist() == list(range(told - kept, told))
    assert (ring.total, len(ring)) == (told, kept)


def test_lagging_counts_from_when_it_was_first_seen_where_it_stands() -> None:
    arrivals = Arrivals()
    comm = arrivals.add(4, START)
    arrivals.present[:4] = True
    assert arrivals.lagging(START) == []
    for rank in (0, 1, 3):
        arrivals.came(comm, rank, np.arange(2), np.array([START, START]), np.zeros(2, np.uint64))
    arrivals.lagging(START + 10)
    (lag,) = arrivals.lagging(START + 1000, older_than_ns=900)
    assert (lag.number, lag.missing, lag.since_ns) == (0, [2], START)
    arrivals.came(comm, 2, np.arange(1), np.array([START]), np.zeros(1, np.uint64))
    (lag,) = arrivals.lagging(START + 1001)
    assert (lag.number, lag.missing, lag.since_ns) == (1, [2], START + 1001)
    assert arrivals.lagging(START + 1001, older_than_ns=1) == []


@pytest.mark.parametrize(("parent", "env"), [(None, {}), (1, {"RANK": "0"})], ids=["launcher", "loader"])
def test_who_only_loaded_nccl_is_no_rank(parent: int | None, env: dict[str, str]) -> None:
    """torchrun maps NCCL as its ranks do, and so do the workers that a rank forks."""
    job = Job()
    job.process(3, pid=4003, parent=parent, env=env)
    job.link("NCCL", 3)
    for proc in (1, 2):
        job.reduce(proc)
    state = job.state()
    assert [rank.proc for rank in Looker(state, state.now_ns).view.ranks] == [1, 2]


def test_two_ranks_of_one_process_stand_where_their_own_threads_stand() -> None:
    kit = Kit()
    kit.process(1, pid=4001)
    kit.link("NCCL")
    for rank, pointer in enumerate(POINTER.values()):
        kit.init_rank(rank, pointer=pointer)
        kit.now += 6_000_000
    for n in range(4):
        for rank, pointer in enumerate(POINTER.values()):
            if (n, rank) != (3, 1):
                words = (1, 2, 8, 7, 0, pointer, STREAM)
                kit.recs.append(kit.record("ncclAllReduce", ENTER, tid=100 + rank, n=n, a=words))
                kit.count("ncclAllReduce", calls=1)
    kit.inflight([[1, 100, [call("cudaStreamSynchronize", kit.now, a=(STREAM,))]]], at=kit.now)
    kit.add(Kind.TICK, at_ns=kit.now)
    state = State()
    for kind, body in kit.frames:
        state.apply(Frame(kind, body))
    view = Looker(state, state.now_ns).view
    assert [rank.state for rank in view.ranks] == [IN_SYNC, USER]
    assert [(verdict.kind, verdict.culprits) for verdict in judge(view)] == [("NOT_ARRIVED", (1,))]

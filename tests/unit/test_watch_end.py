"""The diagnosis at the end of a job: who is dead waits for nobody."""

from __future__ import annotations

from aggregate_kit import DONE, ENTER, ENTERED, Kit, call

from stallscope.diagnose.follow import Follower
from stallscope.wire.frames import Frame, Kind

TICK_NS = 250_000_000
STREAM = 0x5000


def two_ranks() -> Kit:
    """Two processes with a communicator of both; after ten collectives rank 1 does not come to the next."""
    kit = Kit()
    for proc in (1, 2):
        kit.process(proc=proc, pid=100 + proc)
        kit.link("NCCL", proc=proc)
        kit.link("CUDART", proc=proc)
        kit.init_rank(proc - 1, proc=proc, pointer=0xA000 * proc)
    for n in range(11):
        for proc in (1, 2) if n < 10 else (1,):
            kit.recs += reduction(kit, proc, n)
    kit.flush()
    return kit


def reduction(kit: Kit, proc: int, n: int) -> list:
    words = {"slot": proc, "tid": 100 + proc, "n": n, "a": (1, 2, 1024, 7, 0, 0xA000 * proc, STREAM)}
    enter = kit.record("ncclAllReduce", ENTER, **words)
    at = int(enter["ts_ns"][0])
    kit.count("ncclAllReduce", proc, calls=1)
    return [enter, kit.record("ncclAllReduce", DONE, at=at, ns=5, flags=ENTERED, **words)]


def ticks(kit: Kit, seconds: float, waits: bool) -> None:
    """Looks at rank 0 inside a synchronize; capture's clock goes on."""
    since = kit.now
    for _ in range(int(seconds * 1e9) // TICK_NS):
        kit.now += TICK_NS
        if waits:
            kit.inflight([[1, 101, [call("cudaStreamSynchronize", since, a=(STREAM,))]]], final=False)
        kit.add(Kind.TICK, at_ns=kit.now)


def incidents(kit: Kit) -> list[tuple[str, str]]:
    follower = Follower()
    kit.flush()
    for kind, body in kit.frames:
        follower.apply(Frame(kind, body))
    assert follower.state.dropped is None
    return [(incident.kind, incident.outcome) for incident in follower.watch.incidents]


def die(kit: Kit, *procs: int) -> None:
    for proc in procs:
        kit.now += 1000
        kit.add(Kind.EXIT, proc=proc, at_ns=kit.now, code=None, signal=9)


def test_a_block_is_one_incident() -> None:
    kit = two_ranks()
    ticks(kit, 5, waits=True)
    assert incidents(kit) == [("NOT_ARRIVED", "running")]


def test_when_all_have_died_nobody_waits() -> None:
    kit = two_ranks()
    ticks(kit, 5, waits=True)
    die(kit, 2, 1)
    ticks(kit, 4, waits=False)
    assert incidents(kit) == [("NOT_ARRIVED", "aborted")]


def test_a_death_that_others_wait_for_is_one() -> None:
    kit = two_ranks()
    die(kit, 2)
    ticks(kit, 5, waits=True)
    die(kit, 1)
    ticks(kit, 2, waits=False)
    assert incidents(kit) == [("DIED", "died")]

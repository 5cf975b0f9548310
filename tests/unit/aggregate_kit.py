"""Synthetic frame streams for the tests of everything behind the socket."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from stallscope.aggregate.state import State
from stallscope.diagnose.incident import Findings, Found
from stallscope.output.report import build_report
from stallscope.wire.columns import COUNT, REC, TIME, UID_REC
from stallscope.wire.frames import Frame, Kind, encode
from stallscope.wire.hook_table import BY_NAME, HOOKS

CALL, ENTER, DONE, ABANDONED = range(4)
NESTED, ENTERED, NO_OUT = 1, 2, 8
START = 1_000_000_000_000
UID = bytes(range(1, 9)) + b"\x02\x00\xa3\x69\x0a\x00\x00\x07" + bytes(112)


def hello(**changes: Any) -> dict[str, Any]:
    """Body of a HELLO."""
    body = {
        "version": "0.1.0", "start_mono_ns": START, "start_unix_ns": 1_700_000_000_123_456_789, "host": "node7",
        "kernel": "6.18", "backend": "bcc", "sources": ["bpf"], "targets": [4242], "sample_one_in": 1.0,
        "long_ns": 200_000, "hooks": [[h.id, h.library, h.name, h.kind, h.time_id >= 0] for h in HOOKS], "limits": {},
    }  # fmt: skip
    return body | changes


def bucket(ns: int) -> int:
    """The histogram bucket of a duration, as BPF computes it."""
    if ns < 128:
        return 0
    e = ns.bit_length() - 1
    return min(159, ((e - 7) << 2) + ((ns >> (e - 2)) & 3))


class Kit:
    """Builds a stream frame by frame and keeps the books that BPF keeps."""

    def __init__(self, **changes: Any) -> None:
        self.frames: list[tuple[int, dict[str, Any]]] = [(Kind.HELLO, hello(**changes))]
        self.recs: list[np.ndarray] = []
        self.counts: dict[tuple[int, int], np.ndarray] = defaultdict(lambda: np.zeros(1, COUNT))
        self.times: dict[tuple[int, int], np.ndarray] = defaultdict(lambda: np.zeros(1, TIME))
        self.now = START

    def add(self, kind: int, **body: Any) -> None:
        """A frame, after the records made so far."""
        self.flush()
        self.frames.append((kind, body))

    def process(self, proc: int = 1, slot: int | None = None, pid: int = 4242, **more: Any) -> None:
        """A process and its slot."""
        body = {"proc": proc, "pid": pid, "ns_pid": None, "ppid": 1, "parent": None, "name": "python3",
                "cmdline": ["python3", "train.py"], "container_id": None, "start_ns": START - 5_000,
                "at_ns": START}  # fmt: skip
        self.add(Kind.PROCESS, **(body | more))
        self.add(Kind.SLOT, slot=slot or proc, proc=proc, at_ns=START)

    def link(self, library: str, proc: int = 1, late_ns: int = 0) -> None:
        """A linked library."""
        ids = [h.id for h in HOOKS if h.library == library]
        self.add(Kind.LINK, proc=proc, library=library, path=f"/usr/lib/{library}.so", build_id=None, hooks=ids,
                 at_ns=START + 1000, appeared_ns=START + 1000 - late_ns, method="uprobe_multi", missing=[])  # fmt: skip

    def record(self, api: str, kind: int, *, slot: int = 1, tid: int = 4242, ns: int = 0, at: int | None = None,
               flags: int = 0, n: int = 0, status: int = 0, a: tuple[int, ...] = ()) -> np.ndarray:  # fmt: skip
        """One wire_rec, not sent."""
        self.now += 10
        rec = np.zeros(1, REC)
        for name, value in {"ts_ns": self.now if at is None else at, "dur_ns": ns, "tgid": 4242, "tid": tid,
                            "hook": BY_NAME[api].id, "kind": kind, "flags": flags, "slot": slot, "n": n,
                            "status": status}.items():  # fmt: skip
            rec[name] = value
        rec["a"][0, : len(a)] = a
        return rec

    def count(self, api: str, proc: int = 1, **columns: int) -> None:
        """Add to the counters of a hook."""
        for name, value in columns.items():
            self.counts[proc, BY_NAME[api].id][name] += value

    def launch(self, api: str = "cudaLaunchKernel", times: int = 1, proc: int = 1, *, nested: bool = False) -> None:
        """Recorded calls without return probe."""
        for _ in range(times):
            self.recs.append(self.record(api, CALL, slot=proc, flags=NESTED * nested))
        self.count(api, proc, calls=times, nested=times * nested)

    def time(self, api: str, ns: int, proc: int = 1, *, nested: bool = False) -> None:
        """Add a duration to the histogram."""
        row = self.times[proc, BY_NAME[api].time_id + nested]
        row["n"] += 1
        row["sum_ns"] += ns
        row["max_ns"] = max(int(row["max_ns"][0]), ns)
        row["hist"][0, bucket(ns)] += 1

    def wait(self, api: str = "cudaStreamSynchronize", ns: int = 1_000_000, proc: int = 1, *, recorded: bool = True,
             nested: bool = False, status: int = 0) -> None:  # fmt: skip
        """A call that returned."""
        if recorded:
            self.recs.append(self.record(api, DONE, slot=proc, ns=ns, flags=NESTED * nested, status=status))
        self.time(api, ns, proc, nested=nested)
        self.count(api, proc, calls=1, nested=nested, errors=status != 0, sampled_out=not recorded)

    def uid(self, rec: np.ndarray, uid: bytes = UID) -> None:
        """Send a record with a unique id."""
        row = np.zeros(1, UID_REC)
        row["rec"], row["uid"] = rec, np.frombuffer(uid, "u1")
        self.add(Kind.UIDS, count=1, data=row.tobytes())

    def init_rank(self, rank: int, *, proc: int = 1, uid: bytes = UID, pointer: int = 0, status: int | None = 0,
                  nranks: int = 2, api: str = "ncclCommInitRank") -> None:  # fmt: skip
        """A communicator creation; `status` None: it does not return."""
        begin = self.record(api, ENTER, slot=proc, tid=100 + rank, a=(0x7000, nranks, rank))
        self.uid(begin, uid)
        self.count(api, proc, calls=1)
        if status is None:
            return
        self.time(api, 5_000_000, proc)
        self.count(api, proc, errors=status not in (0, 7))
        flags = ENTERED | (NO_OUT if not pointer else 0)
        done = self.record(api, DONE, slot=proc, tid=100 + rank, at=int(begin["ts_ns"][0]), ns=5_000_000, flags=flags,
                           status=status, a=(0x7000, nranks, rank, 0, 0, 0, 0, pointer))  # fmt: skip
        self.recs.append(done)

    def site(self, number: int, places: list[tuple[str, int, str]], durations: list[int], *, proc: int = 1,
             api: str = "cudaStreamSynchronize", why: str | None = None, what: int | None = None,
             idle: tuple[int, int] = (0, 0)) -> None:  # fmt: skip
        """A Python stack (file, line, function; innermost first) and what was counted there."""
        frames = [[*place, "python"] for place in places]
        self.add(Kind.SITE, at_ns=self.now, proc=proc, id=number, hook=BY_NAME[api].id, tid=4242, frames=frames, cut=False,
                 why=why, what=what)  # fmt: skip
        buckets = sorted(bucket(ns) for ns in durations)
        pairs = [n for b in sorted(set(buckets)) for n in (b, buckets.count(b))]
        row = [number, len(durations), sum(durations), max(durations), self.now, pairs, *idle]
        self.add(Kind.SITES, at_ns=self.now, proc=proc, rows=[row])

    def flush(self) -> None:
        """Send the records made so far."""
        if self.recs:
            data = np.concatenate(self.recs).tobytes()
            self.frames.append((Kind.EVENTS, {"count": len(self.recs), "data": data}))
            self.recs = []

    def counters(self) -> None:
        """COUNTS frames with all rows."""
        for proc in sorted({key[0] for key in self.counts}):
            hooks = [key[1] for key in self.counts if key[0] == proc]
            times = [key[1] for key in self.times if key[0] == proc]
            self.add(Kind.COUNTS, proc=proc, at_ns=self.now, hooks=hooks, times=times,
                     counts=b"".join(self.counts[proc, h].tobytes() for h in hooks),
                     timed=b"".join(self.times[proc, t].tobytes() for t in times))  # fmt: skip

    def inflight(self, rows: list[Any], *, final: bool = True, at: int | None = None) -> None:
        """An INFLIGHT frame."""
        self.add(Kind.INFLIGHT, at_ns=self.now if at is None else at, final=final, rows=rows)

    def bye(self) -> Kit:
        """Counters, costs and the farewell."""
        self.counters()
        self.add(
            Kind.COST,
            at_ns=self.now,
            cpu_ns=7_000_000,
            rss_bytes=30 << 20,
            processes={"capture": [5_000_000, 20 << 20]},
        )
        self.add(Kind.BYE, at_ns=START + 10_000_000_000, reason="duration")
        return self

    def encoded(self) -> list[bytes]:
        """Each frame's bytes."""
        self.flush()
        return [encode(Kind(kind), body) for kind, body in self.frames]

    def state(self) -> State:
        """The state of the stream so far."""
        self.flush()
        state = State()
        for kind, body in self.frames:
            state.apply(Frame(kind, body))
        return state

    def report(self, findings: Findings | None = None) -> dict[str, Any]:
        """The report of the stream so far, with these findings."""
        return build_report(self.state(), findings or Found())


def one(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """The only row with these values."""
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    assert len(found) == 1, (wanted, found)
    return found[0]


def call(api: str, ts: int, *, n: int = 0, flags: int = 0, a: tuple[int, ...] = ()) -> list[Any]:
    """A row of an INFLIGHT frame's thread."""
    return [BY_NAME[api].id, ts, n, flags, [*a, *([0] * (8 - len(a)))]]


def small() -> Kit:
    """A stream with a bit of everything."""
    kit = Kit()
    kit.process()
    kit.link("CUDART")
    kit.link("NCCL", late_ns=500)
    kit.launch(times=3)
    for ns in (300_000, 2_000_000, 40_000):
        kit.wait(ns=ns)
    kit.wait(ns=10, recorded=False)
    kit.site(1, [("/job/train.py", 12, "step"), ("/job/train.py", 40, "main")], [300_000, 2_000_000])
    kit.wait("cudaMalloc", 70_000, status=2)
    kit.init_rank(0, pointer=0xABC000)
    kit.add(Kind.COMM, at_ns=kit.now, proc=1, pointer=0xDEF000, by="table", rank_at=0x1000, version="2.27.5",
            start=(0x0280028002800280).to_bytes(8, "little"), samples=[[4, 1, 2, 3, 4, 5]],
            data=bytes(8) + b"\7" * 16 + (1).to_bytes(4, "little") + (2).to_bytes(4, "little") + bytes(32))  # fmt: skip
    kit.add(Kind.TICK, at_ns=kit.now)
    kit.add(
        Kind.INFERRED,
        proc=1,
        tid=77,
        hook=BY_NAME["cudaDeviceSynchronize"].id,
        since_ns=START + 5,
        at_ns=kit.now,
        ended=None,
    )
    kit.inflight([[1, 4243, [call("cudaEventSynchronize", kit.now - 4_000)]]])
    kit.count("cudaEventSynchronize", calls=1)
    kit.add(Kind.NOTE, at_ns=kit.now, proc=1, text="a note")
    kit.add(Kind.CONTEXT, at_ns=kit.now, proc=1, env={"RANK": "1", "OTEL_X": "a=b"}, like=None, overwritten=False, seen=True,
            gone=["OTEL_X"], own={"LOCAL_RANK": "0"})  # fmt: skip
    kit.add(Kind.PLACE, at_ns=kit.now, proc=1, last_ns=START, thread=[4242, "x", "S", "read", "w", "/f", 0])
    kit.add(Kind.LOST, at_ns=kit.now, places={"bulk ring full": 0, "vital ring full": 0})
    devices = [[0, "GPU-0", 99, 78_000, 700_000, 1755, 1980, 5 << 30, 0, [4242]], [1, *[None] * 8, []]]
    kit.add(Kind.GPU, at_ns=kit.now, note="NVML: GPU 1: lost", devices=devices)
    kit.add(Kind.WITNESS, at_ns=kit.now, source="ras", says="NCCL 2.28.9: 1 communicator", detail={"pids": [4242]})
    return kit.bye()

"""NCCL through the shim: identities, numbers, words; and what the eBPF probes say of the same calls."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shim_kit import ROOT, SHIM, Agent, Read, environment, run

from stallscope.wire.columns import UID_REC, records
from stallscope.wire.frames import FILE_HEADER_BYTES, Decoder, Kind
from stallscope.wire.hook_table import BY_ID, BY_NAME

SCRIPT = """
import ctypes, sys, threading
nccl = ctypes.CDLL(sys.argv[1] + "/libnccl.so.2")
cuda = ctypes.CDLL(sys.argv[1] + "/libcudart.so.12")
class Id(ctypes.Structure):
    _fields_ = [("b", ctypes.c_char * 128)]
uid, comms = Id(), []
assert nccl.ncclGetUniqueId(ctypes.byref(uid)) == 0
for rank in range(3):
    comm = ctypes.c_uint64()
    if rank == 1:
        assert nccl.ncclCommInitRankConfig(ctypes.byref(comm), 4, uid, rank, None) == 0
    else:
        assert nccl.ncclCommInitRank(ctypes.byref(comm), 4, uid, rank) == 0
    comms.append(comm)
def reduce(comm, count):
    q = ctypes.c_uint64
    nccl.ncclAllReduce(q(1), q(2), q(count), 7, 0, comm, q(0x99), q(0))
def many():
    for i in range(500):
        reduce(comms[0], i)
threads = [threading.Thread(target=many) for _ in range(4)]
for t in threads: t.start()
for t in threads: t.join()
nccl.ncclGroupStart()
reduce(comms[1], 10); reduce(comms[2], 20)
nccl.ncclGroupEnd()
q = ctypes.c_uint64
nccl.ncclBcast(q(1), q(5), 7, 0, comms[1], q(0x99))
nccl.ncclCommDestroy(comms[2], q(0), q(0), q(0), q(0), q(0), q(0), q(0))
"""
ENTER, DONE, CALL = 1, 2, 0
UID = bytes(range(1, 129))


@pytest.fixture
def read(agent: Agent, stubs: Path) -> Read:
    """The script, run and read."""
    env = environment(stubs, STALLSCOPE_SHIM=f"socket:{agent.path}")
    run(["/usr/bin/python3", "-c", SCRIPT, stubs], env)
    (found,) = agent.wait_for(1)
    return found


def of(read: Read, api: str, kind: int) -> np.ndarray:
    rows = read.recs[(read.recs["hook"] == BY_NAME[api].id) & (read.recs["kind"] == kind)]
    return rows


def test_every_call_is_conserved(read: Read) -> None:
    """And entry and return of each are records."""
    made = read.conserved()
    assert made["ncclAllReduce"] == 2002
    assert len(of(read, "ncclAllReduce", ENTER)) == len(of(read, "ncclAllReduce", DONE)) == 2002


def test_unique_ids(read: Read) -> None:
    """At the return of ncclGetUniqueId, at the entry of what creates."""
    read.drain()
    assert read.uids == [
        ("ncclGetUniqueId", DONE, UID),
        ("ncclCommInitRank", ENTER, UID),
        ("ncclCommInitRankConfig", ENTER, UID),
        ("ncclCommInitRank", ENTER, UID),
    ]


def test_new_communicators(read: Read) -> None:
    """Their addresses stand in the return; the table says what is known of them, and no rank of one that is gone."""
    read.drain()
    rows = np.concatenate([of(read, "ncclCommInitRank", DONE), of(read, "ncclCommInitRankConfig", DONE)])
    assert sorted(rows["a"][:, 7].tolist()) == [0x2000, 0x3000, 0x4000]
    assert sorted(rows["a"][:, 2].tolist()) == [0, 1, 2]
    comms = {c.pointer: c for c in read.segment.comms()}
    assert [(comms[p].rank, comms[p].nranks, comms[p].uid, comms[p].next) for p in (0x2000, 0x3000, 0x4000)] == [
        (0, 4, UID, 2000), (1, 4, UID, 2), (None, None, UID, 1)
    ]  # fmt: skip
    assert comms[0x3000].last == (BY_NAME["ncclBcast"].id, 5, 7, 0)
    assert read.segment.losses()["comms_made"] == 3


def test_numbers_have_no_holes(read: Read) -> None:
    """Four threads number the operations of one communicator."""
    read.drain()
    rows = of(read, "ncclAllReduce", ENTER)
    rows = rows[rows["a"][:, 5] == 0x2000]
    assert sorted(rows["n"].tolist()) == list(range(2000))
    assert len(np.unique(rows["tid"])) == 4
    assert (rows["a"][:, [0, 1, 3, 4, 6]] == [1, 2, 7, 0, 0x99]).all()


def test_one_inside_the_other(read: Read) -> None:
    """ncclBroadcast inside ncclBcast is no operation of its own; operations of a group are."""
    read.drain()
    (inner,), (outer,) = of(read, "ncclBroadcast", ENTER), of(read, "ncclBcast", ENTER)
    assert inner["flags"] & 1
    assert not outer["flags"] & 1
    assert (outer["n"], outer["depth"], inner["depth"]) == (1, 0, 1)
    assert len(of(read, "ncclGroupStart", CALL)) == 1


def test_a_full_vital_ring(agent: Agent, stubs: Path) -> None:
    """Nobody reads: the newest are kept, whole and without a hole, what was before is history, and the table goes on."""
    script = SCRIPT.replace("range(500)", "range(50000)")
    run(["/usr/bin/python3", "-c", script, stubs], environment(stubs, STALLSCOPE_SHIM=f"socket:{agent.path}"))
    (read,) = agent.wait_for(1)
    made = read.conserved()
    assert made["ncclAllReduce"] == 200_002
    losses = read.segment.losses()
    assert losses["history"] > 100_000 and losses["corrupt"] == losses["vital_full"] == losses["overwritten"] == 0
    rows = of(read, "ncclAllReduce", ENTER)
    rows = rows[rows["a"][:, 5] == 0x2000]
    tids = np.unique(rows["tid"])
    assert len(tids) == 4
    for tid in tids:
        mine = rows["n"][rows["tid"] == tid]
        assert len(mine) > 2000 and (np.diff(mine.astype("i8")) > 0).all()
    assert rows["n"].max() == 199_999
    assert 0 < read.segment.whole_since_ns(read.clock) < int(rows["ts_ns"].max())
    assert {c.pointer: c.next for c in read.segment.comms()}[0x2000] == 200_000


ALONE = """
import ctypes, sys
cuda = ctypes.CDLL(sys.argv[1] + "/libcudart.so.12")
nccl = ctypes.CDLL(sys.argv[1] + "/libnccl.so.2")
class Id(ctypes.Structure):
    _fields_ = [("b", ctypes.c_char * 128)]
stream, memory, p, n = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p, ctypes.c_size_t
assert cuda.cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
assert cuda.cudaMalloc(ctypes.byref(memory), n(4096)) == 0
print("ready", flush=True)
sys.stdin.readline()
comms = []
for i in range(3):
    uid, comm = Id(), p()
    assert nccl.ncclGetUniqueId(ctypes.byref(uid)) == 0
    if i == 2:
        assert nccl.ncclCommInitRankConfig(ctypes.byref(comm), 1, uid, 0, None) == 0
    else:
        assert nccl.ncclCommInitRank(ctypes.byref(comm), 1, uid, 0) == 0
    comms.append(comm)
child = p()
assert nccl.ncclCommSplit(comms[0], 0, 5, ctypes.byref(child), None) == 0
for comm in [*comms, child] * 20:
    assert nccl.ncclAllReduce(memory, memory, n(8), 7, 0, comm, stream) == 0
    assert nccl.ncclReduce(memory, memory, n(8), 7, 2, 0, comm, stream) == 0
    assert nccl.ncclBcast(memory, n(8), 7, 0, comm, stream) == 0
    assert nccl.ncclAllGather(memory, memory, n(2), 7, comm, stream) == 0
    assert nccl.ncclGroupStart() == 0
    assert nccl.ncclSend(memory, n(1), 7, 0, comm, stream) == 0
    assert nccl.ncclRecv(memory, n(1), 7, 0, comm, stream) == 0
    assert nccl.ncclGroupEnd() == 0
    nccl.ncclAllReduce(memory, memory, n(8), 99, 0, comm, stream)
assert nccl.ncclCommDestroy(child) == 0
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, _bpf_refusal: str) -> Iterator[tuple[Read, np.ndarray]]:
    """One program, seen by both from before its first NCCL call: (segment, records of BPF)."""
    if _bpf_refusal or os.environ.get("STALLSCOPE_ROOT_TESTS") == "0":
        pytest.skip(_bpf_refusal or "STALLSCOPE_ROOT_TESTS=0")
    folder = tmp_path_factory.mktemp("both")
    recording = folder / "alone.stall"
    # Under another name attach does not know the shim, and sets its probes.
    unknown = shutil.copy(SHIM, folder / "libunknown.so")
    with Agent(folder) as agent:
        sim = ROOT / "build/sim/lib"
        env = environment(sim, STALLSCOPE_SHIM=f"socket:{agent.path}") | {"LD_PRELOAD": str(unknown)}
        words = ["/usr/bin/python3", "-c", ALONE, str(sim)]
        with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdin is not None and program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            probes = start_probes(program.pid, "--sample", "1/1", "-o", str(recording))
            program.stdin.write("go\n")
            program.stdin.close()
            probes.communicate()
        assert program.returncode == 0
        (read,) = agent.wait_for(1)
        yield read.drain(), of_recording(recording)


def of_recording(path: Path) -> np.ndarray:
    parts = []
    for frame in Decoder().feed(path.read_bytes()[FILE_HEADER_BYTES:]):
        if frame.kind == Kind.EVENTS:
            parts.append(records(frame.body["data"]))
        elif frame.kind == Kind.UIDS:
            parts.append(np.frombuffer(frame.body["data"], UID_REC)["rec"])
    return np.concatenate(parts)


NARROW = ("dtype", "redop", "root", "peer", "nranks", "rank", "color", "key", "flags", "ndev", "nid")  # C ints


def test_records_are_what_probes_record(both: tuple[Read, np.ndarray]) -> None:
    """Of each NCCL function, in the order of its calls: kinds, flags, numbers, results, and every argument."""
    read, probed = both
    hooks = [hook for hook in np.unique(read.recs["hook"]).tolist() if BY_ID[hook].library == "NCCL"]
    assert len(hooks) == 14
    for hook in hooks:
        name = BY_ID[hook].name
        ours, theirs = (r[r["hook"] == hook] for r in (read.recs, probed))
        ours, theirs = (r[np.lexsort((r["kind"], r["ts_ns"]))] for r in (ours, theirs))
        assert len(ours) == len(theirs), name
        for field in ("kind", "status", "tid", "depth", "n"):
            assert (ours[field] == theirs[field]).all(), (name, field, ours[field][:9], theirs[field][:9])
        long = np.uint8(16)  # or not is a matter of time
        assert (ours["flags"] | long == theirs["flags"] | long).all(), name
        words = [word for word in BY_ID[hook].arguments.split() if word != "uid[128]"]
        for i, word in enumerate(words[:8]):
            mask = np.uint64(0xFFFFFFFF if word in NARROW else 0xFFFFFFFFFFFFFFFF)
            assert ((ours["a"][:, i] ^ theirs["a"][:, i]) & mask == 0).all(), (name, word)
        if BY_ID[hook].cookie >> 48 & 15:
            assert (ours["a"][:, 7] == theirs["a"][:, 7]).all(), name


MILLION = [str(ROOT / "build/targets/million"), "20000", "100", "500"]


def run_million(env: dict[str, str], between: Callable[[int], Any]) -> tuple[dict[str, Any], Any]:
    """(truth, what `between` returned when the program stood before its counted calls)."""
    with subprocess.Popen(MILLION, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdin is not None and job.stdout is not None
        job.stdout.readline()
        found = between(job.pid)
        job.stdin.write("go\n")
        job.stdin.flush()
        return json.loads(job.stdout.readline()), found


def start_probes(pid: int, *options: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "stallscope.cli.main", "attach", str(pid), "--json", *options]
    probes = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert probes.stderr is not None
    while "attached to PID" not in probes.stderr.readline():
        pass
    return probes


def read_so_far(agent: Agent) -> dict[str, dict[str, int]]:
    """The counters count what was read: all of it."""
    (read,) = agent.wait_for(1)
    read.conserved()
    return {
        api: {field: int(row[field]) for field in ("calls", "nested", "errors")} for api, row in read.latest.items()
    }


@pytest.mark.parametrize("way", ["exported", "private", "inside"])
def test_counts_are_what_probes_count(agent: Agent, needs_bpf: None, way: str) -> None:
    """Twice the million-call program: each function as often, nested or not; waits as the program's own clock has them.

    Not both at once: between the runtime and the driver stand our wrappers then, and the probes know the runtime's part
    of a call by its return address.
    """
    env = environment(ROOT / "build/sim/lib", STALLSCOPE_SIM_DRIVER=way)
    ours = env | {"STALLSCOPE_SHIM": f"socket:{agent.path}"}
    truth, before = run_million(ours, lambda pid: read_so_far(agent))
    (read,) = agent.wait_for(1)
    read.conserved()
    zero = {"calls": 0, "nested": 0, "errors": 0}
    counted = {
        api: tuple(int(row[f]) - int(before.get(api, zero)[f]) for f in ("calls", "nested", "errors"))
        for api, row in read.latest.items()
    }
    del env["LD_PRELOAD"]
    _, probes = run_million(env, start_probes)
    report = json.loads(probes.communicate()[0])
    probed = {call["api"]: (call["count"], call["nested"], call["errors"] or 0) for call in report["calls"]}
    assert {api: row for api, row in counted.items() if row[0]} == probed
    for api in ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaStreamSynchronize_ptsz", "cuStreamSynchronize"):
        assert read.times()[api] == pytest.approx(truth["long_waits"][api]["total_ns"], rel=0.05), api

"""Attached to a job in the middle of its life: every communicator by what NCCL keeps in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, SIM_LIB, Program, Tracer

from stallscope.aggregate.identity import comm_hash
from stallscope.aggregate.state import State
from stallscope.wire.frames import FILE_HEADER_BYTES, Decoder

pytestmark = pytest.mark.usefixtures("needs_bpf")
VERSION = (2, 27, 5)
TARGETS = ROOT / "tests" / "targets"


@contextmanager
def job(truth: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A simulated job that runs."""
    command = [sys.executable, "-m", "stallscope.sim.job", f"--truth={truth}", *options]
    environment = dict(os.environ, STALLSCOPE_SIM_LIB=str(SIM_LIB))
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def state_of(recording: Path) -> State:
    state = State()
    for frame in Decoder().feed(recording.read_bytes()[FILE_HEADER_BYTES:]):
        state.apply(frame)
    return state


@pytest.mark.parametrize("layout", [("--tp=2", "--pp=1", "--dp=2"), ("--tp=2", "--pp=2", "--dp=1")])
def test_attached_in_the_middle(layout: tuple[str, ...], tmp_path: Path) -> None:
    """Size, ranks, hash, id and device of all of them, and where each rank stands; then the job's own record."""
    truth, recording = tmp_path / "truth.json", tmp_path / "late.stall"
    with job(truth, *layout, "--duration=60") as process:
        time.sleep(6)
        with Tracer([process.pid], "-o", recording).attached() as tracer:
            time.sleep(8)
            tracer.stop()
            report = tracer.report()
        process.terminate()
        process.wait(30)
    told = json.loads(truth.read_text())
    ranks = {pid: rank for rank, pid in enumerate(pids_of(told))}
    found = {tuple(ranks[m["pid"]] for m in c["members"]): c for c in report["communicators"]}
    wanted = {tuple(c["ranks"]): c for c in told["communicators"] if len(c["ranks"]) > 1}
    assert found.keys() == wanted.keys() and len(found) == len(report["communicators"])
    for members, comm in wanted.items():
        row, uid = found[members], comm["unique_id"]
        assert (row["nranks"], row["identity"]) == (len(members), "verified")
        assert [m["rank"] for m in row["members"]] == list(range(len(members)))
        assert [m["device"] for m in row["members"]] == list(members)
        assert row["uid"] == (uid[:16] if uid else None)
        if uid:
            assert row["comm_hash"] == row["log_comm_id"] == f"{comm_hash(bytes.fromhex(uid), VERSION) or 0:016x}"
    check_alignment(state_of(recording))


def pids_of(told: dict[str, Any]) -> list[int]:
    """Pid of each rank, as the job wrote it."""
    return [rank["pid"] for rank in sorted(told["ranks"], key=lambda rank: rank["rank"])]


def check_alignment(state: State) -> None:
    """NCCL's counters, less what was seen when they were read, are the operations before the attach."""
    for comm in state.communicators.table.values():
        for member in comm.members:
            assert member.pointer is not None
            place = state.operations.issuers[member.proc].places[member.pointer]
            assert place.how == "read" and place.base is not None
            only_collectives = not place.peers
            if only_collectives:
                samples = state.communicators.samples(member.proc, member.pointer)
                assert len({total - n for n, total in samples}) == 1 and place.base > 0


@pytest.mark.parametrize("seen", [True, False])
def test_two_devices_of_one_process(seen: bool) -> None:
    """ncclCommInitAll, InitRankConfig and InitRankScalable: both ranks of each, created before or after the attach."""
    words = ["/usr/bin/python3", TARGETS / "all_devices.py", *(["then"] if seen else [])]
    with Program(words) as program:
        program.wait_for("ready")
        with Tracer([program.pid]).attached() as tracer:
            program.say()
            program.wait_for("called")
            time.sleep(3)
            program.say()
            ids = program.truth()["ids"]
            report = tracer.report()
    rows = report["communicators"]
    assert [(r["nranks"], r["identity"]) for r in rows] == [(2, "verified")] * 3
    for row in rows:
        assert [(m["rank"], m["device"], m["next_seq"]) for m in row["members"]] == [(0, 0, 10), (1, 1, 10)]
    by_uid = {row["uid"]: row for row in rows}
    for uid in ids:
        row = by_uid.pop(uid[:16])
        assert row["unique_id"] == (uid if seen else None)
        assert row["comm_hash"] == f"{comm_hash(bytes.fromhex(uid), VERSION) or 0:016x}"
    (of_all,) = by_uid.values()
    assert of_all["comm_hash"] and of_all["unique_id"] is None


LIBRARY = """
typedef struct { char bytes[128]; } Id;
struct ncclComm { char before[0x3000]; unsigned long magic, commHash; int rank, nRanks, cudaDev; };
int ncclAllReduce(void *s, void *r, long n, int type, int op, void *comm, void *stream) { return 0; }
int ncclCommUserRank(struct ncclComm *c, int *o) { *o = c->rank; return 0; }
int ncclGetVersion(int *v) { *v = 22107; return 0; }
const char *ncclGetErrorString(int e) { return ""; }
"""
PROGRAM = """
#include <stdio.h>
#include <stdlib.h>
int ncclAllReduce(void *, void *, long, int, int, void *, void *);
static void call(void *comm) { ncclAllReduce(0, 0, 1, 0, 0, comm, 0); }
static void say(const char *w) { puts(w); fflush(stdout); while (getchar() != 10) continue; }
int main(void) {
  unsigned long *zero = calloc(1, 0x4000), *sane = calloc(1, 0x4000);
  sane[0] = 0x0280028002800280;
  sane[0x600] = 77; sane[0x601] = 99; /* magic, commHash */
  sane[0x602] = 1 | 2ul << 32; sane[0x603] = 0;
  say("ready");
  for (int i = 0; i < 3; i++) { call((void *)0x1234567); call((void *)~0ul); call(0); call(zero); call(sane); }
  say("called");
  return 0;
}
"""


def test_pointers_to_garbage(tmp_path: Path, needs_tool: Callable[[str], str]) -> None:
    """An address that is not mapped, one of no user space, NULL, and zeroes: unverified; the one beside them is not."""
    cc = needs_tool("cc")
    (tmp_path / "library.c").write_text(LIBRARY)
    (tmp_path / "program.c").write_text(PROGRAM)
    shared = tmp_path / "libnccl.so.2"
    subprocess.run([cc, "-g", "-shared", "-fPIC", "-w", tmp_path / "library.c", "-o", shared], check=True)
    use = [tmp_path / "program.c", shared, f"-Wl,-rpath,{tmp_path}"]
    subprocess.run([cc, "-w", *use, "-o", tmp_path / "program"], check=True)
    with Program([tmp_path / "program"], sim=False) as program:
        program.wait_for("ready")
        with Tracer([program.pid]).attached() as tracer:
            program.say()
            program.wait_for("called")
            time.sleep(3)
            program.say()
            report = tracer.report()
    rows = [(c["identity"], c["nranks"], c["comm_hash"], c["members"][0]["next_seq"]) for c in report["communicators"]]
    assert sorted(rows, key=str) == [
        ("unverified", None, None, 3),
        ("unverified", None, None, 3),
        ("verified", 2, f"{99:016x}", 3),
    ]

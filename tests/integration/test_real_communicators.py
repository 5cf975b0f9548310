"""Real libnccl on a communicator made by hand: what capture reads of it, and every argument of every operation.

No GPU: each call has one argument that NCCL refuses before it looks for a device (facts on `fake_comm.c`).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import wheel_library
from harness import TARGETS, Program, Tracer, balance, recorded
from test_real_libraries import ALL, ENVIRONMENT

from stallscope.parser import ncclcomm
from stallscope.parser.source import Source
from stallscope.wire.frames import FILE_HEADER_BYTES, Decoder, Kind
from stallscope.wire.hook_table import BY_NAME

pytestmark = pytest.mark.usefixtures("needs_bpf")
# sizeof(ncclComm), rank, magic, abortFlag, endMagic (0: none): from each wheel's DWARF, by pyelftools.
PLACES = {
    "2.21.5": (16288, 13536, 13520, 14976, 16280),
    "2.27.5": (1080320, 1066168, 1066152, 1067848, 1080312),
}
if ALL:
    PLACES["2.18.3"] = (11176, 9176, 9160, 10528, 0)
    PLACES["2.32.3"] = (1196536, 1181416, 1181400, 1185152, 1196528)
SEQUENCES = {"2.27.5": 1074512, "2.32.3": 1193800}
RANK, NRANKS, DEVICE, HASH, MAGIC = 5, 8, 3, 0x1122334455667788, 0xA1B2C3D4E5F60718
INTS = ("dtype", "redop", "root", "peer")
INVALID_ARGUMENT = 4
NOTHING: dict[str, Any] = {}


def library(version: str) -> Path:
    return wheel_library("nvidia-nccl-cu12", version, "nvidia/nccl/lib/libnccl.so.2")


def traced(version: str, recording: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(truth, report)"""
    words = [TARGETS / "fake_comm", library(version), *map(str, PLACES[version])]
    with Program(words, sim=False, env=ENVIRONMENT) as program:
        program.wait_for("ready")
        with Tracer([program.pid], "--sample", "1/1", "-o", recording).attached() as tracer:
            program.say()
            program.wait_for("made")
            time.sleep(3)  # two looks
            program.say()
            return program.truth(), tracer.report()


@pytest.mark.parametrize("version", PLACES)
def test_identity_and_arguments(version: str, tmp_path: Path) -> None:
    """Rank, size, device, hash and the id's first bytes; count, type, operation, root, peer and stream of each call."""
    recording = tmp_path / "fake.stall"
    truth, report = traced(version, recording)
    assert truth["got"] == [RANK, NRANKS, DEVICE]
    (comm,) = report["communicators"]
    assert (comm["nranks"], comm["comm_hash"], comm["identity"]) == (NRANKS, f"{HASH:016x}", "verified")
    assert (comm["uid"], comm["unique_id"]) == (MAGIC.to_bytes(8, "little").hex(), None)
    assert comm["log_comm_id"] == (f"{HASH:016x}" if version >= "2.26" else None)
    (member,) = comm["members"]
    assert (member["rank"], member["device"], member["pid"]) == (RANK, DEVICE, truth["pid"])
    assert member["next_seq"] == len(truth["calls"]) >= 9
    assert balance(report)[0] == balance(report)[1]
    check_arguments(truth["calls"], recorded(recording))
    check_frame(version, recording, truth["pointer"])


def check_arguments(calls: list[Any], rows: dict[str, np.ndarray]) -> None:
    """Every argument as it was passed, 32-bit ones in their 32 bits, and what was returned."""
    at = dict.fromkeys(rows, 0)
    for name, returned, passed in calls:
        words = BY_NAME[name].arguments.split()
        mine = rows[name][(rows[name]["kind"] == 2) & (rows[name]["flags"] & 1 == 0)]
        row = mine[at[name]]
        at[name] += 1
        got = [int(a) & 0xFFFFFFFF if w in INTS else int(a) for a, w in zip(row["a"], words, strict=False)]
        assert got == passed and len(passed) == len(words), (name, got, passed)
        assert int(row["status"]) == returned == INVALID_ARGUMENT, name


def check_frame(version: str, recording: Path, pointer: int) -> None:
    frames = Decoder().feed(recording.read_bytes()[FILE_HEADER_BYTES:])
    read = [frame.body for frame in frames if frame.kind == Kind.COMM]
    assert {(body["pointer"], body["by"], body["rank_at"], body["version"]) for body in read} == {
        (pointer, "table", PLACES[version][1], version)
    }
    counts = [sample for body in read for sample in body["samples"]]
    assert (len(counts) > 0) == (version in SEQUENCES) and all(sample[1:] == [0] * 5 for sample in counts)


@pytest.mark.parametrize("version", PLACES)
def test_three_ways_agree(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the table says, the file's own DWARF and its machine code say too; in little time."""
    fd = os.open(library(version), os.O_RDONLY)
    try:
        answers = [ncclcomm.find_comm(Source(fd, "wheel"))]
        monkeypatch.setattr(ncclcomm, "BY_BUILD_ID", NOTHING)
        begin = time.monotonic()
        answers.append(ncclcomm.find_comm(Source(fd, "wheel")))
        assert time.monotonic() - begin < 2
        monkeypatch.setattr(ncclcomm, "layout_of", lambda *_: None)
        answers.append(ncclcomm.find_comm(Source(fd, "wheel")))
    finally:
        os.close(fd)
    assert [answer.pop("by") for answer in answers] == ["table", "dwarf", "code"]
    assert answers[2].pop("seq_at") is None
    assert [answer.pop("seq_at") for answer in answers[:2]] == [SEQUENCES.get(version)] * 2
    assert answers == [{"rank_at": PLACES[version][1], "functions": 5, "version": version}] * 3

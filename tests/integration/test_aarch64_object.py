"""The BPF object for aarch64, as far as a machine of another kind can judge it.

The verifier knows the size of this machine's registers, so that the stack pointer and the program counter of an arm64
lie beyond the end. With those two offsets moved to this machine's, and nothing else changed, it can judge all the rest.
"""

from __future__ import annotations

import platform
import struct
from pathlib import Path

import pytest
from harness import ROOT

from stallscope.capture.loader import load
from stallscope.capture.object_loader import BpfObject, read_object

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the objects are compared as x86-64 has them")
HERE, THERE = (ROOT / "build" / name / "stallscope.bpf.o" for name in ("probes", "aarch64"))
INSTRUCTION = struct.Struct("<BBhi")
LOAD_8 = 0x79  # BPF_LDX | BPF_MEM | BPF_DW
OURS = {248: 152, 256: 128}  # struct pt_regs: sp and pc of arm64, sp and ip of x86-64
BY_UPROBES = {"launch", "enter", "pair_return"}


def offsets(code: bytes) -> list[int]:
    """Of all loads of 8 bytes."""
    return [off for op, _, off, _ in INSTRUCTION.iter_unpack(code) if op == LOAD_8]


def moved(code: bytes) -> bytes:
    """With the two registers where this machine has them."""
    rows = INSTRUCTION.iter_unpack(code)
    return b"".join(
        INSTRUCTION.pack(op, regs, OURS.get(off, off) if op == LOAD_8 else off, imm) for op, regs, off, imm in rows
    )


@pytest.fixture(scope="module")
def objects() -> tuple[BpfObject, BpfObject]:
    return read_object(HERE), read_object(THERE)


def test_the_same_programs_and_maps(objects: tuple[BpfObject, BpfObject]) -> None:
    """Where no registers are read the code is the same to the byte."""
    here, there = objects
    assert here.maps == there.maps and here.license == there.license
    assert here.programs.keys() == there.programs.keys() >= BY_UPROBES
    for name, program in here.programs.items():
        assert program.section == there.programs[name].section
        assert (program.code == there.programs[name].code) == (name not in BY_UPROBES), name


def test_it_reads_the_registers_of_an_arm64(objects: tuple[BpfObject, BpfObject]) -> None:
    """Nothing else is at 248 and 256: what is moved below are these two registers."""
    here, there = objects
    for name in BY_UPROBES:
        assert not set(offsets(here.programs[name].code)) & OURS.keys()
        assert set(offsets(there.programs[name].code)) & OURS.keys()


@pytest.mark.usefixtures("needs_bpf")
def test_the_verifier_accepts_it(objects: tuple[BpfObject, BpfObject], tmp_path: Path) -> None:
    _, there = objects
    data = THERE.read_bytes()
    for name in BY_UPROBES:
        code = there.programs[name].code
        assert data.count(code) == 1
        data = data.replace(code, moved(code))
    path = tmp_path / "moved.bpf.o"
    path.write_bytes(data)
    loaded = load("object", object_file=path)
    try:
        assert loaded.programs.keys() >= BY_UPROBES
    finally:
        loaded.close()

"""The BPF object for aarch64, as far as a machine of another kind can judge it.

The verifier knows the size of this machine's registers, so that frame pointer, stack pointer and program counter of an arm64
lie beyond the end. With those offsets moved to this machine's, and nothing else changed, it can judge all the rest.
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
STORE_8, LOAD_16, MOVE, CALL, GOTO, EXIT, STACK = 0x7B, 0x18, 0xBF, 0x85, 0x05, 0x95, 10
JUMPS = (5, 6)  # classes JMP, JMP32
WRITES = (0, 1, 4, 7)  # classes LD, LDX, ALU, ALU64
OURS = {232: 32, 248: 152, 256: 128}  # struct pt_regs: x29, sp and pc of arm64, bp, sp and ip of x86-64
PT_REGS_BYTES = 168
BY_UPROBES = {"launch", "enter", "pair_return"}


def after(held: frozenset[int], op: int, regs: int, off: int) -> frozenset[int]:
    """Registers, and places of the stack by their offset, that may hold the context behind an instruction."""
    dst, src = regs & 15, regs >> 4
    if op == STORE_8 and dst == STACK:
        return held | {off} if src in held else held - {off}
    if op == MOVE or (op == LOAD_8 and src == STACK):
        return held | {dst} if (src if op == MOVE else off) in held else held - {dst}
    if op == CALL:
        return held - set(range(6))
    return held - {dst} if op & 7 in WRITES else held


def context_loads(code: bytes) -> dict[int, int]:
    """Offset in the registers of each load of 8 bytes from them, by number of the instruction; they come in r1."""
    rows = list(INSTRUCTION.iter_unpack(code))
    held: dict[int, frozenset[int]] = {0: frozenset({1})}
    todo, found = [0], {}
    while todo:
        number = todo.pop()
        op, regs, off, _ = rows[number]
        if op == LOAD_8 and regs >> 4 in held[number] and regs >> 4 != STACK:
            found[number] = off
        then = after(held[number], op, regs, off)
        ways = [] if op in (EXIT, GOTO) else [number + 1 + (op == LOAD_16)]
        ways += [number + 1 + off] if op & 7 in JUMPS and op not in (EXIT, CALL) else []
        for way in ways:
            known = held.get(way)
            if known is None or not then <= known:
                held[way] = then | (known or frozenset())
                todo.append(way)
    return found


def moved(code: bytes) -> bytes:
    """With these registers where this machine has them."""
    loads = context_loads(code)
    rows = enumerate(INSTRUCTION.iter_unpack(code))
    return b"".join(
        INSTRUCTION.pack(op, regs, OURS.get(off, off) if number in loads else off, imm)
        for number, (op, regs, off, imm) in rows
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
    here, there = objects
    for name in BY_UPROBES:
        assert all(off < PT_REGS_BYTES for off in context_loads(here.programs[name].code).values())
        assert set(context_loads(there.programs[name].code).values()) & OURS.keys()
    assert set(context_loads(there.programs["enter"].code).values()) >= OURS.keys()


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

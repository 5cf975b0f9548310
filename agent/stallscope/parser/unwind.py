"""Steps from a stack frame to its caller by the unwind tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from stallscope.parser.cfi import RBP, RSP, Cfa, Row, Rule
from stallscope.parser.depth import depth_at
from stallscope.parser.machine import CALL_BYTES, STUB_BYTES, Call, call_before, stub_pointer
from stallscope.parser.view import ADDRESS_LIMIT, View

__all__ = ["Chain", "Frame", "Step", "call_at", "chain", "destinations", "row_of", "step"]

MAX_FRAMES = 512
MAX_FUNCTION = 64 << 10
MAX_READ_CODE = 12


class Frame(NamedTuple):
    """A frame as its own code sees it. `pc`: the address to look up (inside the call, not behind it); `bp`: None when
    no unwound frame says what rbp holds."""

    pc: int
    sp: int
    bp: int | None


class Step(NamedTuple):
    """A frame's way out: the stack slot of its return address, and the caller. A None caller: the outermost frame, or
    the slot lies outside the copy of the stack."""

    slot: int
    caller: Frame | None


class Chain(NamedTuple):
    """Frames from the innermost outwards, each with the slot of its return address. `stuck`: the frame whose caller is
    not known; None when the rest of the stack copy holds no further frame."""

    frames: list[tuple[Frame, int]]
    stuck: Frame | None


def row_of(view: View, pc: int) -> Row | None:
    """Return the unwind rules at an address in memory, or None without a table that covers it."""
    place = view.file_address(pc)
    table = view.unwind_table(place[0]) if place else None
    return table.row(place[1]) if place and table else None


def step(view: View, frame: Frame, *, read_code: bool = False) -> Step | None:
    """Go from a frame to its caller; None when the tables or the known registers don't say how.

    Args:
        read_code: where only rbp is missing, find it by the function's own instructions.
    """
    row = row_of(view, frame.pc)
    if row is None:
        return None
    if frame.bp is None and row.cfa.register == RBP and read_code:
        frame = frame._replace(bp=_bp_by_code(view, frame, row))
    cfa = _cfa(view, row.cfa, frame)
    if cfa is None or not frame.sp < cfa < ADDRESS_LIMIT or cfa & 7:
        return None
    # Unless a rule says otherwise, x86-64 keeps the return address right below the CFA.
    slot = _place(row.ret, cfa, frame) if row.ret.kind != "same" else cfa - 8
    if row.ret.kind == "undefined":
        return Step(0, None)
    ret = view.stack_word(slot) if slot is not None else None
    if slot is None:
        return None
    if ret is None:
        return Step(slot, None)
    return Step(slot, Frame(ret if row.signal else ret - 1, cfa, _caller_bp(view, row.rbp, cfa, frame)))


def chain(view: View, frame: Frame, may_read: Callable[[int], bool]) -> Chain:
    """Unwind from a frame as far as tables, registers and the copy of the stack lead.

    Args:
        may_read: tells whether it is worth to read the instructions of the function at an address.
    """
    frames: list[tuple[Frame, int]] = []
    budget = MAX_READ_CODE
    while len(frames) < MAX_FRAMES:
        read_code = budget > 0 and frame.bp is None and _counts_from_rbp(view, frame.pc) and may_read(frame.pc)
        budget -= read_code
        out = step(view, frame, read_code=read_code)
        if out is None:
            return Chain(frames, frame)
        frames.append((frame, out.slot))
        if out.caller is None:
            return Chain(frames, None)
        frame = out.caller
    return Chain(frames, frame)


def _counts_from_rbp(view: View, pc: int) -> bool:
    row = row_of(view, pc)
    return row is not None and row.cfa.register == RBP


def call_at(view: View, slot: int) -> tuple[int, Call] | None:
    """Return (return address, the call before it) for the word at a stack slot; None when it is no return address."""
    ret = view.stack_word(slot)
    if ret is None or view.range_of(ret) is None:
        return None
    call = call_before(view.code(ret - CALL_BYTES, CALL_BYTES) or b"", ret)
    return (ret, call) if call else None


def destinations(view: View, call: Call) -> list[int]:
    """Return where a call goes: its target, and behind a PLT stub or a word in memory what that word says.

    Empty when only registers knew, or the word is not known yet.
    """
    found = [call.target] if call.target is not None else []
    pointer = call.pointer
    if call.target is not None:
        pointer = stub_pointer(view.code(call.target, STUB_BYTES) or b"", call.target)
    word = view.word(pointer) if pointer is not None else None
    return found if word is None else [*found, word]


def _bp_by_code(view: View, frame: Frame, row: Row) -> int | None:
    """Compute rbp from how far below it the function's instructions have put the stack pointer at its pc."""
    place = view.file_address(frame.pc)
    if place is None or row.cfa.deref:
        return None
    start = frame.pc - (place[1] - row.start)
    code = view.code(start, min(row.end - row.start, MAX_FUNCTION))
    depth = depth_at(code, frame.pc - start) if code else None
    if depth is None:
        return None
    # rbp is 16-byte aligned in a function that aligns its stack further: it begins with one push.
    for bp in range(frame.sp + depth.size, frame.sp + depth.size + max(depth.slack, 1), 8):
        site = call_at(view, bp + row.cfa.offset - 8)
        if site and (not depth.slack or (bp & 15 == 0 and start in destinations(view, site[1]))):
            return bp
    return None


def _cfa(view: View, rule: Cfa, frame: Frame) -> int | None:
    """Compute the canonical frame address: the stack pointer before the call, in the caller."""
    base = _register(rule.register, frame)
    if base is None:
        return None
    return view.stack_word(base + rule.offset) if rule.deref else base + rule.offset


def _register(number: int | None, frame: Frame) -> int | None:
    return frame.sp if number == RSP else frame.bp if number == RBP else None


def _place(rule: Rule, cfa: int, frame: Frame) -> int | None:
    """Return the address where a rule says a register is stored."""
    if rule.kind == "cfa":
        return cfa + rule.offset
    base = _register(rule.register, frame) if rule.kind == "at" else None
    return None if base is None else base + rule.offset


def _caller_bp(view: View, rule: Rule, cfa: int, frame: Frame) -> int | None:
    """Return rbp in the caller, or None when unknown."""
    if rule.kind == "same":
        return frame.bp
    place = _place(rule, cfa, frame)
    return None if place is None else view.stack_word(place)

"""Steps from a stack frame to its caller by the unwind tables."""

from __future__ import annotations

from typing import NamedTuple

from stallscope.parser.cfi import RBP, RSP, Cfa, Row, Rule
from stallscope.parser.machine import CALL_BYTES, call_before, frame_size
from stallscope.parser.view import ADDRESS_LIMIT, View

__all__ = ["Chain", "Frame", "Step", "chain", "is_call_slot", "row_of", "step"]

MAX_FRAMES = 512
PROLOGUE_BYTES = 32


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
    """Frames from the innermost outwards. `floor`: stack address up to which they are proven; `complete`: the rest of
    the stack copy holds no further frame."""

    frames: list[tuple[Frame, int]]
    floor: int
    complete: bool


def row_of(view: View, pc: int) -> Row | None:
    """Return the unwind rules at an address in memory, or None without a table that covers it."""
    place = view.file_address(pc)
    table = view.unwind_table(place[0]) if place else None
    return table.row(place[1]) if place and table else None


def step(view: View, frame: Frame) -> Step | None:
    """Go from a frame to its caller; None when the tables or the known registers don't say how."""
    row = row_of(view, frame.pc)
    if row is None:
        return None
    if frame.bp is None and row.cfa.register == RBP:
        frame = frame._replace(bp=_prologue_bp(view, frame, row))
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


def chain(view: View, pc: int, bp: int | None) -> Chain:
    """Unwind from the innermost frame as far as tables, registers and the copy of the stack lead."""
    frame = Frame(pc, view.sp, bp)
    frames: list[tuple[Frame, int]] = []
    while len(frames) < MAX_FRAMES:
        out = step(view, frame)
        if out is None:
            return Chain(frames, frame.sp, complete=False)
        frames.append((frame, out.slot))
        if out.caller is None:
            return Chain(frames, view.end, complete=True)
        frame = out.caller
    return Chain(frames, frame.sp, complete=False)


def is_call_slot(view: View, slot: int) -> bool:
    """Tell whether the word at a stack slot stands behind a call."""
    ret = view.stack_word(slot)
    if ret is None or view.range_of(ret) is None:
        return False
    return call_before(view.code(ret - CALL_BYTES, CALL_BYTES) or b"", ret) is not None


def _prologue_bp(view: View, frame: Frame, row: Row) -> int | None:
    """Compute rbp from how far below it the function's first instructions put the stack pointer.

    The kernel tells a blocked thread's sp and pc only, and code below may never have saved rbp. A function that moves
    sp further (alloca, pushed arguments) is caught by what stands at the slot: no return address.
    """
    place = view.file_address(frame.pc)
    if place is None:
        return None
    size = frame_size(view.code(frame.pc - (place[1] - row.start), PROLOGUE_BYTES) or b"")
    if size is None or row.cfa.deref or not is_call_slot(view, frame.sp + size + row.cfa.offset - 8):
        return None
    return frame.sp + size


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

"""Call frame information of x86-64: from an .eh_frame entry to the row that holds at one address.

Only what leads from a frame to its caller is kept: the rules for the CFA, for rbp and for the return address.
"""

from __future__ import annotations

from typing import NamedTuple

from stallscope.parser.errors import ParseError

__all__ = ["RBP", "RSP", "Bytes", "Cie", "Row", "Rule", "evaluate"]

RBP, RSP, RETURN_ADDRESS = 6, 7, 16
MAX_REMEMBERED = 64


class Rule(NamedTuple):
    """Where a value of the caller is: `same` (unchanged), `cfa` (stored at CFA + offset), `at` (stored at register +
    offset), `undefined` (there is no caller), or `unknown` (a rule this reader doesn't follow)."""

    kind: str
    register: int = 0
    offset: int = 0


class Cfa(NamedTuple):
    """CFA = register + offset; with `deref` the word stored there. A None register: a rule not followed."""

    register: int | None
    offset: int
    deref: bool = False


class Row(NamedTuple):
    """The rules at one address. `start`, `end`: the function, in the file's addresses."""

    start: int
    cfa: Cfa
    rbp: Rule
    ret: Rule
    signal: bool
    end: int = 0


class Cie(NamedTuple):
    """The part of an entry that many functions share. `code`: its instructions."""

    code_align: int
    data_align: int
    pointer_encoding: int
    augmented: bool
    signal: bool
    code: bytes


class Bytes:
    """A cursor over bytes; every read past the end raises ParseError."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        part = self.data[self.at : self.at + count]
        if count < 0 or len(part) != count:
            raise ParseError("cannot read unwind table", f"byte {self.at}", "the entry ends early")
        self.at += count
        return part

    def uint(self, size: int, *, signed: bool = False) -> int:
        """Return a little-endian integer of `size` bytes."""
        return int.from_bytes(self.take(size), "little", signed=signed)

    def uleb(self) -> int:
        """Return an unsigned LEB128 number of at most 64 bits."""
        return self._leb()[0]

    def sleb(self) -> int:
        """Return a signed LEB128 number of at most 64 bits."""
        value, shift, last = self._leb()
        return value - (1 << shift) if last & 0x40 else value

    def _leb(self) -> tuple[int, int, int]:
        value = shift = 0
        while shift < 70:
            byte = self.uint(1)
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value, shift, byte
        raise ParseError("cannot read unwind table", f"byte {self.at}", "a number of over 70 bits")


class _State:
    """The row being built. `initial` holds the rules of the CIE, for the instructions that restore them."""

    __slots__ = ("cfa", "initial", "rules", "stack")

    def __init__(self) -> None:
        self.cfa = Cfa(None, 0)
        self.rules: dict[int, Rule] = {}
        self.initial: dict[int, Rule] = {}
        self.stack: list[tuple[Cfa, dict[int, Rule]]] = []

    def remember(self) -> None:
        if len(self.stack) >= MAX_REMEMBERED:
            raise ParseError("cannot read unwind table", "remember_state", "nested too deep")
        self.stack.append((self.cfa, dict(self.rules)))

    def recall(self) -> None:
        if not self.stack:
            raise ParseError("cannot read unwind table", "restore_state", "nothing was remembered")
        self.cfa, self.rules = self.stack.pop()

    def put(self, register: int, rule: Rule) -> None:
        # A hostile entry may name 2^64 registers: only two matter.
        if register in (RBP, RETURN_ADDRESS):
            self.rules[register] = rule

    def restore(self, register: int) -> None:
        self.put(register, self.initial.get(register, Rule("same")))


def evaluate(cie: Cie, start: int, code: bytes, pc: int) -> Row:
    """Run an entry's instructions from the function's first address up to `pc`.

    Args:
        start: virtual address where the function starts.
        code: the entry's own instructions.
        pc: virtual address inside the function.

    Raises:
        ParseError: damaged instructions, or one that this reader doesn't know.
    """
    state = _State()
    _run(state, cie, Bytes(cie.code), start, pc)
    state.initial = dict(state.rules)
    _run(state, cie, Bytes(code), start, pc)
    same = Rule("same")
    ret = state.rules.get(RETURN_ADDRESS, same)
    return Row(start, state.cfa, state.rules.get(RBP, same), ret, cie.signal)


def _run(state: _State, cie: Cie, code: Bytes, location: int, pc: int) -> None:
    """Execute instructions until the location passes `pc`."""
    while code.at < len(code.data):
        op = code.uint(1)
        advance = _advance(op, code)
        if advance is not None:
            location += advance * cie.code_align
            if location > pc:
                return
        elif not any(run(state, cie, op, code) for run in (_compact, _cfa_op, _register_op)):
            raise ParseError("cannot read unwind table", f"instruction {op:#x}", "unknown")


def _advance(op: int, code: Bytes) -> int | None:
    """Return by how many code units an instruction moves the location; None for another instruction."""
    if op & 0xC0 == 0x40:
        return op & 0x3F
    return code.uint({2: 1, 3: 2, 4: 4}[op]) if op in (2, 3, 4) else None


def _compact(state: _State, cie: Cie, op: int, code: Bytes) -> bool:
    """DW_CFA_offset and DW_CFA_restore, which carry the register in the opcode."""
    if op & 0xC0 == 0x80:
        state.put(op & 0x3F, Rule("cfa", 0, code.uleb() * cie.data_align))
        return True
    if op & 0xC0 == 0xC0:
        state.restore(op & 0x3F)
        return True
    return False


def _cfa_op(state: _State, cie: Cie, op: int, code: Bytes) -> bool:
    """Instructions that define the CFA."""
    if op == 0x0C:  # def_cfa
        state.cfa = Cfa(code.uleb(), code.uleb())
    elif op == 0x0D:  # def_cfa_register
        state.cfa = Cfa(code.uleb(), state.cfa.offset)
    elif op == 0x0E:  # def_cfa_offset
        state.cfa = Cfa(state.cfa.register, code.uleb())
    elif op == 0x0F:  # def_cfa_expression
        state.cfa = _cfa_expression(code.take(code.uleb()))
    elif op == 0x12:  # def_cfa_sf
        state.cfa = Cfa(code.uleb(), code.sleb() * cie.data_align)
    elif op == 0x13:  # def_cfa_offset_sf
        state.cfa = Cfa(state.cfa.register, code.sleb() * cie.data_align)
    else:
        return False
    return True


def _register_op(state: _State, cie: Cie, op: int, code: Bytes) -> bool:
    """Instructions that say where a register is saved, and those without an effect here."""
    if op in (0x00, 0x2E, 0x0A, 0x0B):  # nop, GNU_args_size, remember_state, restore_state
        _stateful(state, op, code)
        return True
    if op not in (0x05, 0x06, 0x07, 0x08, 0x09, 0x10, 0x11, 0x14, 0x15, 0x16, 0x2F):
        return False
    register = code.uleb()
    if op == 0x06:  # restore_extended
        state.restore(register)
    else:
        state.put(register, _saved(cie, op, code))
    return True


def _stateful(state: _State, op: int, code: Bytes) -> None:
    """The instructions without a register."""
    if op == 0x0A:
        state.remember()
    elif op == 0x0B:
        state.recall()
    elif op == 0x2E:
        code.uleb()


def _saved(cie: Cie, op: int, code: Bytes) -> Rule:
    """Return the rule of one instruction, past its register number."""
    if op == 0x05:  # offset_extended
        return Rule("cfa", 0, code.uleb() * cie.data_align)
    if op == 0x11:  # offset_extended_sf
        return Rule("cfa", 0, code.sleb() * cie.data_align)
    if op == 0x2F:  # GNU_negative_offset_extended
        return Rule("cfa", 0, -code.uleb() * cie.data_align)
    if op in (0x07, 0x08):
        return Rule("undefined" if op == 0x07 else "same")
    if op == 0x10:  # expression: the address where the register is stored
        place = _cfa_expression(code.take(code.uleb()))
        return Rule("unknown") if place.register is None or place.deref else Rule("at", place.register, place.offset)
    _skip_operand(op, code)
    return Rule("unknown")


def _skip_operand(op: int, code: Bytes) -> None:
    """Step over the operand of register, val_offset, val_offset_sf and val_expression."""
    if op == 0x16:
        code.take(code.uleb())
    elif op == 0x15:
        code.sleb()
    else:
        code.uleb()


def _cfa_expression(code: bytes) -> Cfa:
    """Follow the two expressions compilers write: `register + n`, and the word stored there."""
    cursor = Bytes(code)
    op = cursor.uint(1)
    if not 0x70 <= op <= 0x8F:
        return Cfa(None, 0)
    offset = cursor.sleb()
    rest = code[cursor.at :]
    return Cfa(op - 0x70, offset, deref=bool(rest)) if rest in (b"", b"\x06") else Cfa(None, 0)

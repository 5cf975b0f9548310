"""How far below rbp the stack pointer stands at one instruction of a function: read from its machine code.

The kernel tells a blocked thread's sp and pc only. Where the unwind rules count from rbp, and no inner frame saved it,
the function's own instructions from its start to the pc say what rbp is: all ways through its code are followed.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Depth", "Instruction", "decode", "depth_at"]

MAX_STEPS = 4096
MAX_DEPTH = 1 << 24
RSP, RBP = 4, 5
PREFIXES = frozenset((0x26, 0x2E, 0x36, 0x3E, 0x64, 0x65, 0x66, 0x67, 0xF0, 0xF2, 0xF3))
STOP = frozenset((0xC2, 0xC3, 0xCA, 0xCB, 0xCC, 0xCF, 0xF4))
# Operands of the one-byte opcodes: bit 7 a ModRM byte; low bits how many immediate bytes, 15 for 2 or 4.
MODRM, WORD = 0x80, 15


class Depth(NamedTuple):
    """rbp - rsp in bytes. `slack`: alignment of the stack pointer took up to this many bytes more."""

    size: int
    slack: int = 0


class Instruction(NamedTuple):
    """`table`: 0 for one-byte opcodes, 1 for those behind 0f, 2 and 3 for 0f 38 and 0f 3a, also by VEX and EVEX;
    `rest`: the bytes from the ModRM byte or the immediate on."""

    length: int
    table: int
    opcode: int
    rex: int
    rest: bytes


def _one_byte() -> list[int | None]:
    """The operand table; None: no such instruction in 64-bit mode (or a prefix)."""
    out: list[int | None] = [0] * 256
    for row in range(0, 0x40, 8):
        out[row : row + 8] = [MODRM, MODRM, MODRM, MODRM, 1, WORD, None, None]
    for opcode in (0x0F, *range(0x40, 0x50), 0x60, 0x61, 0x62, 0x82, 0x9A, 0xC4, 0xC5, 0xCE, 0xD4, 0xD5, 0xD6, 0xEA):
        out[opcode] = None
    for opcode in (0x63, *range(0x84, 0x90), *range(0xD0, 0xD4), *range(0xD8, 0xE0), 0xF6, 0xF7, 0xFE, 0xFF):
        out[opcode] = MODRM
    for opcode in (0x6B, 0x80, 0x83, 0xC0, 0xC1, 0xC6):
        out[opcode] = MODRM | 1
    for opcode in (0x69, 0x81, 0xC7):
        out[opcode] = MODRM | WORD
    for opcode in (0x6A, *range(0x70, 0x80), 0xA8, *range(0xB0, 0xB8), 0xCD, *range(0xE0, 0xE8), 0xEB):
        out[opcode] = 1
    for opcode in (0x68, 0xA9, *range(0xB8, 0xC0)):
        out[opcode] = WORD
    for opcode in (0xE8, 0xE9):
        out[opcode] = 4
    for opcode in range(0xA0, 0xA4):
        out[opcode] = 8
    out[0xC2] = out[0xCA] = 2
    out[0xC8] = 3
    return out


ONE_BYTE = _one_byte()
BARE = frozenset((*range(0x05, 0x0A), 0x0B, *range(0x30, 0x38), 0x77, *range(0xA0, 0xA3), *range(0xA8, 0xAB),
                  *range(0xC8, 0xD0)))  # fmt: skip
WITH_BYTE = frozenset((0x70, 0x71, 0x72, 0x73, 0xA4, 0xAC, 0xBA, 0xC2, 0xC4, 0xC5, 0xC6))


def decode(code: bytes, at: int) -> Instruction | None:
    """Read one instruction; None where there is none or the bytes end."""
    start, rex, narrow = at, 0, False
    while at < len(code) and code[at] in PREFIXES:
        narrow |= code[at] == 0x66
        at += 1
    if at < len(code) and code[at] & 0xF0 == 0x40:
        rex = code[at]
        at += 1
    table, at = _table(code, at)
    if at >= len(code) or at - start > 14:
        return None
    opcode = code[at]
    at += 1
    form = _form(table, opcode)
    if form is None:
        return None
    size = form & 0x7F
    if size == WORD:
        size = 8 if rex & 8 and table == 0 and 0xB8 <= opcode < 0xC0 else 2 if narrow and not rex & 8 else 4
    if form & MODRM:
        if table == 0 and opcode in (0xF6, 0xF7) and at < len(code) and code[at] & 0x30 == 0:
            size = 1 if opcode == 0xF6 else 2 if narrow and not rex & 8 else 4
        size += _operand(code, at)
    end = at + size
    return Instruction(end - start, table, opcode, rex, code[at:end]) if end <= len(code) else None


def _table(code: bytes, at: int) -> tuple[int, int]:
    """Step over escape bytes and VEX or EVEX prefixes; return (opcode table, position of the opcode)."""
    head = code[at : at + 4]
    if head[:1] == b"\x0f":
        table = {0x38: 2, 0x3A: 3}.get(head[1] if len(head) > 1 else 0, 1)
        return table, at + (1 if table == 1 else 2)
    if head[:1] == b"\xc5":
        return 1, at + 2
    if head[:1] == b"\xc4" and len(head) > 1:
        return head[1] & 0x1F, at + 3
    if head[:1] == b"\x62" and len(head) > 1:
        return head[1] & 7, at + 4
    return 0, at


def _form(table: int, opcode: int) -> int | None:
    """Return the operands of an opcode, as in the table of one-byte opcodes."""
    if table == 0:
        return ONE_BYTE[opcode]
    if table == 1:
        if 0x80 <= opcode < 0x90:
            return 4
        return 0 if opcode in BARE else MODRM | 1 if opcode in WITH_BYTE else MODRM
    return {2: MODRM, 3: MODRM | 1, 5: MODRM, 6: MODRM}.get(table)


def _operand(code: bytes, at: int) -> int:
    """Return the length of a ModRM byte and what belongs to it."""
    if at + 1 > len(code):
        return 1
    mode, rm = code[at] >> 6, code[at] & 7
    if mode == 3:
        return 1
    size = 1
    if rm == 4:
        size = 2
        if mode == 0 and at + 1 < len(code) and code[at + 1] & 7 == 5:
            return 6
    return size + (4 if mode == 2 or (mode == 0 and rm == 5) else mode)


def depth_at(code: bytes, offset: int) -> Depth | None:
    """Follow a function from its first byte to the instruction that holds `offset`.

    Returns:
        The depth there, or None when no way leads there, ways disagree, or it is decided at run time (alloca).
    """
    found: set[Depth] = set()
    seen: set[tuple[int, Depth | None]] = set()
    ways: list[tuple[int, Depth | None]] = [(0, None)]
    while ways and len(seen) < MAX_STEPS:
        way = ways.pop()
        at, depth = way
        if way in seen or not 0 <= at < len(code):
            continue
        seen.add(way)
        step = decode(code, at)
        if step is None:
            continue
        if at <= offset < at + step.length and depth is not None:
            found.add(depth)
        ways.extend((to, _after(step, depth)) for to in _next(step, at))
    return found.pop() if len(found) == 1 else None


def _next(step: Instruction, at: int) -> list[int]:
    """Return where execution goes on; a jump first, so that the straight way is followed first."""
    behind = at + step.length
    opcode, relative = step.opcode, int.from_bytes(step.rest, "little", signed=True)
    if step.table == 1:
        if 0x80 <= opcode < 0x90:
            return [behind + relative, behind]
        return [] if opcode == 0x0B else [behind]
    if step.table:
        return [behind]
    if opcode in (0xE9, 0xEB):
        return [behind + relative]
    if 0x70 <= opcode < 0x80 or 0xE0 <= opcode < 0xE4:
        return [behind + relative, behind]
    if opcode in STOP or (opcode == 0xFF and step.rest[0] >> 3 & 7 in (4, 5)):
        return []
    return [behind]


def _after(step: Instruction, depth: Depth | None) -> Depth | None:
    """Return the depth behind an instruction; None when rbp is no frame pointer or the stack pointer is unknown."""
    if step.table:
        return depth
    after = _moved(step, depth)
    return after if after is None or 0 <= after.size <= MAX_DEPTH else None


def _moved(step: Instruction, depth: Depth | None) -> Depth | None:
    opcode, rex = step.opcode, step.rex
    if 0x50 <= opcode < 0x58 or opcode in (0x68, 0x6A):
        return _deeper(depth, 8)
    if 0x58 <= opcode < 0x60:
        return None if not rex & 1 and opcode & 7 in (RSP, RBP) else _deeper(depth, -8)
    if opcode in (0xC8, 0xC9):  # enter, leave
        return None
    return _by_modrm(step, depth) if (ONE_BYTE[opcode] or 0) & MODRM else depth


def _by_modrm(step: Instruction, depth: Depth | None) -> Depth | None:
    """Instructions with a ModRM byte: of interest when the stack pointer or rbp is written."""
    opcode, modrm = step.opcode, step.rest[0]
    mode, middle = modrm >> 6, modrm >> 3 & 7
    if opcode in (0xFF, 0x8F) and middle == (6 if opcode == 0xFF else 0) and (opcode == 0xFF or mode != 3):
        return _deeper(depth, 8 if opcode == 0xFF else -8)
    register = middle | (step.rex & 4) << 1
    other = modrm & 7 | (step.rex & 1) << 3 if mode == 3 else None
    if opcode in (0x81, 0x83):
        return _immediate(step, depth) if other == RSP else depth
    if opcode in (0x89, 0x8B):
        to, source = (other, register) if opcode == 0x89 else (register, other)
        return _copied(to, source, depth)
    if opcode == 0x8D:
        return _address(step, register, depth)
    if opcode == 0x87 and {register, other} & {RSP, RBP}:
        return None
    # add, or, adc, sbb, and, sub, xor with a register: an amount known at run time only
    if opcode < 0x38 and (other if opcode & 7 == 1 else register if opcode & 7 == 3 else None) == RSP:
        return None
    return depth


def _deeper(depth: Depth | None, amount: int) -> Depth | None:
    return None if depth is None else depth._replace(size=depth.size + amount)


def _immediate(step: Instruction, depth: Depth | None) -> Depth | None:
    """Arithmetic on the stack pointer with a constant."""
    amount = int.from_bytes(step.rest[1:], "little", signed=True)
    operation = step.rest[0] >> 3 & 7
    if operation in (0, 5):
        return _deeper(depth, -amount if operation == 0 else amount)
    if operation == 4 and depth is not None and amount in (-16, -32, -64, -128) and not depth.slack:
        return Depth(depth.size, -amount)
    return depth if operation == 7 else None


def _copied(to: int | None, source: int | None, depth: Depth | None) -> Depth | None:
    """mov: of the stack pointer to rbp (a frame begins) and back."""
    if (to, source) in ((RBP, RSP), (RSP, RBP)):
        return Depth(0)
    return None if to in (RSP, RBP) else depth


def _address(step: Instruction, to: int, depth: Depth | None) -> Depth | None:
    """Lea of rsp or rbp from rsp or rbp, and a constant."""
    if to not in (RSP, RBP):
        return depth
    mode, base = step.rest[0] >> 6, step.rest[0] & 7
    if step.rex & 3 or mode in (0, 3) or (base == 4 and step.rest[1] != 0x24) or base not in (RSP, RBP):
        return None
    amount = int.from_bytes(step.rest[2 if base == 4 else 1 :], "little", signed=True)
    if to == RSP:
        return _deeper(depth, -amount) if base == RSP else Depth(-amount)
    return Depth(amount) if base == RSP else None

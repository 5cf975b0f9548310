"""From machine code: at which offset of its first argument a getter such as `ncclCommUserRank` reads, and the constant
that `ncclGetVersion` stores. x86-64 and aarch64.

Every build seen (17 wheels, g++ 12 and clang 14 at -O2 and -O3) ends such a getter with the load of a 32-bit field and
the store of the same register through the second argument, with few instructions between. Bytes that only look like the
pair are possible: callers compare several getters.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

__all__ = ["CODE_BYTES", "loaded_and_stored", "stored_constants"]

CODE_BYTES = 4096
BETWEEN = 24  # bytes from a load to its store
NEAR = 6  # the same in aarch64 instructions


def loaded_and_stored(code: bytes, machine: str) -> set[int]:
    """Displacements of 32-bit loads whose register is stored at offset 0 of another pointer right after."""
    return set(_pairs_x86(code) if machine == "x86_64" else _pairs_arm(code) if machine == "aarch64" else ())


def stored_constants(code: bytes, machine: str) -> set[int]:
    """Constants that are stored as 32 bits at offset 0 of a pointer."""
    return set(_constants_x86(code) if machine == "x86_64" else _constants_arm(code) if machine == "aarch64" else ())


def _pairs_x86(code: bytes) -> Iterator[int]:
    at = code.find(0x8B)
    while at >= 0:
        load = _load_x86(code, at)
        if load and load[0] in _stores_x86(code, load[2]):
            yield load[1]
        at = code.find(0x8B, at + 1)


def _rex(code: bytes, at: int) -> int:
    """The REX prefix before an opcode, 0 without one."""
    return code[at - 1] if at and code[at - 1] >> 4 == 4 else 0


def _load_x86(code: bytes, at: int) -> tuple[int, int, int] | None:
    """(register, displacement, end) of `mov r32, [base + disp32]` with its opcode at `at`; no stack pointer as base."""
    rex, modrm = _rex(code, at), code[at + 1] if at + 1 < len(code) else 0
    if rex & 8 or modrm >> 6 != 2:
        return None
    end = at + 2
    if modrm & 7 == 4:
        if code[end : end + 1] != b"\x24" or not rex & 1:
            return None
        end += 1
    if end + 4 > len(code):
        return None
    return modrm >> 3 & 7 | (rex & 4) << 1, struct.unpack_from("<i", code, end)[0], end + 4


def _stores_x86(code: bytes, start: int) -> Iterator[int]:
    """Registers that `mov [base], r32` stores within a few bytes."""
    for at in range(start, min(start + BETWEEN, len(code) - 1)):
        rex, modrm = _rex(code, at), code[at + 1]
        if code[at] == 0x89 and not rex & 8 and _is_plain(code, at + 1):
            yield modrm >> 3 & 7 | (rex & 4) << 1


def _is_plain(code: bytes, at: int) -> bool:
    """Whether the operand that begins with the ModRM byte at `at` is `[base]`."""
    modrm = code[at]
    end = at + 1 + (modrm & 7 == 4)
    if modrm & 7 == 4 and code[at + 1 : end] != b"\x24":
        return False
    if modrm >> 6 == 0:
        return modrm & 7 != 5
    return modrm >> 6 == 1 and code[end : end + 1] == b"\0"


def _constants_x86(code: bytes) -> Iterator[int]:
    at = code.find(0xC7)
    while 0 <= at < len(code) - 7:
        if code[at + 1] >> 3 & 7 == 0 and not _rex(code, at) & 8 and _is_plain(code, at + 1):
            end = at + 2 + (code[at + 1] & 7 == 4) + (code[at + 1] >> 6 == 1)
            if end + 4 <= len(code):
                yield struct.unpack_from("<I", code, end)[0]
        at = code.find(0xC7, at + 1)


def _words(code: bytes) -> tuple[int, ...]:
    return struct.unpack_from(f"<{len(code) // 4}I", code)


def _stored_arm(word: int) -> int | None:
    """Register of `str wT, [xN]`."""
    return word & 31 if word & 0xFFFFFC00 == 0xB9000000 else None


def _pairs_arm(code: bytes) -> Iterator[int]:
    added: dict[int, int] = {}  # register -> what it lies behind the communicator
    loaded: dict[int, tuple[int, int]] = {}  # register -> (where, offset)
    for index, word in enumerate(_words(code)):
        to, base, immediate = word & 31, word >> 5 & 31, word >> 10 & 0xFFF
        if word & 0xFF800000 == 0x91000000:  # add xD, xN, #imm{, lsl #12}
            before = added.get(base, 0) if to == base else 0
            added[to] = before + (immediate << 12 if word >> 22 & 1 else immediate)
        elif word & 0xFFC00000 == 0xB9400000:  # ldr wT, [xN, #imm]
            loaded[to] = (index, added.get(base, 0) + 4 * immediate)
        elif word & 0xFFE0FC00 == 0xB8606800:  # ldr wT, [xN, xM]
            loaded[to] = (index, added.get(word >> 16 & 31, 0))
        elif (constant := _constant_arm(word, added)) is not None:
            added[to] = constant
        elif (register := _stored_arm(word)) is not None and register in loaded:
            where, offset = loaded[register]
            if index - where <= NEAR:
                yield offset


def _constant_arm(word: int, known: dict[int, int]) -> int | None:
    """What `movz` or `movk` leaves in its register."""
    value, shift = word >> 5 & 0xFFFF, (word >> 21 & 3) * 16
    if word & 0x7F800000 == 0x52800000:
        return value << shift
    if word & 0x7F800000 == 0x72800000:
        return known.get(word & 31, 0) & ~(0xFFFF << shift) | value << shift
    return None


def _constants_arm(code: bytes) -> Iterator[int]:
    known: dict[int, int] = {}
    for word in _words(code):
        constant = _constant_arm(word, known)
        if constant is not None:
            known[word & 31] = constant
        elif (register := _stored_arm(word)) is not None and register in known:
            yield known[register]

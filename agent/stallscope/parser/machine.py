"""x86-64 machine code round a call: the one before a return address, and PLT stubs."""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = ["CALL_BYTES", "STUB_BYTES", "Call", "call_before", "stub_pointer"]

CALL_BYTES = 8
STUB_BYTES = 32
ENDBR64 = b"\xf3\x0f\x1e\xfa"


class Call(NamedTuple):
    """A call instruction. `target`: where it goes (direct); `pointer`: address of the word that says where; both
    None when only registers know."""

    target: int | None
    pointer: int | None


def call_before(code: bytes, ret: int) -> Call | None:
    """Read the call that ends right before a return address.

    Args:
        code: the 8 bytes before `ret`.
        ret: the return address.

    Returns:
        The call, or None when no form of call ends there. Bytes of another instruction can look like a call: what
        it names must be checked.
    """
    if len(code) != CALL_BYTES:
        return None
    displacement = struct.unpack_from("<i", code, 4)[0]
    if code[3] == 0xE8:
        return Call((ret + displacement) & 0xFFFFFFFFFFFFFFFF, None)
    if code[2:4] == b"\xff\x15":
        return Call(None, (ret + displacement) & 0xFFFFFFFFFFFFFFFF)
    if code[1:4] == b"\xff\x14\x25":
        return Call(None, displacement & 0xFFFFFFFF)
    return Call(None, None) if _through_register(code) else None


def _through_register(code: bytes) -> bool:
    """Tell whether `ff /2` with a register or memory operand of any length ends the bytes."""
    for length, modes in ((2, (0, 3)), (3, (0, 1)), (4, (1,)), (6, (2,)), (7, (2,))):
        opcode, modrm = code[-length], code[1 - length]
        if opcode == 0xFF and modrm >> 3 & 7 == 2 and modrm >> 6 in modes and _operand(modrm) == length:
            return True
    return False


def _operand(modrm: int) -> int:
    """Return the length in bytes of `ff modrm…`: a displacement and a SIB byte follow by its mode."""
    mode, base = modrm >> 6, modrm & 7
    if mode == 3:
        return 2
    displacement = (0, 1, 4)[mode]
    return 2 + displacement + (base == 4)


def stub_pointer(code: bytes, address: int) -> int | None:
    """Return the address of the word a PLT stub jumps through, or None when the bytes at `address` are no stub.

    Known forms: `[endbr64] [bnd] jmp *rel(%rip)` of .plt, .plt.sec and .plt.got, and mold's, which first loads r11.
    """
    at = 4 if code[:4] == ENDBR64 else 0
    if code[at : at + 2] == b"\x41\xbb":
        at += 6
    if code[at : at + 1] == b"\xf2":
        at += 1
    if code[at : at + 2] != b"\xff\x25" or at + 6 > len(code):
        return None
    return int(address + at + 6 + struct.unpack_from("<i", code, at + 2)[0])

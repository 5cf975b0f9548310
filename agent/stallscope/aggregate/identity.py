"""What NCCL calls a communicator: the hash in it, and the number that its log prints as `commId`.

The rules changed twice; they are NCCL's own (src/include/utils.h, src/init.cc, src/misc/utils.cc of each version):

============ =========================================== ===================== =====================================
version      comm->commHash                              commId in the log     commHash of a split's child
============ =========================================== ===================== =====================================
2.16, 2.17   no such field                               hashUniqueId          no split
2.18 - 2.23  DJB2a of the 128 bytes                      hashUniqueId          DJB2a of "%016lx-%d": parent, color
2.24, 2.25   DJB2a                                       hashUniqueId          DJB2a of "%016lx-%d-%d": parent, split
                                                                               count, color
2.26 -       eatHash and digestHash of the 128 bytes     the same              the same of parent, split count, color
============ =========================================== ===================== =====================================

The split count is 1 for a communicator's first split. A shrink counts as a split of color 0.
"""

from __future__ import annotations

import re
import struct

__all__ = ["HASH_FIELD", "NCCL_MAGIC", "Version", "child_hash", "comm_hash", "djb2a", "eat_digest", "hash_unique_id",
           "is_child_magic", "log_comm_id", "magic_back", "version_of"]  # fmt: skip

Version = tuple[int, int, int]

# startMagic at offset 0 of ncclComm from 2.21 on (src/include/comm.h); also the magic of ids that NCCL_COMM_ID made.
NCCL_MAGIC = 0x0280028002800280
HASH_FIELD: Version = (2, 18, 0)
_SPLIT_COUNTED: Version = (2, 24, 0)
_EATEN: Version = (2, 26, 0)
_MASK = (1 << 64) - 1
_VERSION = re.compile(r"(\d{1,2})\.(\d{1,3})\.(\d{1,3})")
_HEX = frozenset(b"0123456789abcdef")


def version_of(text: str | None) -> Version | None:
    """(2, 27, 5) of "2.27.5"; None for anything else."""
    found = _VERSION.fullmatch(text) if text else None
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def _signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def djb2a(data: bytes) -> int:
    """NCCL's getHash: DJB2a over signed characters, 64 bits."""
    value = 5381
    for byte in data:
        value = (value * 33 ^ _signed(byte)) & _MASK
    return value


def hash_unique_id(unique_id: bytes) -> int:
    """What NCCL up to 2.25 prints as commId."""
    value = 0xDEADBEEF
    for byte in unique_id:
        value ^= value >> 32
        value = (value * 0x8DB3DB47FA2994AD + _signed(byte)) & _MASK
    return value


def _eat(a: int, b: int, data: bytes) -> tuple[int, int]:
    a ^= len(data)
    for at in range(0, len(data), 8):
        a = (a + b) & _MASK
        b ^= a
        a = ((a ^ a >> 31) * 0x9DE62BBC8CEF3CE3) & _MASK
        b = ((b ^ b >> 32) * 0x485CD6311B599E79) & _MASK
        a = (a + int.from_bytes(data[at : at + 8], "little")) & _MASK
    return a, b


def eat_digest(*parts: bytes) -> int:
    """NCCL's eatHash over each part in turn, and digestHash of the result."""
    a, b = 1, 1
    for part in parts:
        a, b = _eat(a, b, part)
    value = ((a ^ a >> 31) * 0xBAC3BD562846DE6B + b) & _MASK
    return ((value ^ value >> 32) * 0x995A187A14E7B445) & _MASK


def comm_hash(unique_id: bytes, version: Version | None) -> int | None:
    """commHash of a communicator made from an id; None where the version has none or is not known."""
    if version is None or version < HASH_FIELD:
        return None
    return eat_digest(unique_id) if version >= _EATEN else djb2a(unique_id)


def log_comm_id(unique_id: bytes, version: Version | None) -> int | None:
    """The commId that NCCL's log prints for it."""
    if version is None:
        return None
    return eat_digest(unique_id) if version >= _EATEN else hash_unique_id(unique_id)


def child_hash(parent: int, split_count: int, color: int, version: Version | None) -> int | None:
    """commHash of a child.

    Args:
        parent: commHash of the parent.
        split_count: 1 for the parent's first split or shrink.
        color: as given to the split, signed; 0 for a shrink.
    """
    if version is None or version < HASH_FIELD:
        return None
    if version >= _EATEN:
        return eat_digest(struct.pack("<Q", parent), struct.pack("<I", split_count), struct.pack("<i", color))
    counted = f"-{split_count}" if version >= _SPLIT_COUNTED else ""
    return djb2a(f"{parent:016x}{counted}-{color}".encode())


def magic_back(version: Version) -> int:
    """How many bytes `magic` lies before `rank` in ncclComm (DWARF of 17 wheels)."""
    if version < HASH_FIELD:
        return 8
    return 24 if (2, 23, 0) <= version < (2, 27, 0) else 16


def is_child_magic(magic: bytes, comm_hash_read: int | None) -> bool:
    """Whether a communicator's 8 bytes of magic are a child's: its hash, or (up to 2.22) the parent's in hex digits."""
    return int.from_bytes(magic, "little") == comm_hash_read or _HEX.issuperset(magic)

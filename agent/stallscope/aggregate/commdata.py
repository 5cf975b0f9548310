"""What capture copied of a communicator (COMM frames), as far as it makes sense."""

from __future__ import annotations

import struct
from typing import NamedTuple

from stallscope.aggregate.checks import BadField, integer, items, maybe_text, raw
from stallscope.aggregate.identity import HASH_FIELD, NCCL_MAGIC, Version, is_child_magic, magic_back, version_of
from stallscope.wire.frames import Body

__all__ = ["CommData", "comm_data"]

# Field by field as in src/include/comm.h; the distances hold for 17 wheels from 2.16 to 2.32.
BEFORE, BYTES = 24, 64
_HASH, _RANK = BEFORE - 8, struct.Struct("<iii")  # rank, nRanks, cudaDev
START_MAGIC: Version = (2, 21, 0)
MAX_RANKS, MAX_DEVICES = 1 << 16, 64
MAX_SAMPLES, MAX_FUNCTIONS = 64, 8
WAYS = ("table", "dwarf", "code")


class CommData(NamedTuple):
    """One communicator of one process, at one moment.

    Attributes:
        key: the 8 bytes before the rank: the same in all members. commHash, or (up to 2.17) the id's first bytes.
        hash: commHash, None where it is not known that the bytes are it.
        magic: of a communicator made from an id, the id's first 8 bytes; None for a child, or where they are not known.
        wrong: why none of it is believed, None where it is.
        samples: (our number, collectives by NCCL's own count) at moments when both stood still.
    """

    pointer: int
    at_ns: int
    version: Version | None
    rank: int = -1
    nranks: int = 0
    device: int = -1
    key: int = 0
    hash: int | None = None
    magic: bytes | None = None
    wrong: str | None = None
    samples: tuple[tuple[int, int], ...] = ()


def comm_data(body: Body) -> CommData:
    """Decode a COMM frame. Raises BadField."""
    by, version = maybe_text(body, "by"), version_of(maybe_text(body, "version"))
    start, data = raw(body, "start", 8), raw(body, "data", BYTES)
    if len(start) > 8 or len(data) > BYTES or by not in (None, *WAYS):
        raise BadField("a communicator of another layout")
    known = CommData(integer(body, "pointer"), integer(body, "at_ns"), version)
    if by is None:
        return known._replace(wrong="its library does not tell where the rank is")
    if not data or not start:
        return known._replace(wrong="its memory can't be read")
    rank, nranks, device = _RANK.unpack_from(data, BEFORE)
    key = int.from_bytes(data[_HASH:BEFORE], "little")
    found = known._replace(rank=rank, nranks=nranks, device=device, key=key, samples=_samples(body))
    found = found._replace(wrong=_why_wrong(found, start))
    return found if found.wrong else _named(found, start, data)


def _samples(body: Body) -> tuple[tuple[int, int], ...]:
    rows = items(body, "samples", MAX_SAMPLES)
    for row in rows:
        if not isinstance(row, list) or not 2 <= len(row) <= 1 + MAX_FUNCTIONS:
            raise BadField("samples holds something else than samples")
        if not all(type(word) is int and 0 <= word < 1 << 64 for word in row):
            raise BadField("samples holds something else than counts")
    return tuple((row[0], sum(row[1:])) for row in rows)


def _why_wrong(data: CommData, start: bytes) -> str | None:
    if not 0 <= data.rank < data.nranks <= MAX_RANKS:
        return f"rank {data.rank} of {data.nranks}"
    if not 0 <= data.device < MAX_DEVICES:
        return f"device {data.device}"
    if not data.key:
        return "its hash is 0"
    is_newer = data.version is not None and data.version >= START_MAGIC
    if is_newer and int.from_bytes(start, "little") != NCCL_MAGIC:
        return "it does not begin with NCCL's magic"
    return None


def _named(found: CommData, start: bytes, data: bytes) -> CommData:
    """With hash and magic, where the version or the first bytes say which bytes these are."""
    version = found.version
    if version is None:
        is_newer = int.from_bytes(start, "little") == NCCL_MAGIC
        return found._replace(hash=found.key if is_newer else None)
    at = BEFORE - magic_back(version)
    magic = data[at : at + 8]
    hashed = found.key if version >= HASH_FIELD else None
    return found._replace(hash=hashed, magic=None if is_child_magic(magic, hashed) else magic)

"""NCCL's hashes of a communicator: against what real libraries printed, and against the simulation's own code."""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from stallscope.aggregate.identity import (
    child_hash,
    comm_hash,
    djb2a,
    eat_digest,
    hash_unique_id,
    is_child_magic,
    log_comm_id,
    magic_back,
    version_of,
)

ROOT = Path(__file__).resolve().parents[2]
UID = bytes(range(120, 248))
# Printed by ncclGetUniqueId of NVIDIA's wheels with NCCL_DEBUG=TRACE; the rest of each id is zero.
PRINTED = [
    ("2.18.3", "549b38ae6275efa00200a5057f000001", 0x4A12398C435CD54A),
    ("2.21.5", "6ada6c56980958210200a8557f000001", 0x5D765566DDB1FCC3),
    ("2.27.5", "535755cb8180d9ad020080d37f000001", 0xAD9A9FE8EC9873FA),
    ("2.32.3", "971332f6725af8c50200a3d57f000001", 0xBA74A484B433F6E9),
]


@pytest.mark.parametrize(("version", "start", "printed"), PRINTED)
def test_as_real_libraries_print_it(version: str, start: str, printed: int) -> None:
    assert log_comm_id(bytes.fromhex(start).ljust(128, b"\0"), version_of(version)) == printed


def test_three_regimes() -> None:
    assert comm_hash(UID, (2, 17, 1)) is None and log_comm_id(UID, (2, 17, 1)) == hash_unique_id(UID)
    for version in ((2, 18, 1), (2, 21, 5), (2, 25, 1)):
        assert (comm_hash(UID, version), log_comm_id(UID, version)) == (djb2a(UID), hash_unique_id(UID))
    for version in ((2, 26, 0), (2, 27, 5), (3, 0, 0)):
        assert comm_hash(UID, version) == log_comm_id(UID, version) == eat_digest(UID)
    assert comm_hash(UID, None) is log_comm_id(UID, None) is child_hash(1, 1, 1, None) is None


def test_bytes_are_signed() -> None:
    assert djb2a(b"") == 5381 and djb2a(b"a") == 5381 * 33 ^ 97
    assert djb2a(b"\xff") == (5381 * 33 ^ ((1 << 64) - 1))


def test_children() -> None:
    parent = 0x0123456789ABCDEF
    assert child_hash(parent, 3, 7, (2, 21, 5)) == child_hash(parent, 4, 7, (2, 23, 4)) == djb2a(b"0123456789abcdef-7")
    assert child_hash(parent, 3, -7, (2, 24, 3)) == djb2a(b"0123456789abcdef-3--7")
    packed = (struct.pack("<Q", parent), struct.pack("<I", 3), struct.pack("<i", 7))
    assert child_hash(parent, 3, 7, (2, 27, 5)) == eat_digest(*packed) != eat_digest(b"".join(packed))
    assert child_hash(parent, 3, 7, (2, 17, 1)) is None


def test_versions() -> None:
    assert version_of("2.27.5") == (2, 27, 5)
    assert [version_of(text) for text in (None, "", "2.27", "2.27.5+x", "2.27.5\n", "a.b.c", "2" * 5000)] == [None] * 7
    assert [magic_back(v) for v in ((2, 16, 5), (2, 18, 1), (2, 22, 3), (2, 23, 4), (2, 26, 5), (2, 27, 3))] == [
        8, 16, 16, 24, 24, 16,
    ]  # fmt: skip


def test_magic_of_a_child() -> None:
    assert is_child_magic((77).to_bytes(8, "little"), 77) and is_child_magic(b"01abcdef", 5)
    assert not is_child_magic(bytes(8), 5) and not is_child_magic(b"01abcdeg", None)


def test_the_simulation_hashes_alike(tmp_path: Path, needs_tool: Callable[[str], str]) -> None:
    """native/sim/nccl/hash.c was written from NCCL's own text by somebody else."""
    body = re.search(r"struct hash \{.*?\n(?=/\* 8 random)", (ROOT / "native/sim/nccl/hash.c").read_text(), re.DOTALL)
    assert body
    main = (
        "#include <stdint.h>\n#include <stdio.h>\n#include <string.h>\ntypedef struct { char b[128]; } ncclUniqueId;\n"
        + body[0]
        + "int main(void) { ncclUniqueId id; fread(&id, 128, 1, stdin);"
        'printf("%llx %llx", (unsigned long long)sim_hash_id(&id), (unsigned long long)sim_hash_child(77, 3, -2)); }'
    )
    (tmp_path / "hash.c").write_text(main)
    subprocess.run([needs_tool("cc"), "-w", tmp_path / "hash.c", "-o", tmp_path / "hash"], check=True)
    words = subprocess.run([tmp_path / "hash"], input=UID, capture_output=True, check=True).stdout.split()
    assert [int(w, 16) for w in words] == [comm_hash(UID, (2, 27, 5)), child_hash(77, 3, -2, (2, 27, 5))]

"""Damaged ELF files and made-up stacks: an answer or a ParseError, soon, in bounded memory; nothing else."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest

from stallscope.capture.parser_answers import check_names, check_natives
from stallscope.parser.ehframe import EhFrame
from stallscope.parser.elf import load
from stallscope.parser.errors import ParseError
from stallscope.parser.infer import infer
from stallscope.parser.natives import find_names, find_natives
from stallscope.parser.server import answer
from stallscope.parser.source import Source
from stallscope.parser.symbols import find_symbols

BUDGET_S = 5.0
ONE_S = 1.0
NAMES = ["cudaMalloc", "cudaFree", "cuInit", "main"]
SOURCE = """
int cudaFree(void); int cuInit(int n) { volatile char a[200]; a[n] = cudaFree(); return a[0]; }
int cudaMalloc(void) { return cuInit(3) + 1; } int cudaFree(void) { return 2; } int main(void) { return cudaMalloc(); }
"""
EXTREME = (0, 1, 0x7F, 0x80, 0xFF, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "a.c").write_text(SOURCE)
    kinds: tuple[list[str], ...] = (
        ["-shared", "-fPIC"],
        ["-shared", "-fPIC", "-s", "-fcf-protection=full"],
        ["-static-pie"],
        [],
    )
    for index, flags in enumerate(kinds):
        command = ["gcc", "-O1", "-Wl,--hash-style=both", "-o", str(folder / str(index)), str(folder / "a.c"), *flags]
        subprocess.run(command, check=True)
    return [(folder / str(index)).read_bytes() for index in range(len(kinds))]


def mutate(data: bytes, chance: random.Random) -> bytes:
    """Change a few fields of the headers or tables, or cut the file."""
    out = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        limit = chance.choice((64, 1024, len(out)))
        at = chance.randrange(min(limit, len(out) - 8))
        width, code = chance.choice(((1, "<B"), (2, "<H"), (4, "<I"), (8, "<Q")))
        value = chance.choice((*EXTREME, chance.getrandbits(64), len(out), at))
        struct.pack_into(code, out, at, value & ((1 << 8 * width) - 1))
    if chance.random() < 0.2:
        del out[chance.randrange(len(out)) :]
    return bytes(out)


def stored(data: bytes) -> int:
    """Descriptor of a file without a name."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return os.dup(file.fileno())


def read_all(fd: int, chance: random.Random) -> None:
    """All readers of one file."""
    started = time.process_time()
    try:
        find_symbols(Source(fd, "fuzz"), NAMES)
        frames = EhFrame(load(Source(fd, "fuzz")))
        for _ in range(20):
            frames.row(chance.randrange(1 << 16))
    except ParseError:
        pass
    assert time.process_time() - started < ONE_S


def test_damaged_files(images: list[bytes]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seed = random.randrange(1 << 32)
    print("seed", seed)  # shown by pytest when the test fails
    chance = random.Random(seed)
    end = time.monotonic() + BUDGET_S
    while time.monotonic() < end:
        fd = stored(mutate(chance.choice(images), chance))
        try:
            read_all(fd, chance)
        finally:
            os.close(fd)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


def made_up(chance: random.Random, image: bytes) -> dict[str, Any]:
    """A request whose stack is full of words that point behind the file's calls, at code, at itself, and nowhere."""
    base, sp = 0x7F0000000000, 0x7FFE00001000
    sites = [at + 5 for at in range(0x1000, min(0x1400, len(image) - 5)) if image[at] == 0xE8]
    called = [(site + struct.unpack_from("<i", image, site - 4)[0]) & 0x5FFF for site in sites]
    words = chance.choice((0, 1, 64, 8192))
    near = [base + chance.choice(sites) for _ in range(40)]
    near += [base + chance.randrange(0x6000) for _ in range(40)] + [sp + 8 * chance.randrange(9000) for _ in range(40)]
    stack = b"".join(struct.pack("<Q", chance.choice((*near, *EXTREME))) for _ in range(words))
    memory = {chance.choice(near): chance.randbytes(chance.choice((0, 8, 64))) for _ in range(200)}
    maps = [[base + 0x1000 * n, base + 0x1000 * (n + 1), chance.choice((-1, 0, 0, 1, 9)), 0x1000 * n] for n in range(6)]
    hooks = [[n, base + chance.randrange(0x6000), chance.choice((0, 10, 500, 1 << 62))] for n in range(200)]
    hooks += [[300 + n, base + target, 200] for n, target in enumerate(called)]
    return {"sp": sp, "pc": chance.choice(near), "bp": chance.choice((None, sp + 64, 0)), "stack": stack, "maps": maps,
            "hooks": hooks, "memory": memory, "final": chance.random() < 0.5}  # fmt: skip


def test_made_up_stacks(images: list[bytes]) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    end = time.monotonic() + BUDGET_S
    found = unwound = 0
    while time.monotonic() < end:
        fds = [stored(chance.choice(images)), stored(mutate(chance.choice(images), chance))]
        started = time.process_time()
        request, reply = made_up(chance, images[0]), {}
        with contextlib.suppress(ParseError):
            reply = infer(request, [Source(fd, "fuzz") for fd in fds])
        assert time.process_time() - started < ONE_S
        started = time.process_time()
        with contextlib.suppress(ParseError):
            natives = find_natives(request, [Source(fd, "fuzz") for fd in fds])
            check_natives(natives, len(fds))
            unwound += len(natives["frames"]) > 1
            for fd in fds:
                vaddrs = [vaddr for _, _, vaddr in natives["frames"]]
                check_names(find_names(Source(fd, "fuzz"), vaddrs), len(vaddrs))
        for fd in fds:
            os.close(fd)
        assert time.process_time() - started < ONE_S
        assert len(reply.get("need", [])) <= 256
        assert len(reply.get("frames", [])) <= 64
        found += bool(reply.get("frames"))
    assert found and unwound  # else the readers were never reached


def test_damaged_requests(images: list[bytes]) -> None:
    chance = random.Random(5)
    fd = stored(images[0])
    good = [{"id": 1, "op": "symbols", "names": NAMES}, {"id": 1, "op": "infer", **made_up(chance, images[0])}]
    packed = [msgpack.packb(request) for request in good]
    end = time.monotonic() + BUDGET_S / 2
    while time.monotonic() < end:
        body = bytearray(chance.choice(packed))
        for _ in range(chance.randint(1, 5)):
            body[chance.randrange(min(len(body), 200))] = chance.getrandbits(8)
        assert answer(bytes(body), [fd])["ok"] in (True, False)
    os.close(fd)


def test_an_endless_unwind_table_ends(images: list[bytes], tmp_path: Path) -> None:
    """Every stack word is a return address into one function, so that each step finds a further frame."""
    path = tmp_path / "a"
    path.write_bytes(images[0])
    with path.open("rb") as file:
        source = Source(file.fileno(), "a")
        _, offset, size, vaddr, _ = find_symbols(source, NAMES)["symbols"]["cuInit"]
        base = 0x7F0000000000
        stack = struct.pack("<Q", base + vaddr + size - 1) * 8192
        request = {"sp": 0x7FFE00001000, "pc": base + vaddr, "bp": None, "stack": stack, "memory": {}, "final": True}
        request["maps"] = [[base + (vaddr & ~4095), base + (vaddr & ~4095) + 4096, 0, offset & ~4095]]
        request["hooks"] = [[1, base + vaddr, size]]
        started = time.process_time()
        infer(request, [source])
        assert time.process_time() - started < ONE_S

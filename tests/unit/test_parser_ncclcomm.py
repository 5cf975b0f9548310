"""Where a library keeps a communicator's rank: by DWARF, by machine code, and what is said of files that lie."""

from __future__ import annotations

import os
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stallscope.capture.parser_answers import CommPlace, ParserFailed, check_comm
from stallscope.capture.parser_client import ParserClient
from stallscope.parser import nccl_offsets
from stallscope.parser.dwarf import layout_of
from stallscope.parser.elf import load
from stallscope.parser.errors import ParseError
from stallscope.parser.fields import loaded_and_stored, stored_constants
from stallscope.parser.ncclcomm import find_comm
from stallscope.parser.source import Source

ROOT = Path(__file__).resolve().parents[2]
SIM = ROOT / "build/sim/lib/libnccl.so.2"
HONEST = """
struct inner { int a, b; };
struct ncclComm {
  long start;
  struct { int rank; } fooled;
  char before[0x3000];
  unsigned long magic, commHash;
  int rank, nRanks, cudaDev;
  char between[0x500];
  unsigned long seqNumber[5];
};
int ready(void *c);
#define GET(name, field) \
  int name(struct ncclComm *c, int *o) { if (!c || !o || ready(c)) return 4; *o = c->field; return 0; }
GET(ncclCommUserRank, rank)
GET(ncclCommCount, nRanks)
GET(ncclCommCuDevice, cudaDev)
int ready(void *c) { return ((int *)c)[1] == 77; }
int ncclGetVersion(int *v) { if (!v) return 4; *v = 22807; return 0; }
"""
RANK_AT, SEQ_AT = 8 + 4 + 0x3000 + 4 + 16, 8 + 4 + 0x3000 + 4 + 16 + 12 + 0x500 + 4


@contextmanager
def opened(path: Path) -> Iterator[Source]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield Source(fd, path.name)
    finally:
        os.close(fd)


def asked(path: Path) -> dict[str, Any]:
    with opened(path) as source:
        return find_comm(source)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory, needs_tool: Callable[[str], str]) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("nccl")

    def compile_it(name: str, text: str, *flags: str, compiler: str = "gcc") -> Path:
        (folder / f"{name}.c").write_text(text)
        command = [needs_tool(compiler), "-w", "-shared", "-fPIC", *(flags or ("-O2", "-g"))]
        subprocess.run([*command, str(folder / f"{name}.c"), "-o", str(folder / name)], check=True)
        return folder / name

    return compile_it


def test_simulated_library() -> None:
    found = asked(SIM)
    assert found == {"by": "dwarf", "rank_at": 0x1044B8, "seq_at": 0x106550, "functions": 5, "version": "2.27.5"}


@pytest.mark.parametrize("level", ["-O1", "-O2", "-O3", "-Os"])
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_machine_code(build: Callable[..., Path], level: str, compiler: str) -> None:
    path = build(f"code{level}{compiler}", HONEST, level, compiler=compiler)
    assert asked(path) == {"by": "code", "rank_at": RANK_AT, "seq_at": None, "functions": 5, "version": "2.28.7"}


@pytest.mark.parametrize("flags", [("-g", "-O2", "-gdwarf-4"), ("-g", "-O2", "-gdwarf-5"), ("-g3", "-O0")])
def test_debug_information(build: Callable[..., Path], flags: tuple[str, ...]) -> None:
    """Also of a member of the same name in an inner struct."""
    path = build("dwarf" + "".join(flags), HONEST, *flags)
    assert asked(path) == {"by": "dwarf", "rank_at": RANK_AT, "seq_at": SEQ_AT, "functions": 5, "version": "2.28.7"}


def test_counters_that_are_not_kept(build: Callable[..., Path]) -> None:
    assert asked(build("older", HONEST.replace("22807", "22505")))["seq_at"] is None


def test_version_in_words(build: Callable[..., Path]) -> None:
    text = HONEST.replace("*v = 22807", "*v = ready(v)") + 'const char *w = "NCCL version 2.29.1+cuda13.0";'
    assert asked(build("words", text))["version"] == "2.29.1"
    text += 'const char *x = "NCCL version 2.30.1+cuda13.0";'
    assert asked(build("two", text))["version"] is None


def test_lying_debug_information(build: Callable[..., Path]) -> None:
    """Fields that are not one behind the other are not believed: then the code speaks."""
    head, tail = HONEST.split("int ready(void *c);")
    lie = head.replace("int rank, nRanks, cudaDev;", "int rank, between2, nRanks, cudaDev;")
    (path := build("lie1", lie + "int ready(void *c);" + tail, "-O2", "-g")).stat()
    assert asked(path)["by"] is None
    far = HONEST.replace("0x3000", "0x3000000")
    assert asked(build("lie2", far))["by"] is None
    near = HONEST.replace("char before[0x3000];", "")
    assert asked(build("lie3", near))["by"] is None


def test_getters_that_disagree(build: Callable[..., Path]) -> None:
    text = HONEST.replace("GET(ncclCommCount, nRanks)", "GET(ncclCommCount, rank)")
    assert asked(build("disagree", text, "-O2"))["by"] is None


def test_arm_code() -> None:
    """As disassembled from the aarch64 wheel of 2.27.5: add x22, x22, #0x104, lsl #12; mov w19, #0;
    ldr w0, [x22, #0x4b8]; str w0, [x23]."""
    words = (0x914412D6, 0x52800013, 0xB944BAC0, 0xB90002E0)
    assert loaded_and_stored(struct.pack("<4I", *words), "aarch64") == {0x1044B8}
    # movz w1, #0x58b1; str w1, [x0]
    assert stored_constants(struct.pack("<2I", 0x52800000 | 0x58B1 << 5 | 1, 0xB9000001), "aarch64") == {22705}


def test_any_bytes_are_decoded() -> None:
    import random

    chance = random.Random(5)
    for _ in range(300):
        data = chance.randbytes(chance.randrange(200))
        for machine in ("x86_64", "aarch64", "62"):
            loaded_and_stored(data, machine), stored_constants(data, machine)


def test_damaged_debug_information(build: Callable[..., Path], tmp_path: Path) -> None:
    """Bytes of the debug sections changed at random: an answer or ParseError, soon."""
    import random

    path, chance = build("damaged", HONEST), random.Random(7)
    image = path.read_bytes()
    with opened(path) as source:
        elf = load(source)
        sections = [elf.section(n) for n in (b".debug_info", b".debug_abbrev", b".debug_str")]
    answers = set()
    end = time.monotonic() + 20
    for number in range(300):
        data = bytearray(image)
        for _ in range(chance.randint(1, 6)):
            section = chance.choice(sections)
            assert section
            at = section.offset + chance.randrange(section.size)
            data[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        (tmp_path / str(number)).write_bytes(data)
        begin = time.monotonic()
        with opened(tmp_path / str(number)) as source:
            try:
                layout_of(load(source), "ncclComm", "rank")
                answers.add("layout")
            except ParseError:
                answers.add("refused")
        assert asked(tmp_path / str(number))["by"] in ("dwarf", "code")
        assert time.monotonic() - begin < 5
        (tmp_path / str(number)).unlink()
        if time.monotonic() > end:
            break
    assert answers == {"layout", "refused"}


def test_table() -> None:
    assert len(nccl_offsets.BY_BUILD_ID) == 17
    assert all(0x100 < rank < 16 << 20 and rank % 8 == 0 for _, rank, _ in nccl_offsets.BY_BUILD_ID.values())


def test_through_the_process() -> None:
    client = ParserClient()
    try:
        fd = os.open(SIM, os.O_RDONLY)
        assert client.nccl_comm(fd) == CommPlace("dwarf", 0x1044B8, 0x106550, 5, "2.27.5")
        assert client.symbols(fd, ["ncclGetVersion"]).nccl_version == "2.27.5"
        os.close(fd)
        fd = os.open(ROOT / "README.md", os.O_RDONLY)
        with pytest.raises(ParserFailed):
            client.nccl_comm(fd)
        os.close(fd)
    finally:
        client.close()


GOOD = {"by": "code", "rank_at": 0x3000, "seq_at": None, "functions": 5, "version": None}


@pytest.mark.parametrize("wrong", [
    {"by": "guess"}, {"by": 1}, {"rank_at": 0}, {"rank_at": -1}, {"rank_at": 1 << 40}, {"rank_at": None},
    {"seq_at": "x"}, {"seq_at": 1 << 30}, {"functions": 9}, {"functions": None}, {"version": "2.27"},
    {"version": "2.27.5\n"}, {"version": 5},
])  # fmt: skip
def test_answers_are_checked(wrong: dict[str, Any]) -> None:
    assert check_comm(GOOD).rank_at == 0x3000
    with pytest.raises(ParserFailed):
        check_comm(GOOD | wrong)

"""Symbols of small ELF files of every shape, of real libraries, and compared with pyelftools."""

from __future__ import annotations

import os
import platform
import struct
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stallscope.parser import elf as e
from stallscope.parser.ehframe import EhFrame
from stallscope.parser.errors import ParseError
from stallscope.parser.source import Source
from stallscope.parser.symbols import find_symbols

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="builds x86-64 files")

LIBRARY = "int cudaMalloc(void) { return 1; } int cudaFree(void) { return 2; } int helper(void) { return 3; }"
NAMES = ["cudaMalloc", "cudaFree", "cuInit"]
ENDBR64 = b"\xf3\x0f\x1e\xfa"


def compile_c(out: Path, source: str, *flags: str) -> Path:
    path = out.with_suffix(".c")
    path.write_text(source)
    subprocess.run(["gcc", "-w", "-O2", "-o", str(out), str(path), *flags], check=True)
    return out


def symbols(path: Path, names: list[str] = NAMES) -> dict[str, Any]:
    with path.open("rb") as file:
        return find_symbols(Source(file.fileno(), path.name), names)


def nm(path: Path, *flags: str) -> dict[str, int]:
    output = subprocess.run(["nm", "--defined-only", *flags, str(path)], check=True, capture_output=True, text=True)
    rows = (line.split() for line in output.stdout.splitlines())
    return {row[2].split("@")[0]: int(row[0], 16) for row in rows if len(row) == 3}


def test_a_shared_library(tmp_path: Path) -> None:
    path = compile_c(
        tmp_path / "libcudart.so.12", LIBRARY, "-shared", "-fPIC", "-Wl,-soname,libcudart.so.12,--build-id"
    )
    answer = symbols(path)
    assert answer["soname"] == "libcudart.so.12"
    assert (answer["kind"], answer["machine"], answer["stripped"]) == ("library", "x86_64", False)
    assert len(answer["build_id"]) == 40
    assert set(answer["symbols"]) == {"cudaMalloc", "cudaFree"}
    for name, (probe, offset, size, vaddr, table) in answer["symbols"].items():
        assert (vaddr, table, probe) == (nm(path, "-D")[name], "dynsym", offset)
        assert size == 6


def test_the_probe_stands_behind_endbr64(tmp_path: Path) -> None:
    path = compile_c(tmp_path / "a.so", LIBRARY, "-shared", "-fPIC", "-fcf-protection=full")
    probe, offset, _, _, _ = symbols(path)["symbols"]["cudaMalloc"]
    assert probe == offset + 4
    assert path.read_bytes()[offset:probe] == ENDBR64


def test_the_offset_is_not_the_address(tmp_path: Path) -> None:
    flags = ("-shared", "-fPIC", "-Wl,-Ttext-segment=0x5550000,-z,separate-code")
    path = compile_c(tmp_path / "a.so", LIBRARY, *flags)
    _, offset, size, vaddr, _ = symbols(path)["symbols"]["cudaFree"]
    assert vaddr > 0x5550000 > offset
    assert path.read_bytes()[offset : offset + size] == b"\xb8\x02\x00\x00\x00\xc3"


def test_without_section_headers(tmp_path: Path) -> None:
    for hash_style in ("gnu", "sysv", "both"):
        flags = ("-shared", "-fPIC", "-s", f"-Wl,--hash-style={hash_style}")
        path = compile_c(tmp_path / "a.so", LIBRARY, *flags)
        expected = symbols(path)
        data = bytearray(path.read_bytes())
        struct.pack_into("<Q", data, 40, 0)
        struct.pack_into("<HHH", data, 58, 0, 0, 0)
        path.write_bytes(data)
        assert symbols(path) == expected
        assert expected["stripped"]
        assert set(expected["symbols"]) == {"cudaMalloc", "cudaFree"}


def test_a_program_that_only_imports(tmp_path: Path) -> None:
    library = compile_c(tmp_path / "libx.so", LIBRARY, "-shared", "-fPIC")
    source = (
        "int cudaMalloc(void); int cudaFree(void); int (*f)(void) = cudaFree; int main() { return cudaMalloc() + f(); }"
    )
    for flag in ("-no-pie", "-pie"):
        answer = symbols(compile_c(tmp_path / "prog", source, flag, str(library)))
        assert (answer["symbols"], answer["defined_any"], answer["kind"]) == ({}, False, "program")
        assert answer["imported"] == ["cudaFree", "cudaMalloc"]
        assert str(library) in answer["needed"] or "libx.so" in answer["needed"]


def test_a_static_runtime_stands_in_the_programs_symtab(tmp_path: Path) -> None:
    source = f"static __attribute__((noinline)) {LIBRARY} int main() {{ return cudaMalloc() + cudaFree(); }}"
    for flags in (["-no-pie"], ["-pie"], ["-static"], ["-static-pie"]):
        path = compile_c(tmp_path / "prog", source, "-fno-ipa-cp", *flags)
        answer = symbols(path)
        assert answer["kind"] == "program"
        assert {n: s[3:] for n, s in answer["symbols"].items()} == {
            name: [nm(path)[name], "symtab"] for name in ("cudaMalloc", "cudaFree")
        }
        subprocess.run(["strip", str(path)], check=True)
        assert (symbols(path)["symbols"], symbols(path)["stripped"]) == ({}, True)


def test_versions_aliases_and_ifuncs(tmp_path: Path) -> None:
    source = """
    int old(void) { return 1; } int new(void) { return 2; } int cudaFree(void) { return 3; }
    __asm__(".symver old, cudaMalloc@V1"); __asm__(".symver new, cudaMalloc@@V2");
    extern int pcudaFree(void) __attribute__((alias("cudaFree")));
    static int chosen(void) { return 4; } static void *pick(void) { return chosen; }
    int cuInit(void) __attribute__((ifunc("pick")));
    int cuData = 5;
    """
    script = tmp_path / "map"
    script.write_text("V1 { global: cudaMalloc; }; V2 { global: cudaMalloc; cudaFree; pcudaFree; cuInit; cuData; } V1;")
    path = compile_c(tmp_path / "a.so", source, "-shared", "-fPIC", f"-Wl,--version-script={script}")
    answer = symbols(path, [*NAMES, "pcudaFree", "cuData"])
    found = answer["symbols"]
    assert set(found) == {"cudaMalloc", "cudaFree", "pcudaFree"}
    assert found["cudaMalloc"][3] == nm(path)["new"]
    assert found["cudaFree"] == found["pcudaFree"]
    assert answer["rejected"] == {"cuInit": "ifunc"}


def test_what_is_no_elf_file_is_refused(tmp_path: Path) -> None:
    good = compile_c(tmp_path / "a.so", LIBRARY, "-shared", "-fPIC").read_bytes()
    wrong = {"empty": b"", "text": b"#!/bin/sh\n" * 20, "short": good[:200], "32 bit": good[:4] + b"\x01" + good[5:]}
    wrong["headers only"] = good[: 64 + 56 * 4]
    for what, data in wrong.items():
        path = tmp_path / "bad"
        path.write_bytes(data)
        with pytest.raises(ParseError) as caught:
            symbols(path)
        assert caught.value.object == "bad", what


def test_hostile_counts_end_fast(tmp_path: Path) -> None:
    """A dynamic table that claims 2^32 symbols, buckets or bytes."""
    path = compile_c(tmp_path / "a.so", LIBRARY, "-shared", "-fPIC", "-s", "-Wl,--hash-style=both")
    good = path.read_bytes()
    with path.open("rb") as file:
        elf = e.load(Source(file.fileno(), "a"))
    place = elf.segments[[s.kind for s in elf.segments].index(e.PT_DYNAMIC)].offset
    for tag in (e.DT_STRSZ, e.DT_HASH, e.DT_GNU_HASH, e.DT_SYMTAB, e.DT_STRTAB, e.DT_VERSYM, e.DT_SONAME):
        for value in (0, 1, 1 << 31, 1 << 63, (1 << 64) - 1):
            data = bytearray(good)
            for at in range(place, place + 40 * 16, 16):
                if struct.unpack_from("<Q", data, at)[0] == tag:
                    struct.pack_into("<Q", data, at + 8, value)
            path.write_bytes(data)
            started = time.process_time()
            with suppress(ParseError):
                symbols(path)
            assert time.process_time() - started < 1


@pytest.mark.parametrize("which", ["real_cudart", "real_nccl"])
def test_real_libraries_agree_with_pyelftools(which: str, request: pytest.FixtureRequest) -> None:
    path = str(request.getfixturevalue(which))
    elffile = pytest.importorskip("elftools.elf.elffile")
    with open(path, "rb") as file:
        table = elffile.ELFFile(file).get_section_by_name(".dynsym")
        functions = {
            s.name: s["st_value"] for s in table.iter_symbols()
            if s["st_info"]["type"] == "STT_FUNC" and s["st_shndx"] != "SHN_UNDEF"
        }  # fmt: skip
    started = time.process_time()
    answer = symbols(Path(path), list(functions))
    elapsed = time.process_time() - started
    assert {name: s[3] for name, s in answer["symbols"].items()} == functions
    assert elapsed < 0.1
    with open(path, "rb") as file:
        for name, (probe, offset, _, vaddr, _) in list(answer["symbols"].items())[:20]:
            assert probe - offset == (4 if os.pread(file.fileno(), 4, offset) == ENDBR64 else 0), name
            assert vaddr == offset


def test_unwind_rows_agree_with_pyelftools(real_cudart: Path) -> None:
    path = str(real_cudart)
    elffile = pytest.importorskip("elftools.elf.elffile")
    with open(path, "rb") as file:
        entries = elffile.ELFFile(file).get_dwarf_info().EH_CFI_entries()
        frames = EhFrame(e.load(Source(file.fileno(), "cudart")))
        checked = 0
        for entry in entries[:2000]:
            if type(entry).__name__ != "FDE":
                continue
            start = entry["initial_location"]
            table = entry.get_decoded().table
            ends = [line["pc"] for line in table[1:]] + [start + entry["address_range"]]
            for line, end in zip(table, ends, strict=True):
                rule = line["cfa"]
                row = frames.row(end - 1)
                if rule.reg is None or row is None or end - 1 < line["pc"]:
                    continue
                assert (row.start, row.cfa.register, row.cfa.offset) == (start, rule.reg, rule.offset)
                checked += 1
    assert checked > 5000

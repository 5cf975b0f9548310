"""Three compilers and numpy agree on every struct of native/wire.h: cffi's compiler, clang for BPF, the dtypes."""

from __future__ import annotations

import itertools
import platform
import re
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile
from stallscope.capture._drain import ffi, lib

from stallscope.capture import rings
from stallscope.wire import columns

ROOT = Path(__file__).resolve().parents[2]
Tool = Callable[[str], str]
DTYPES = {"wire_rec": columns.REC, "wire_uid_rec": columns.UID_REC, "wire_count": columns.COUNT,
          "wire_time": columns.TIME, "wire_frame": columns.FRAME, "wire_row": columns.ROW}  # fmt: skip
STRUCTS = re.findall(r"^struct (wire_\w+) \{", (ROOT / "native/wire.h").read_text(), re.MULTILINE)
HEADER = (ROOT / "native/wire.h").read_text()


class Layout(NamedTuple):
    """Size and offsets in bytes."""

    size: int
    offsets: dict[str, int]


def cffi_layout(name: str) -> Layout:
    kind = ffi.typeof(f"struct {name}")
    return Layout(ffi.sizeof(kind), {field: info.offset for field, info in kind.fields})


def numpy_layout(dtype: np.dtype[Any]) -> Layout:
    assert dtype.fields is not None
    return Layout(dtype.itemsize, {name: info[1] for name, info in dtype.fields.items()})


def btf_structs(data: bytes) -> Iterator[tuple[str, Layout]]:
    _, _, _, header, types, types_size, strings, _ = struct.unpack_from("<HBBIIIII", data)
    extra = {1: (4, 0), 3: (12, 0), 4: (0, 12), 5: (0, 12), 6: (0, 8), 13: (0, 8), 14: (4, 0), 15: (0, 12),
             17: (4, 0), 19: (0, 12)}  # fmt: skip

    def name_at(offset: int) -> str:
        start = header + strings + offset
        return data[start : data.index(b"\0", start)].decode()

    at = header + types
    while at < header + types + types_size:
        name, info, size = struct.unpack_from("<III", data, at)
        kind, count = info >> 24 & 31, info & 0xFFFF
        if kind == 4:
            members = [struct.unpack_from("<III", data, at + 12 + 12 * i) for i in range(count)]
            yield name_at(name), Layout(size, {name_at(m): (bits & 0xFFFFFF) // 8 for m, _, bits in members})
        fixed, each = extra.get(kind, (0, 0))
        at += 12 + fixed + each * count


@pytest.fixture(scope="module")
def bpf_layouts(tmp_path_factory: pytest.TempPathFactory, needs_tool: Tool) -> dict[str, Layout]:
    """BTF leaves out a struct that is only used through local pointers, so this source holds one pointer to each."""
    folder = tmp_path_factory.mktemp("layout")
    pointers = "".join(f"struct {name} *{name}_;\n" for name in STRUCTS)
    (folder / "layout.bpf.c").write_text('#include "stallscope.bpf.c"\n' + pointers)
    arch = {"x86_64": "x86", "aarch64": "arm64"}[platform.machine()]
    subprocess.run(
        [needs_tool("clang"), "-O2", "-g", "-target", "bpf", "-mcpu=v3", f"-D__TARGET_ARCH_{arch}", "-DWIRE_BPF",
         f"-I/usr/include/{platform.machine()}-linux-gnu", f"-I{ROOT}/native", f"-I{ROOT}/probes",
         "-c", "layout.bpf.c", "-o", "layout.o"],
        cwd=folder, check=True,
    )  # fmt: skip
    with Path(folder / "layout.o").open("rb") as file:
        return dict(btf_structs(ELFFile(file).get_section_by_name(".BTF").data()))


def test_the_list_of_structs_is_complete() -> None:
    assert len(STRUCTS) == HEADER.count("\nstruct wire_") == 21
    assert set(DTYPES) <= set(STRUCTS)


@pytest.mark.parametrize("name", STRUCTS)
def test_bpf_and_cffi_agree(name: str, bpf_layouts: dict[str, Layout]) -> None:
    assert bpf_layouts[name] == cffi_layout(name)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_numpy_and_cffi_agree(name: str) -> None:
    assert numpy_layout(DTYPES[name]) == cffi_layout(name)


def test_numpy_and_cffi_agree_on_each_field_size() -> None:
    for name, dtype in DTYPES.items():
        assert dtype.fields is not None
        for field, info in ffi.typeof(f"struct {name}").fields:
            assert ffi.sizeof(info.type) == dtype.fields[field][0].itemsize, (name, field)


def test_constants_written_twice_are_the_same() -> None:
    assert (columns.BUCKETS, columns.DEPTH) == (lib.WIRE_BUCKETS, lib.WIRE_DEPTH)
    assert (columns.REC.itemsize, columns.UID_REC.itemsize) == (rings.REC_BYTES, rings.UID_BYTES)
    assert columns.ROW.itemsize == rings.ROW_BYTES


def test_records_wants_whole_records() -> None:
    assert columns.records(bytes(208)).shape == (2,)
    assert not columns.records(b"").size
    with pytest.raises(ValueError, match="103"):
        columns.records(bytes(103))


def c_buckets(cc: str, tmp_path: Path, values: list[int]) -> list[int]:
    """bucket_of and log2_of as they stand in probes/maps.h."""
    text = (ROOT / "probes/maps.h").read_text()
    body = text[text.index("INL u32 log2_of") :]
    main = 'int main(void) { unsigned long long v; while (scanf("%llu", &v) == 1) printf("%u\\n", bucket_of(v)); }\n'
    source = '#include <stdio.h>\n#include "wire.h"\ntypedef uint32_t u32;\ntypedef uint64_t u64;\n#define INL static\n'
    (tmp_path / "b.c").write_text(source + body + main)
    subprocess.run([cc, f"-I{ROOT}/native", "b.c", "-o", "b"], cwd=tmp_path, check=True)
    lines = "\n".join(map(str, values))
    done = subprocess.run([tmp_path / "b"], input=lines, check=True, capture_output=True, text=True)
    return [int(line) for line in done.stdout.split()]


def test_bounds_are_those_that_the_program_counts_by(tmp_path: Path, needs_tool: Tool) -> None:
    cc = needs_tool("cc")
    bounds = [columns.bucket_bounds(i) for i in range(columns.BUCKETS)]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds)) and bounds[0][0] == 0
    edges = [value for low, high in bounds for value in (low, high - 1)]
    assert c_buckets(cc, tmp_path, edges) == [i for i in range(columns.BUCKETS) for _ in range(2)]
    assert c_buckets(cc, tmp_path, [1 << 47, (1 << 64) - 1]) == [columns.BUCKETS - 1] * 2
    assert columns.bucket_bounds(13) == (1280, 1536)


def test_a_percentile_is_within_an_eighth() -> None:
    for index in range(1, columns.BUCKETS):
        hist = np.zeros(columns.BUCKETS, np.uint32)
        hist[index] = 1
        low, high = columns.bucket_bounds(index)
        middle = columns.percentile(hist, 0.5)
        assert middle is not None and abs(middle - low) <= low / 8 and abs(middle - (high - 1)) <= high / 8


def test_percentile_picks_the_rank() -> None:
    hist = np.zeros(columns.BUCKETS, np.uint32)
    assert columns.percentile(hist, 0.5) is None
    hist[[0, 20, 40]] = [7, 92, 1]
    middle = [sum(columns.bucket_bounds(i)) // 2 for i in (0, 20, 40)]
    assert [columns.percentile(hist, q) for q in (0.07, 0.071, 0.99, 0.991, 1.0)] == [
        middle[0], middle[1], middle[1], middle[2], middle[2]]  # fmt: skip
    with pytest.raises(ValueError, match="quantile"):
        columns.percentile(hist, 0)

"""Copies of one file are looked through once, and only copies."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stallscope.capture.parser_client import ParserClient
from stallscope.capture.procfs import Mapping
from stallscope.capture.ranges import runtime_ranges
from stallscope.capture.resolver import Resolver, is_whole
from stallscope.capture.target import LinkedLibrary, Point, Resolved
from stallscope.wire.hook_table import BY_NAME

CUDART = frozenset(("CUDART",))
CODE = """
int cudaMalloc(void) { return 1; }
int cudaFree(void) { return 2; }
%s
"""


@pytest.fixture
def resolver() -> Iterator[Resolver]:
    parser = ParserClient()
    yield Resolver(parser)
    parser.close()


def build(cc: str, folder: Path, name: str, text: str = "", *flags: str) -> Path:
    source = folder / f"{name}.c"
    source.write_text(CODE % text)
    options = ["-shared", "-fPIC", "-O1", "-fcf-protection=none", "-Wl,--build-id=0xabcdef12"]
    subprocess.run([cc, *options, *flags, "-o", folder / name, source], check=True)
    return folder / name


def resolve(resolver: Resolver, path: Path, libraries: frozenset[str] = CUDART) -> Resolved:
    fd = os.open(path, os.O_RDONLY)
    try:
        return resolver.resolve(fd, libraries)
    finally:
        os.close(fd)


def names(found: Resolved) -> set[str]:
    return {point.hook.name for point in found.points}


def test_copies_are_parsed_once(resolver: Resolver, needs_tool, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    one = build(needs_tool("cc"), tmp_path, "one.so")
    two = tmp_path / "two.so"
    shutil.copy(one, two)
    assert names(resolve(resolver, one)) == {"cudaMalloc", "cudaFree"}
    assert resolve(resolver, one) is resolve(resolver, two)
    assert resolver.parsed == 1
    resolve(resolver, two, frozenset(("CUDART", "CUDA")))
    assert resolver.parsed == 2


def test_a_file_with_another_ones_build_id(resolver: Resolver, needs_tool, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Same id, same size, other functions: its own answer."""
    one = build(needs_tool("cc"), tmp_path, "one.so", "int cudaHostAlloc(void) { return 3; }")
    two = build(needs_tool("cc"), tmp_path, "two.so", "int cudaFreeAsync(void) { return 3; }")
    assert resolve(resolver, one).build_id == resolve(resolver, two).build_id == "abcdef12"
    assert one.stat().st_size == two.stat().st_size
    assert names(resolve(resolver, two)) == {"cudaMalloc", "cudaFree", "cudaFreeAsync"}


def test_other_code_under_the_same_tables(resolver: Resolver, needs_tool, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Where a probe stands depends on an endbr64 in the code: it is looked at in each copy."""
    one = build(needs_tool("cc"), tmp_path, "one.so")
    two = tmp_path / "two.so"
    shutil.copy(one, two)
    first = resolve(resolver, one)
    with two.open("r+b") as file:
        file.seek(first.points[0].symbol_offset)
        file.write(b"\xf3\x0f\x1e\xfa")
    second = resolve(resolver, two)
    assert second.points[0].probe_offset == first.points[0].probe_offset + 4


def test_changed_in_place(resolver: Resolver, needs_tool, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    one = build(needs_tool("cc"), tmp_path, "one.so")
    resolve(resolver, one)
    build(needs_tool("cc"), tmp_path, "one.so", "int cudaHostAlloc(void) { return 3; }")
    assert "cudaHostAlloc" in names(resolve(resolver, one))


def test_what_makes_a_library_whole(resolver: Resolver, needs_tool, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    forwarder = build(needs_tool("cc"), tmp_path, "f.so", "int cudaLaunchKernel(void) { return 3; }")
    both = "int cudaLaunchKernel(void) { return 3; } const char *cudaGetErrorName(int e) { return 0; }"
    assert not is_whole(resolve(resolver, forwarder), "CUDART")
    assert is_whole(resolve(resolver, build(needs_tool("cc"), tmp_path, "w.so", both)), "CUDART")


INNER = """
#define KEEP __attribute__((noinline, used, visibility("hidden"), aligned(16)))
KEEP int own_before(void) { return 1; }
KEEP int libcudart_static_01(void) { return 2; }
KEEP int cudaDeviceSynchronize(void) { return 3; }
KEEP int libcudart_static_02(void) { return 4; }
KEEP int own_after(void) { return 5; }
"""


def test_hull_of_a_runtime_inside(needs_tool, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The driver is called from inner functions on both sides of the API: they belong to it, the neighbours don't."""
    path = tmp_path / "prog.so"
    (tmp_path / "i.c").write_text(INNER)
    flags = ["-shared", "-fPIC", "-O1", "-fno-toplevel-reorder"]
    subprocess.run([needs_tool("cc"), *flags, "-o", path, tmp_path / "i.c"], check=True)
    client = ParserClient()
    with path.open("rb") as file:
        prefixes = ["libcudart_static_", "cuda"]
        found = client.symbols(file.fileno(), ["cudaDeviceSynchronize", "own_before", "own_after"], prefixes=prefixes)
        inner = client.symbols(file.fileno(), ["libcudart_static_01", "libcudart_static_02"]).symbols
    client.close()
    at = {name: s.symbol_offset for name, s in (found.symbols | inner).items()}
    assert found.hull is not None
    low, high = found.hull
    assert low == at["libcudart_static_01"] and at["libcudart_static_02"] < high <= at["own_after"]
    hook = BY_NAME["cudaDeviceSynchronize"]
    points = [Point(hook, at[hook.name], at[hook.name], 6)]
    linked = LinkedLibrary("CUDART", "p", resolved=Resolved(None, points, [], False, hull=found.hull), embedded=True)
    mapping = Mapping(0x10000, 0x18000, 0, (0, 1), 7, "p")
    assert runtime_ranges(linked, mapping) == [(0x10000 + low, 0x10000 + high)]


def test_words(needs_tool, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Only whole strings."""
    path = build(needs_tool("cc"), tmp_path, "w.so", 'const char *a = "oneword", *b = "another";')
    client = ParserClient()
    with path.open("rb") as file:
        found = client.symbols(file.fileno(), ["cudaFree"], words=["oneword", "word", "anothe"])
    client.close()
    assert found.words == ["oneword"]

"""CPython's tables and memory: lines by every format, and code objects that are gone."""

from __future__ import annotations

import ctypes
import os
import random
import sys
import types
from collections.abc import Iterator

import pytest

from stallscope.capture.blocked import read_memory
from stallscope.capture.parser_client import ParserClient
from stallscope.capture.pycode import CodeReader, Place, PyFrame, signature
from stallscope.capture.pyconfig import NotYet, Python, PythonFinder, Unknown
from stallscope.capture.pylayout import LAYOUTS
from stallscope.parser.pylines import find_lines, line_at

HERE = os.path.abspath(__file__)
known_python = pytest.mark.skipif(sys.version_info.minor not in LAYOUTS, reason="this Python is not known")


def codes(module: types.ModuleType) -> Iterator[types.CodeType]:
    """Every code object of a module's file."""
    assert module.__file__
    with open(module.__file__, encoding="utf-8") as file:
        left = [compile(file.read(), module.__file__, "exec")]
    while left:
        code = left.pop()
        left += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        yield code


def lines_of(code: types.CodeType) -> list[int]:
    """Line by code unit, 0 for none."""
    return [position[0] or 0 for position in code.co_positions()]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="its own table is of another format")
def test_lines_of_this_python() -> None:
    import argparse
    import dataclasses
    import inspect

    tried = 0
    for module in (argparse, dataclasses, inspect):
        for code in codes(module):
            for unit, line in enumerate(lines_of(code)):
                assert line_at(11, code.co_firstlineno, 2 * unit, code.co_linetable) == line
                tried += 1
            assert line_at(11, code.co_firstlineno, len(code.co_code), code.co_linetable) == -1
    assert tried > 20_000


def test_lines_of_310() -> None:
    # Four bytes of line 11, two without a line, then back to line 9.
    table = bytes([4, 1, 2, 128, 6, 254])
    assert [line_at(10, 10, at, table) for at in (0, 2, 4, 6, 10, 12)] == [11, 11, 0, 9, 9, -1]


def test_lines_of_39() -> None:
    # Objects/lnotab_notes.txt: (0, 1) (6, 1) (44, 5) (6, 1) for code offsets 0, 6, 50, 56 of lines 1, 2, 7, 8.
    table = bytes([0, 1, 6, 1, 44, 5, 6, 1])
    assert [line_at(9, 0, at, table) for at in (0, 5, 6, 49, 50, 56, 500)] == [1, 1, 2, 2, 7, 8, 8]
    assert line_at(9, 10, 8, bytes([8, 0xFF])) == 9  # backwards


def test_tables_that_are_anything() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        table = rng.randbytes(rng.randrange(60))
        rows = [[minor, rng.randrange(1 << 31), rng.randrange(200), table] for minor in (9, 10, 11, 14)]
        assert all(-1 <= line < 1 << 31 for line in find_lines({"tables": rows})["lines"])


@pytest.fixture(scope="module")
def python(parser: ParserClient) -> Python:
    finder = PythonFinder(parser)
    while isinstance(found := finder.find(os.getpid()), NotYet):
        pass  # the parser is still starting, on a busy machine
    assert isinstance(found, Python)
    return found


def seen(code: types.CodeType, python: Python, instr: int) -> PyFrame:
    """As BPF would have seen it."""
    at = python.layout.code_block
    block = ctypes.string_at(id(code) + at, python.layout.code_bytes)
    table = ctypes.string_at(int.from_bytes(block[-8:], "little") + 16, 88) if python.layout.has_table else b""
    return PyFrame(id(code), instr, signature(id(code), block, table))


@known_python
def test_this_interpreter_is_found(python: Python) -> None:
    assert python.minor == sys.version_info.minor
    assert (python.code_type, python.bytes_type, python.str_type) == (id(types.CodeType), id(bytes), id(str))


def named(offset: int) -> int:
    return offset


def naïve(offset: int) -> int:
    return offset


def 名前(offset: int) -> int:
    return offset


@known_python
def test_names_and_lines(parser: ParserClient, python: Python) -> None:
    functions = (named, naïve, 名前)
    frames = [seen(f.__code__, python, len(f.__code__.co_code) - 2) for f in functions]
    reader = CodeReader(os.getpid(), python, parser)
    want = [Place(HERE, f.__code__.co_firstlineno + 1, f.__name__) for f in functions]
    assert reader.places(frames) == want == reader.places(frames)


def test_every_byte_of_a_short_table_counts() -> None:
    """And none behind it: that is somebody else's."""
    block = bytes(88)
    for size in (1, 7, 8, 9, 10, 31, 64, 71, 72, 500):
        table = size.to_bytes(8, "little") + bytes(80)
        plain = signature(4096, block, table)
        for at in range(72):
            for bit in (b"\x01", b"\x80"):
                changed = table[: 16 + at] + bit + table[17 + at :]
                assert (signature(4096, block, changed) != plain) == (at < size), (size, at)
        assert signature(4096, block, table[:8] + b"\xff" * 8 + table[16:]) == plain  # the cached hash


@known_python
def test_another_signature_is_another_code(parser: ParserClient, python: Python) -> None:
    frame = seen(named.__code__, python, 0)
    reader = CodeReader(os.getpid(), python, parser)
    assert reader.places([frame._replace(sig=frame.sig ^ 1)]) == [None]
    assert reader.places([frame._replace(code=frame.code + 16), frame._replace(code=8)]) == [None, None]


@known_python
def test_freed_code_is_gone(parser: ParserClient, python: Python) -> None:
    reader = CodeReader(os.getpid(), python, parser)
    gone = []
    for number in range(200):
        code = compile("\n" * number + "pass\n", "<freed>", "exec")
        gone.append((seen(code, python, 2), number + 1))
        del code
    places = reader.places([frame for frame, _ in gone])
    # One that lies where another lay is that other one, or none; never with a wrong line.
    assert all(place is None or place.line in (None, line) for place, (_, line) in zip(places, gone, strict=True))
    assert places.count(None) >= 150


@known_python
def test_a_runtime_that_has_not_begun(parser: ParserClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stallscope.capture.pyconfig._first_interpreter", lambda pid, at, minor: 0)
    assert isinstance(PythonFinder(parser).find(os.getpid()), NotYet)


@known_python
def test_two_interpreters_are_not_told_apart(parser: ParserClient, monkeypatch: pytest.MonkeyPatch) -> None:
    named, files = PythonFinder(parser)._files(os.getpid())
    monkeypatch.setattr(PythonFinder, "_files", lambda self, pid: (named, files * 2))
    assert PythonFinder(parser).find(os.getpid()) == Unknown("two Python interpreters in one process")


@known_python
def test_an_interpreter_without_symbols(parser: ParserClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stallscope.capture.pyconfig.NAMES", ("none",))
    assert PythonFinder(parser).find(os.getpid()) == Unknown("the interpreter's file does not name its variables")


@known_python
@pytest.mark.parametrize("minor", [8, 15])
def test_versions_that_are_not_known(parser: ParserClient, monkeypatch: pytest.MonkeyPatch, minor: int) -> None:
    monkeypatch.setattr("stallscope.capture.pyconfig._minor", lambda pid, file: minor)
    assert PythonFinder(parser).find(os.getpid()) == Unknown(f"stacks of CPython 3.{minor} are not known")


def test_a_process_without_python(parser: ParserClient) -> None:
    read, write = os.pipe()
    pid = os.posix_spawn("/bin/sleep", ["sleep", "30"], {}, file_actions=[(os.POSIX_SPAWN_CLOSE, write)])
    os.close(read)
    os.close(write)
    try:
        assert PythonFinder(parser).find(pid) is None
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_memory_that_is_not_there() -> None:
    assert read_memory(os.getpid(), [(8, 16)]) == [b""]

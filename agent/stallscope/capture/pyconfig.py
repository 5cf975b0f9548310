"""Finds the CPython in a process: its version, its runtime, and where a thread's state stands.

Everything is the target's word. What does not fit together is "unknown", with the reason: a wrong offset would show
wrong lines.
"""

from __future__ import annotations

import os
import platform
import re
import struct
from typing import NamedTuple

from stallscope.capture.blocked import read_up
from stallscope.capture.parser_client import Objects, ParserClient
from stallscope.capture.procfs import Mapping, executable_mappings
from stallscope.capture.pylayout import LAYOUTS, Layout
from stallscope.capture.variables import Variables, address_in

__all__ = ["NotYet", "Python", "PythonFinder", "Unknown", "has_hidden_threads", "thread_states", "u64"]

NAMES = ("_PyRuntime", "Py_Version", "PyExc_EncodingWarning", "PyCode_Type", "PyBytes_Type", "PyUnicode_Type")
_NAMED = re.compile(r"(?:libpython3[^/]*\.so[0-9.]*|python[0-9.]*)(?: \(deleted\))?")
_NAMED_39 = re.compile(r"(?:lib)?python3\.9(?![0-9])")
MAX_FILES = 8
# glibc, struct pthread: specific_1stblock, pairs of words of which the second is the value (x86-64, 2.31 to 2.43).
FIRST_BLOCK, PAIR, FIRST_KEYS = 0x310, 16, 32
PTHREAD_BYTES = 0x900
MAX_THREADS, LOOKED_AT = 4096, 16
# _Py_DebugOffsets of 3.13 and 3.14: cookie, version, free_threaded, then _PyRuntimeState's size, finalizing and
# interpreters.head, then PyInterpreterState's size, id, next, threads.head.
COOKIE, DEBUG_BYTES = b"xdebugpy", 80


class Unknown(NamedTuple):
    """There is a Python, and its frames can't be told."""

    why: str


class NotYet(NamedTuple):
    """It has not begun to run Python code, or the parser was held up: ask again."""


class Python(NamedTuple):
    """One interpreter: version 3.`minor`, addresses of its runtime and of three types, where a thread's fs base leads
    to its state."""

    minor: int
    layout: Layout
    runtime: int
    tss_at: int
    code_type: int
    bytes_type: int
    str_type: int


class _File(NamedTuple):
    mapping: Mapping
    objects: Objects

    def at(self, name: str) -> int | None:
        return address_in(self.objects, self.mapping, (name,))


class _Bad(Exception):
    """Why it is Unknown."""


class _HeldUp(Exception):
    """The parser did not answer in time."""


def u64(pid: int, address: int) -> int:
    """A word of the target's memory; 0 where there is none."""
    data = read_up(pid, address, 8)
    return int.from_bytes(data, "little") if len(data) == 8 else 0


class PythonFinder:
    """Asks the parser once a file, and looks into memory."""

    def __init__(self, parser: ParserClient) -> None:
        self._variables = Variables(parser, NAMES)

    def find(self, pid: int) -> Python | Unknown | NotYet | None:
        """The interpreter of a process; None where no file of it is one."""
        try:
            named, found = self._files(pid)
        except _HeldUp:
            return NotYet()
        if not found:
            return Unknown("the interpreter's file does not name its variables") if named else None
        running = [(f, at) for f in found if (at := f.at("_PyRuntime"))]
        try:
            if platform.machine() != "x86_64":
                raise _Bad(f"Python stacks are not known on {platform.machine()}")
            begun = [(f, at, minor) for f, at in running if _first_interpreter(pid, at, minor := _minor(pid, f))]
            if len(begun) > 1:
                raise _Bad("two Python interpreters in one process")
            return _configured(pid, *begun[0]) if begun else NotYet()
        except _Bad as why:
            return Unknown(str(why))

    def _files(self, pid: int) -> tuple[bool, list[_File]]:
        """(whether one bears Python's name, those that define a runtime): of the program and libraries so called.

        Raises:
            _HeldUp: the parser did not answer.
        """
        try:
            mappings, program = executable_mappings(pid), os.stat(f"/proc/{pid}/exe").st_ino
        except OSError:
            return False, []
        wanted: dict[tuple[tuple[int, int], int], Mapping] = {}
        has_name = False
        for m in mappings:
            is_named = bool(_NAMED.fullmatch(m.path.rpartition("/")[2]))
            if m.inode == program or is_named:
                wanted.setdefault((m.device, m.inode), m)
            has_name |= is_named
        files = []
        for m in list(wanted.values())[:MAX_FILES]:
            if (objects := self._variables.of(pid, m)) is None:
                raise _HeldUp
            files.append(_File(m, objects))
        return has_name, [file for file in files if "_PyRuntime" in file.objects.vaddrs]


def _minor(pid: int, file: _File) -> int:
    """Of 3.x. `Py_Version` is there from 3.11 on; a variable that came with 3.10 tells the two before."""
    at = file.at("Py_Version")
    if at is not None:
        version = u64(pid, at)
        if version >> 24 != 3:
            raise _Bad(f"its Py_Version is {version:#x}")
        return version >> 16 & 0xFF
    if "PyExc_EncodingWarning" in file.objects.vaddrs:
        return 10
    if _NAMED_39.match(file.mapping.path.rpartition("/")[2]):
        return 9
    raise _Bad("its version is not known")


def _layout(minor: int) -> Layout:
    layout = LAYOUTS.get(minor)
    if layout is None:
        raise _Bad(f"stacks of CPython 3.{minor} are not known")
    return layout


def _first_interpreter(pid: int, runtime: int, minor: int) -> int:
    """Address of the first interpreter, 0 before there is one."""
    return u64(pid, runtime + _layout(minor).interpreters)


def _configured(pid: int, file: _File, runtime: int, minor: int) -> Python | NotYet:
    layout = _layout(minor)
    if minor >= 13:
        _check_debug_offsets(read_up(pid, runtime, DEBUG_BYTES), minor, layout)
    types = [file.at(name) for name in NAMES[3:]]
    if None in types:
        raise _Bad("the file does not tell where its types are")
    states = _thread_states(pid, runtime, layout)
    if not states:
        return NotYet()
    tss_at = _tss_offset(pid, states, int.from_bytes(read_up(pid, runtime + layout.key, 4), "little"))
    code_type, bytes_type, str_type = (int(at or 0) for at in types)
    return Python(minor, layout, runtime, tss_at, code_type, bytes_type, str_type)


def _check_debug_offsets(data: bytes, minor: int, layout: Layout) -> None:
    """From 3.13 on the runtime tells its own layout: a build that differs from the table is not guessed at."""
    if len(data) < DEBUG_BYTES or data[:8] != COOKIE:
        raise _Bad(f"its CPython 3.{minor} does not tell its layout")
    version, free_threaded, _, _, interpreters, _, _, _, threads = struct.unpack_from("<9Q", data, 8)
    if free_threaded:
        raise _Bad("it is a free-threaded Python")
    if version >> 16 != 3 << 8 | minor or (interpreters, threads) != (layout.interpreters, layout.threads):
        raise _Bad(f"its CPython 3.{minor} is laid out in an unknown way")


def has_hidden_threads(pid: int, python: Python) -> bool:
    """Whether a thread may run in an interpreter that its thread-specific storage does not lead to.

    Up to CPython 3.11 that keeps leading to the interpreter from which another one was entered. The runtime numbers
    interpreters (struct pyinterpreters: head, main, next_id).
    """
    return python.minor <= 11 and u64(pid, python.runtime + python.layout.interpreters + 16) > 1


def thread_states(pid: int, python: Python) -> list[tuple[int, int]]:
    """(address, pthread_self()) of each thread state of the first interpreter, the newest thread first."""
    return _thread_states(pid, python.runtime, python.layout)


def _thread_states(pid: int, runtime: int, layout: Layout) -> list[tuple[int, int]]:
    state = u64(pid, u64(pid, runtime + layout.interpreters) + layout.threads)
    found: list[tuple[int, int]] = []
    while state and len(found) < MAX_THREADS:
        found.append((state, u64(pid, state + layout.thread_id)))
        state = u64(pid, state + layout.next_thread)
    return found


def _tss_offset(pid: int, states: list[tuple[int, int]], key: int) -> int:
    """From pthread_self() to the word that holds the thread's state: the one at which all threads looked at agree."""
    common: set[int] | None = None
    for state, thread in states[-LOOKED_AT:]:
        area, word = read_up(pid, thread, PTHREAD_BYTES), struct.pack("<Q", state)
        held = {at for at in range(0, len(area) - 7, 8) if area[at : at + 8] == word}
        if held:  # none: a thread that begins, or a state that has no thread yet
            common = held if common is None else common & held
    expected = FIRST_BLOCK + PAIR * key + 8
    if common and key < FIRST_KEYS and expected in common:
        return expected
    if common and len(common) == 1:
        return common.pop()
    raise _Bad("no thread's state is found in its thread-specific storage")

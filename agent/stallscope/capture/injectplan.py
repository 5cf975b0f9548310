"""Where in a process the injector finds what it needs: functions of libc, room for code, places that are to be avoided.

All addresses come from the process's maps and, by the parser, from the files behind them. What runs there has the
rights of that process, so the worst that a process can do by lying is to harm itself.
"""

from __future__ import annotations

import io
import mmap
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stallscope.capture._drain import ffi, lib
from stallscope.capture.environ import LIBC
from stallscope.capture.mapped import open_mapping
from stallscope.capture.parser_client import ElfSymbols, ParserClient, ParserFailed
from stallscope.capture.procfs import MAX_MAPS_BYTES, Mapping, executable_mappings, live_path

__all__ = ["ROOM", "NoPlace", "Plan", "find_gap", "find_room", "make_plan"]

ROOM = 1024  # INJECT_ROOM, native/inject/inject.h
MARK = bytes(ffi.buffer(lib.inject__mark(), lib.INJECT_MARK))
PAGE = 4096
LOW, HIGH = 1 << 32, (1 << 47) - (1 << 32)  # neither what 32-bit code uses nor the end of the address space
NEEDED = ("pthread_create", "pthread_self", "pthread_detach", "dlopen", "dlsym", "dlerror", "__errno_location")
# Of malloc.c: what is static there stands before or between them.
MALLOC = ("malloc", "free", "calloc", "realloc", "memalign", "aligned_alloc", "posix_memalign", "valloc", "pvalloc",
          "malloc_trim", "malloc_usable_size", "malloc_stats", "mallopt", "malloc_info", "mallinfo")  # fmt: skip
BEFORE_MALLOC, BEHIND_MALLOC = 0x6000, 0x400
HOLDS_LOCKS = ("fork", "_Fork", "pthread_exit")
BEHIND = 0x800  # where a symbol does not say how long it is
# Before glibc 2.34 threads and dlopen were libraries of their own.
PARTS = re.compile(r"lib(?:pthread|dl)(?:\.so\.[02]|-2\.\d+\.so)")
LOADER = re.compile(r"ld(?:-linux[\w-]*)?(?:-2\.\d+)?\.so(?:\.\d+)?")
ALLOCATOR = re.compile(r"lib(?:jemalloc|tcmalloc|mimalloc|hoard|snmalloc|[atlm]san|clang_rt)[\w.-]*\.so[\w.]*")
# glibc's __restore_rt: mov $15, %rax; syscall (sysdeps/unix/sysv/linux/x86_64/libc_sigaction.c).
RESTORER = bytes.fromhex("48c7c00f0000000f05")
MAX_RANGES = 32


class NoPlace(Exception):
    """The process has not what it takes; the text says what. `is_for_good`: attaching again would not help."""

    is_for_good = False


class NeverAPlace(NoPlace):
    """What runs there can't load the library at all."""

    is_for_good = True


class Plan(NamedTuple):
    """Addresses in the process: `functions` in the order of NEEDED, `avoid` as [from, to)."""

    functions: tuple[int, ...]
    room: int
    restorer: int
    avoid: tuple[tuple[int, int], ...]


def make_plan(pid: int, parser: ParserClient) -> Plan:
    """Raises NoPlace, OSError."""
    mappings = executable_mappings(pid)
    # Of two copies (dlmopen, an auditor) the first one loaded, which is the program's, lies higher.
    libc = next((m for m in reversed(mappings) if LIBC.fullmatch(_name(m))), None)
    if libc is None:
        raise _no_libc(mappings)
    if "musl" in libc.path:
        raise NeverAPlace("its libc is musl, which the library is not made for")
    found: dict[str, tuple[int, int]] = {}
    for mapping in [libc, *(m for m in mappings if PARTS.fullmatch(_name(m)))]:
        for name, place in _symbols(pid, parser, mapping).items():
            found.setdefault(name, place)
    lacking = [name for name in NEEDED if name not in found]
    if lacking:
        raise NoPlace(f"its libc has no {', '.join(lacking)}")
    avoid = (*_malloc(found), *_locking(found), *_elsewhere(mappings))
    return Plan(
        tuple(found[name][0] for name in NEEDED), find_room(pid, [libc, *mappings]), _restorer(pid, libc),
        avoid[:MAX_RANGES],
    )  # fmt: skip


def _no_libc(mappings: Sequence[Mapping]) -> NoPlace:
    if not mappings:
        return NoPlace("it has no memory: it is ending, or just about to run another program")
    if any(LOADER.fullmatch(_name(mapping)) for mapping in mappings):
        return NoPlace("it has not loaded its libc.so yet: the program has only begun")
    return NeverAPlace("it has no libc.so: a program that is linked statically can't load a library")


def _name(mapping: Mapping) -> str:
    return mapping.path.rpartition("/")[2].removesuffix(" (deleted)")


def _symbols(pid: int, parser: ParserClient, mapping: Mapping) -> dict[str, tuple[int, int]]:
    """Name -> (address, size), of functions whose code is in this mapping."""
    fd = open_mapping(pid, mapping)
    try:
        answer: ElfSymbols = parser.symbols(fd, sorted({*NEEDED, *MALLOC, *HOLDS_LOCKS}))
    except ParserFailed as problem:
        raise NoPlace(f"{_name(mapping)} can't be read: {problem.why}") from problem
    finally:
        os.close(fd)
    places = {}
    for name, symbol in answer.symbols.items():
        at = mapping.start + symbol.symbol_offset - mapping.offset
        if mapping.start <= at < mapping.end:
            places[name] = (at, symbol.size or BEHIND)
    return places


def _malloc(found: dict[str, tuple[int, int]]) -> Iterator[tuple[int, int]]:
    places = [found[name] for name in MALLOC if name in found]
    if places:
        yield min(at for at, _ in places) - BEFORE_MALLOC, max(at + size for at, size in places) + BEHIND_MALLOC


def _locking(found: dict[str, tuple[int, int]]) -> Iterator[tuple[int, int]]:
    yield from ((at, at + size) for at, size in (found[name] for name in HOLDS_LOCKS if name in found))


def _elsewhere(mappings: Sequence[Mapping]) -> Iterator[tuple[int, int]]:
    """The loader; allocators that replace malloc."""
    yield from ((m.start, m.end) for m in mappings if LOADER.fullmatch(_name(m)) or ALLOCATOR.fullmatch(_name(m)))


def _restorer(pid: int, libc: Mapping) -> int:
    fd = open_mapping(pid, libc)
    try:
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as text:
            at = text.find(RESTORER, libc.offset, libc.offset + libc.end - libc.start)
    finally:
        os.close(fd)
    return libc.start + at - libc.offset if at >= 0 else 0


def find_room(pid: int, mappings: Sequence[Mapping]) -> int:
    """Address of ROOM zero bytes at the end of executable memory: what fills the last page. Raises NoPlace, OSError."""
    with open(f"{live_path(pid)}/mem", "rb", buffering=0) as memory:
        for mapping in mappings:
            room = _room_at_end(memory, mapping)
            if room is not None:
                return room
    raise NoPlace("no library leaves room for code at the end of its own")


def _room_at_end(memory: io.FileIO, mapping: Mapping) -> int | None:
    """Below what an injector that was killed has left there: a thread may be in it yet."""
    for at in range(mapping.end - ROOM, mapping.end - PAGE - 1, -ROOM):
        try:
            memory.seek(at)
            data = memory.read(ROOM)
        except (OSError, ValueError):
            return None
        if len(data) == ROOM and not any(data):
            return at
        if not data.startswith(MARK):
            return None
    return None


def find_gap(pid: int, size: int) -> int:
    """Address of so many unmapped bytes, away from all that grows; another one each time. Raises NoPlace, OSError."""
    with open(f"{live_path(pid)}/maps", "rb") as file:
        lines = file.read(MAX_MAPS_BYTES).splitlines()
    used = [
        (int(start, 16), int(end, 16)) for start, _, end in (line.split(b" ", 1)[0].partition(b"-") for line in lines)
    ]
    ends, starts = [LOW, *(end for _, end in used)], [*(start for start, _ in used), HIGH]
    low, high = max(zip(ends, starts, strict=True), key=lambda gap: min(gap[1], HIGH) - max(gap[0], LOW))
    low, high = max(low, LOW), min(high, HIGH)
    if high - low < 1 << 30:
        raise NoPlace("its address space is full")
    return (low + (high - low) // 2 + secrets.randbelow((high - low) // 8)) // PAGE * PAGE

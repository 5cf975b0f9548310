"""The requests "natives" and "names": the machine code's frames of a thread, from a copy of its stack, and what the
functions are called.

Unwound by the files' tables, as in "infer". Where a file has none, a frame pointer is followed if the function's
instructions set one up, and it is where they put it; else the frames end there.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

from stallscope.parser import elf as e
from stallscope.parser.depth import depth_at
from stallscope.parser.elf import Elf
from stallscope.parser.errors import ParseError
from stallscope.parser.infer import address_of, view_of
from stallscope.parser.source import Source
from stallscope.parser.symtab import Table, dynamic_table, full_table, sized_functions
from stallscope.parser.unwind import Chain, Frame, call_at, chain
from stallscope.parser.view import View

__all__ = ["find_names", "find_natives"]

MAX_FRAMES, MAX_NAMES = 256, 256
MAX_SYMBOLS = 400_000  # of one table: a look through it takes 0.1 s
MAX_FUNCTION = 64 << 10
MAX_BY_POINTER = 16  # frames without a table: each takes a look through the symbols
PUSH_RBP = b"\x55"
ENDBR64 = b"\xf3\x0f\x1e\xfa"


class _Function(NamedTuple):
    """A symbol: addresses in the file, bytes."""

    start: int
    size: int
    name: bytes


def find_natives(request: dict[str, Any], sources: list[Source]) -> dict[str, Any]:
    """Answer the request: sp, pc, bp (or None), stack, maps as in "infer".

    Returns:
        {frames: [[pc, index of its file or -1, address in the file or 0]..], innermost first: each pc lies inside the
        call that goes further inwards; is_whole: the outermost frame of the thread is among them}.

    Raises:
        ParseError: the request is out of bounds.
    """
    view = view_of({**request, "memory": {}}, sources)
    bp = request.get("bp")
    frame: Frame | None = Frame(address_of(request["pc"]), view.sp, None if bp is None else address_of(bp))
    found: list[Frame] = []
    is_whole, left = False, MAX_BY_POINTER
    while frame is not None and len(found) < MAX_FRAMES and left:
        left -= 1
        links = chain(view, frame, lambda _: True)
        found += [f for f, _ in links.frames]
        is_whole = links.stuck is None and bool(links.frames) and links.frames[-1][1] == 0
        frame = _beyond(view, links, found)
    return {"frames": [_place(view, f.pc) for f in found[:MAX_FRAMES]], "is_whole": is_whole}


def _beyond(view: View, links: Chain, found: list[Frame]) -> Frame | None:
    """The caller of the frame that no table knows; that frame itself is found, wherever its code is known to lie."""
    stuck = links.stuck
    if stuck is None or view.range_of(stuck.pc) is None:
        return None
    found.append(stuck)
    bp = _frame_pointer(view, stuck)
    outer, site = (view.stack_word(bp), call_at(view, bp + 8)) if bp is not None else (None, None)
    return None if bp is None or site is None else Frame(site[0] - 1, bp + 16, outer)


def _frame_pointer(view: View, frame: Frame) -> int | None:
    """What rbp must be there, if the function uses it as a frame pointer: its instructions up to the pc tell."""
    where = _function(view, frame.pc)
    code = view.code(where[0], min(where[1], MAX_FUNCTION)) if where else None
    if where is None or not code or not code.removeprefix(ENDBR64).startswith(PUSH_RBP):
        return None
    depth = depth_at(code, frame.pc - where[0])
    bp = frame.sp + depth.size if depth is not None and not depth.slack else None
    return bp if frame.bp in (bp, None) else None


def _function(view: View, pc: int) -> tuple[int, int] | None:
    """Where the function at an address begins in memory, and its size in bytes, by the file's symbols."""
    place = view.file_address(pc)
    elf = view.elf(place[0].file) if place else None
    named = _named(elf, [place[1]]) if place and elf else {}
    found = named.get(place[1]) if place else None
    return (pc - place[1] + found.start, found.size) if place and found else None


def _place(view: View, pc: int) -> list[int]:
    place = view.file_address(pc)
    return [pc, place[0].file, place[1]] if place else [pc, -1, 0]


def find_names(source: Source, vaddrs: list[int]) -> dict[str, Any]:
    """Answer the request: the name of the function that holds it, or None, for each of at most 256 addresses.

    Raises:
        ParseError: the headers are damaged, or too many addresses.
    """
    if len(vaddrs) > MAX_NAMES:
        raise source.error(f"{len(vaddrs)} addresses asked for")
    named = _named(e.load(source), [address_of(vaddr) for vaddr in vaddrs])
    return {"names": [named[v].name.decode("utf-8", "replace") if v in named else None for v in vaddrs]}


def _named(elf: Elf, vaddrs: list[int]) -> dict[int, _Function]:
    """Address -> the function around it; what the loader reads counts first."""
    found: dict[int, _Function] = {}
    for locate in (dynamic_table, full_table):
        left = sorted({vaddr for vaddr in vaddrs if vaddr not in found})
        try:
            table = locate(elf)
            if table is not None and left and table.length <= MAX_SYMBOLS:
                _look_through(elf, table, left, found)
        except ParseError:
            continue  # a damaged table names nothing
    return found


def _look_through(elf: Elf, table: Table, wanted: list[int], found: dict[int, _Function]) -> None:
    """Add those of a table; of functions inside each other the one that begins last."""
    for start, size, name in sized_functions(elf, table):
        index = bisect_left(wanted, start)
        while index < len(wanted) and wanted[index] < start + size:
            known = found.get(wanted[index])
            if known is None or known.start < start:
                found[wanted[index]] = _Function(start, size, name())
            index += 1

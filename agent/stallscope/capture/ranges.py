"""Where the functions of a linked file stand in a process, and which of its addresses are a CUDA runtime."""

from __future__ import annotations

from stallscope.capture.procfs import Mapping
from stallscope.capture.target import LinkedLibrary

__all__ = ["place", "runtime_ranges", "runtime_text"]


def place(linked: LinkedLibrary, mapping: Mapping) -> set[tuple[int, int, int]]:
    """(hook id, address, size in bytes) of what of the library lies in the mapping."""
    found = ((p, mapping.start + p.symbol_offset - mapping.offset) for p in linked.resolved.points)
    return {(p.hook.id, address, p.size) for p, address in found if mapping.start <= address < mapping.end}


def runtime_ranges(linked: LinkedLibrary, mapping: Mapping) -> list[tuple[int, int]]:
    """The addresses [from, to) from which driver calls are part of a runtime call; none for other libraries."""
    text = runtime_text(linked, mapping)
    return [(mapping.start + text[0] - mapping.offset, mapping.start + text[1] - mapping.offset)] if text else []


def runtime_text(linked: LinkedLibrary, mapping: Mapping) -> tuple[int, int] | None:
    """File offsets [from, to) of the runtime's code within the mapping; None where there is none.

    A runtime inside a program shares the program's text: only its own functions are the runtime, or the program's
    driver calls would count as the runtime's.
    """
    points = [p for p in linked.resolved.points if p.hook.library == "CUDART"]
    if not points:
        return None
    low, high = mapping.offset, mapping.offset + mapping.end - mapping.start
    if linked.embedded:
        inner = linked.resolved.hull
        low = max(low, min([p.symbol_offset for p in points] + ([inner[0]] if inner else [])))
        high = min(high, max([p.symbol_offset + p.size for p in points] + ([inner[1]] if inner else [])))
    return (low, high) if low < high else None

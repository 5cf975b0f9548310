"""What was not seen, in sentences."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

from stallscope.output.empty import LIBRARIES
from stallscope.output.rows import Row
from stallscope.output.words import clean, count, duration

__all__ = ["remarks"]

UNLINKED = " not linked yet"
NAMED = 4
_OF_PROCESS = re.compile(r"(?P<who>.{1,64}? \(pid \d+\)): (?P<words>.+)", re.DOTALL)


class _Blind(NamedTuple):
    """A time without probes in some libraries of a process."""

    proc: int
    from_ns: int
    to_ns: int
    libraries: tuple[str, ...]


def remarks(report: Row) -> list[str]:
    """Notes, losses, gaps; one sentence each."""
    capture = report["capture"]
    pids = {p["proc"]: p["pid"] for p in report["processes"]}
    blind = [gap for gap in capture["gaps"] if _is_late_link(gap, pids)]
    lines = _notes([clean(note) for note in capture["notes"]])
    lines += [f"lost at {clean(place)}: {count(n)}" for place, n in capture["lost_by"].items()]
    lines += [_gap(gap, pids) for gap in capture["gaps"] if gap not in blind]
    return lines + _late_links(_merged(blind), pids)


def _notes(notes: list[str]) -> list[str]:
    """What is said of several processes in the same words is said once."""
    by_words: dict[str, list[str]] = defaultdict(list)
    for note in notes:
        found = _OF_PROCESS.fullmatch(note)
        by_words[found["words"] if found else note].append(found["who"] if found else "")
    lines = []
    for words, people in by_words.items():
        others = f" and {count(len(people) - 1)} more" if len(people) > 1 else ""
        lines.append(f"{people[0]}{others}: {words}" if people[0] else words)
    return lines


def _gap(gap: Row, pids: dict[int, int]) -> str:
    where = f"pid {pids.get(gap['proc'], '?')}" if gap["proc"] is not None else "all processes"
    missed = "unknown calls" if gap["count"] is None else f"{count(gap['count'])} records"
    span = duration(gap["to_ns"] - gap["from_ns"])
    if gap["reason"] == "before the attach":
        vital = f"all of NCCL, errors and long waits in the first {span}"
        more = f", among them {vital}" if gap["to_ns"] > gap["from_ns"] else ""
        return f"{where}: {count(gap['count'])} calls of before the attach are only counted{more}"
    return f"{where}: {missed} missed in {span} at {duration(gap['from_ns'])} ({clean(gap['reason'])})"


def _is_late_link(gap: Row, pids: dict[int, int]) -> bool:
    known = gap["reason"].removesuffix(UNLINKED) in LIBRARIES and gap["reason"].endswith(UNLINKED)
    return gap["source"] == "link" and gap["proc"] in pids and gap["count"] is None and known


def _merged(gaps: list[Row]) -> list[_Blind]:
    """By process, gaps that overlap as one: the libraries of a program are loaded together."""
    found: list[_Blind] = []
    for gap in sorted(gaps, key=lambda g: (g["proc"], g["from_ns"], g["to_ns"])):
        library = LIBRARIES[gap["reason"].removesuffix(UNLINKED)].removesuffix(".so")
        last = found[-1] if found else None
        if last and last.proc == gap["proc"] and gap["from_ns"] <= last.to_ns:
            libraries = last.libraries if library in last.libraries else (*last.libraries, library)
            found[-1] = _Blind(last.proc, last.from_ns, max(last.to_ns, gap["to_ns"]), libraries)
        else:
            found.append(_Blind(gap["proc"], gap["from_ns"], gap["to_ns"], (library,)))
    return found


def _late_links(blind: list[_Blind], pids: dict[int, int]) -> list[str]:
    by_libraries: dict[tuple[str, ...], list[_Blind]] = defaultdict(list)
    for one in blind:
        by_libraries[tuple(sorted(one.libraries, reverse=True))].append(one)
    lines = []
    for libraries, these in by_libraries.items():
        spans = [one.to_ns - one.from_ns for one in these]
        names = ", ".join(libraries)
        if len(these) > NAMED:
            who, first = f"{count(len({one.proc for one in these}))} processes", f"up to {duration(max(spans))}"
            lines.append(f"{who}: calls in the first {first} of {names} were not seen")
            continue
        for one, span in zip(these, spans, strict=True):
            lines.append(f"pid {pids[one.proc]}: calls in the first {duration(span)} of {names} were not seen")
    return lines

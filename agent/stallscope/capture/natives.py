"""Frames of machine code in the stacks of Python threads: which C extension lies between two Python lines.

The machine's stack is unwound by the parser (docs/callsites.md). Each frame of the interpreter's evaluator runs one
group of Python frames, so that what lies between two evaluators lies between those groups. The interpreter's own
functions are left out. Where the machine's frames end early, or don't agree with Python's, an entry says so.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from stallscope.capture.parser_client import NativeFrame, ParserClient, ParserFailed
from stallscope.capture.procfs import clean
from stallscope.capture.pyconfig import Python
from stallscope.capture.scene import Scene

__all__ = ["TRUNCATED", "Row", "Unwinder", "entries_by_version", "truncated"]

EVALUATOR = "_PyEval_EvalFrameDefault"
TRUNCATED = "[truncated]"
MAX_SHOWN, MAX_PATH = 31, 512
MAX_NAMES, DEADLINE_S = 1 << 14, 1.0
Row = list[Any]


class _Shown(NamedTuple):
    """A frame with its names; `is_own`: of the file that holds the evaluator."""

    file: str | None
    function: str | None
    is_evaluator: bool
    is_own: bool


def entries_by_version(python: Python, frames: int, entries: list[int]) -> list[int]:
    """As in `Site.entries`: up to CPython 3.10 an evaluator runs one frame."""
    return list(range(1, frames + 1)) if python.minor <= 10 else entries


def truncated(frames: list[Row]) -> list[Row]:
    """Python frames whose machine frames are not known."""
    return [[None, None, TRUNCATED, "native"], *frames]


class Unwinder:
    """Puts native frames between Python frames. Remembers names by file."""

    def __init__(self, parser: ParserClient) -> None:
        self._parser = parser
        self._names: dict[tuple[int, ...], str | None] = {}

    def woven(
        self, scene: Scene, sp: int, pc: int, bp: int | None, stack: bytes, frames: list[Row], entries: list[int],
        cut: bool,
    ) -> list[Row]:  # fmt: skip
        """Frames as in SITE frames, Python's and native ones, innermost first.

        Args:
            scene: of the process, which may have ended since.
            sp, pc, bp, stack: as for `ParserClient.natives`.
            frames: the Python frames.
            entries: as in `Site.entries`.
            cut: whether outer Python frames are missing.
        """
        try:
            maps, files = scene.relevant(stack, pc)
            found = self._parser.natives(
                sp=sp, pc=pc, bp=bp, stack=stack, maps=maps, files=files, deadline_s=DEADLINE_S
            )
            shown = self._shown(scene, files, found.frames)
        except (ParserFailed, OSError):
            return truncated(frames)  # what could not be parsed is the target's; that it is missing is told so
        return _woven(shown, found.is_whole, frames, entries, cut)

    def _shown(self, scene: Scene, files: Sequence[int], frames: list[NativeFrame]) -> list[_Shown]:
        keys = [_key(files, frame) for frame in frames]
        self._look_up(files, frames, keys)
        names = [self._names.get(key) if key else None for key in keys]
        own = {key[:4] for key, name in zip(keys, names, strict=True) if key and name == EVALUATOR}
        paths = [clean(scene.path_of(frame.pc))[-MAX_PATH:] or None for frame in frames]
        return [
            _Shown(path, name, name == EVALUATOR, key is not None and key[:4] in own)
            for path, name, key in zip(paths, names, keys, strict=True)
        ]

    def _look_up(self, files: Sequence[int], frames: list[NativeFrame], keys: list[tuple[int, ...] | None]) -> None:
        """Ask for the names that are not known yet, each file once. Raises ParserFailed."""
        if len(self._names) > MAX_NAMES:
            self._names.clear()
        wanted: dict[int, dict[int, tuple[int, ...]]] = {}
        for frame, key in zip(frames, keys, strict=True):
            if key is not None and key not in self._names:
                wanted.setdefault(frame.file, {})[frame.vaddr] = key
        for index, by_vaddr in wanted.items():
            names = self._parser.names(files[index], list(by_vaddr), deadline_s=DEADLINE_S)
            self._names.update(zip(by_vaddr.values(), names, strict=True))


def _key(files: Sequence[int], frame: NativeFrame) -> tuple[int, ...] | None:
    """Which address of which file. Raises OSError."""
    if frame.file < 0:
        return None
    info = os.fstat(files[frame.file])
    return info.st_dev, info.st_ino, info.st_mtime_ns, info.st_size, frame.vaddr


def _woven(shown: list[_Shown], is_whole: bool, frames: list[Row], entries: list[int], cut: bool) -> list[Row]:
    """Machine frames by evaluator, put before the group of Python frames that each evaluator runs."""
    if not any(frame.is_evaluator for frame in shown):
        # It may have no name of its own (3.14): what lies behind the interpreter's first frame is of any Python frame.
        inside = {frame.file for frame in shown if (frame.function or "").startswith(("Py", "_Py"))}
        shown, is_whole = list(itertools.takewhile(lambda frame: frame.file not in inside, shown)), False
    parts: list[list[_Shown]] = [[]]
    for frame in shown:
        if frame.is_evaluator:
            parts.append([])
        elif not frame.is_own:
            parts[-1].append(frame)
    if not _agree(len(parts) - 1, len(entries), is_whole, cut):
        return _merged(parts[:1], [0], frames, False)
    # What lies outside of the outermost evaluator is how the thread began.
    begins = [0, *entries][: len(parts)]
    return _merged(parts[: len(begins)], begins, frames, len(parts) > len(begins))


def _agree(evaluators: int, entries: int, is_whole: bool, cut: bool) -> bool:
    if is_whole:
        return evaluators >= entries if cut else evaluators == entries
    return cut or evaluators <= entries


def _merged(parts: list[list[_Shown]], begins: list[int], frames: list[Row], is_known: bool) -> list[Row]:
    """Each part before the Python frame that called it; `is_known`: whether the last part is whole."""
    woven: list[Row] = []
    left = MAX_SHOWN
    for index, (part, begin) in enumerate(zip(parts, begins, strict=True)):
        if begin >= len(frames):
            break
        woven += [[frame.file, None, frame.function, "native"] for frame in part[: max(left, 0)]]
        is_last = index == len(parts) - 1
        if left < len(part) or (is_last and not is_known):
            return [*woven, [None, None, TRUNCATED, "native"], *frames[begin:]]
        left -= len(part)
        woven += frames[begin : len(frames) if is_last else begins[index + 1]]
    return woven

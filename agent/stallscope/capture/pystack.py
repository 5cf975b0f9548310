"""The Python stack of a thread as it is now, copied from memory while the thread runs on or waits.

What it copies may change meanwhile: a stack counts if a second walk finds the same frames at the same instructions.
While they are on the stack their code objects live.
"""

from __future__ import annotations

from typing import NamedTuple

from stallscope.capture.blocked import read_memory
from stallscope.capture.pycode import CodeReader, PyFrame
from stallscope.capture.pyconfig import Python, thread_states, u64
from stallscope.capture.pylayout import NO_CFRAME
from stallscope.capture.sitetable import entries_of

__all__ = ["MAX_FRAMES", "UNSTEADY", "NotThere", "Now", "frames_now", "frames_of", "states_now"]

MAX_FRAMES, ATTEMPTS = 128, 5
UNSTEADY = PyFrame(0, 0, 0)
PTHREAD_TID = 0x2D0  # glibc, struct pthread: tid (x86-64), for versions before 3.11, which do not keep it themselves


class NotThere(Exception):
    """Why there is no stack."""


class _Walked(NamedTuple):
    """A slot; `code` 0: no Python frame, but one that CPython puts at a call from C. `is_entry`: C code called it."""

    frame: int
    code: int
    instr: int
    is_entry: bool


class Now(NamedTuple):
    """Frames, innermost first; `entries` as in `sitetable.Site`, None of a thread that does not stand still."""

    frames: list[PyFrame]
    entries: list[int] | None


def frames_now(pid: int, python: Python, reader: CodeReader, tid: int) -> Now:
    """Frames of a thread.

    Of one that does not stand still, those outside of what changes, and UNSTEADY in place of what does.

    Args:
        tid: as the process's own pid namespace numbers it.

    Raises:
        NotThere: it is no thread of Python's, runs no Python code, or did not stand still for a moment.
    """
    state = states_now(pid, python).get(tid)
    if state is None:
        raise NotThere("the thread is none of Python's")
    return frames_of(pid, python, reader, state)


def states_now(pid: int, python: Python) -> dict[int, int]:
    """PyThreadState of each thread, by the thread's number in its own pid namespace."""
    native = python.layout.native_id
    return {
        u64(pid, state + native) if native else u64(pid, thread + PTHREAD_TID) & 0xFFFFFFFF: state
        for state, thread in reversed(thread_states(pid, python))
    }


def frames_of(pid: int, python: Python, reader: CodeReader, state: int) -> Now:
    """Frames of the thread of that PyThreadState, as `frames_now` has them. Raises NotThere."""
    walked: list[_Walked] = []
    again: list[_Walked] = []
    signed: list[PyFrame] = []
    for _ in range(ATTEMPTS):
        walked = _walk(pid, python, state)
        signed = [PyFrame(w.code, w.instr, reader.sign(w.code)) for w in walked if w.code]
        again = _walk(pid, python, state)
        if walked == again and signed:
            return Now(signed, entries_of([(w.code > 0, w.is_entry) for w in walked]))
    same = _common_end([w for w in walked if w.code], [w for w in again if w.code])
    if same:
        return Now([UNSTEADY, *signed[len(signed) - same :]], None)
    raise NotThere("the thread does not stand still" if walked or again else "the thread runs no Python code")


def _common_end(one: list[_Walked], other: list[_Walked]) -> int:
    """How many of the outermost frames are the same."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _walk(pid: int, python: Python, state: int) -> list[_Walked]:
    at = python.layout
    found: list[_Walked] = []
    frame = u64(pid, state + at.frame)
    if at.cframe != NO_CFRAME:
        frame = u64(pid, frame + at.cframe)
    for _ in range(MAX_FRAMES):
        (data,) = read_memory(pid, [(frame, at.frame_bytes)]) if frame else (b"",)
        if not data:
            break
        code, instr = _word(data, at.code) & ~7, _word(data, at.instr)
        is_python = at.owner >= len(data) or data[at.owner] < at.shim_owner
        begin = code + at.instr_base if at.instr_base else 0
        is_entry = at.entry < len(data) and bool(data[at.entry] & at.entry_bit)
        found.append(_Walked(frame, code * is_python, (instr - begin) * is_python & 0xFFFFFFFF, is_entry))
        frame = _word(data, at.previous)
    return found


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")

"""Where CPython keeps what tells a thread's frames, by version. Byte offsets on 64-bit machines with a GIL.

From the headers of each version by offsetof (Include/cpython and Include/internal: pycore_runtime.h, pycore_interp.h,
pystate.h, pycore_frame.h, code.h, unicodeobject.h); from 3.13 on `_Py_DebugOffsets` at the start of _PyRuntime says the
same, and is asked (capture/pyconfig.py).
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["LAYOUTS", "NO_CFRAME", "TABLE_BYTES", "Layout"]

NO_CFRAME = 65535  # native/wire.h, WIRE_PY_NO_CFRAME
TABLE_BYTES = 88  # 8 * WIRE_PY_CODE_WORDS
NUMBERED_BYTES = 56  # 8 * WIRE_PY_NUMBERED_WORDS


class Layout(NamedTuple):
    """One version.

    Attributes:
        interpreters: of _PyRuntime: the first interpreter.
        key: of _PyRuntime: number of the thread-specific storage that holds a thread's state, 32 bits.
        threads: of an interpreter: its first thread state.
        next_thread, thread_id, frame: of a thread state; thread_id is pthread_self().
        chunk: of a thread state: begin of the memory of its newest frames, and their end in the next word; 0 = none.
        cframe: of a _PyCFrame that `frame` points to: the frame; NO_CFRAME where there is none in between.
        frame_bytes, previous, code, instr, owner, shim_owner, entry, entry_bit: of a frame, as in native/wire.h (struct
            wire_python).
        instr_base: of a code object: its instructions; 0 = `instr` is a number, of units of `unit` bytes.
        code_block: of a code object: `code_bytes` that never change, the line table's address last.
        has_table: whether the line table goes into the signature; from 3.12 on code objects are numbered.
        number: of a function, to which a frame's first word points: its version; 0 = not used.
        first_line, file, name: of a code object; name is the qualified one where there is one.
        native_id: of a thread state: its tid; None before there is one.
        text: of a str in ASCII: its characters; `wide_text` of a compact one with others.
    """

    interpreters: int
    key: int
    threads: int
    thread_id: int
    frame: int
    cframe: int
    frame_bytes: int
    previous: int
    code: int
    instr: int
    owner: int
    shim_owner: int
    instr_base: int
    code_block: int
    has_table: bool
    first_line: int
    file: int
    name: int
    text: int
    wide_text: int
    native_id: int | None
    chunk: int = 0
    entry: int = 127
    entry_bit: int = 0
    number: int = 0
    unit: int = 1
    next_thread: int = 8

    @property
    def code_bytes(self) -> int:
        """How many bytes of a code object the signature is made of."""
        return TABLE_BYTES if self.has_table else NUMBERED_BYTES

    @property
    def state_bytes(self) -> int:
        """How many bytes of a thread state hold what is read of it."""
        return max(self.thread_id, self.frame, self.chunk + 8 if self.chunk else 0) + 8

    @property
    def table(self) -> int:
        """Of a code object: the address of its line table."""
        return self.code_block + self.code_bytes - 8


# Before 3.11 frames have no owner: byte 127 of what is read is always 0. 3.11 alone has no frame of its own for each
# call from C, and marks the frame (is_entry).
LAYOUTS = {
    9: Layout(32, 588, 8, 176, 24, NO_CFRAME, 112, 24, 32, 104, 127, 255, 0, 40, True, 40, 104, 112, 48, 72, None),
    10: Layout(
        32, 588, 8, 176, 24, NO_CFRAME, 112, 24, 32, 96, 127, 255, 0, 40, True, 40, 104, 112, 48, 72, None, unit=2
    ),
    11: Layout(
        40, 596, 16, 152, 56, 8, 72, 48, 32, 56, 69, 3, 184, 56, True, 72, 112, 128, 48, 72, 160, 296, 68, 1, 128
    ),
    12: Layout(40, 1548, 72, 136, 56, 0, 72, 8, 0, 56, 70, 3, 192, 88, False, 68, 112, 128, 40, 56, 144, 232),
    13: Layout(
        632, 2164, 7344, 152, 72, NO_CFRAME, 72, 8, 0, 56, 70, 3, 200, 88, False, 68, 112, 128, 40, 56, 160, 232
    ),
    14: Layout(
        808, 2340, 7344, 152, 72, NO_CFRAME, 80, 8, 0, 56, 74, 3, 208, 88, False, 68, 112, 128, 40, 56, 160, 232
    ),
}

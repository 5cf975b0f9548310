"""The way into a CPython that lets itself be asked (PEP 768, 3.14): the interpreter runs our few lines between two
bytecodes of its main thread. Nothing is stopped, and no lock is held there.

`sys.remote_exec` speaks only to a process of the same version, so this needs a stallscope that runs on 3.14 itself.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stallscope.capture._drain import ffi, lib
from stallscope.capture.procfs import executable_mappings

__all__ = ["asked", "is_asked", "script"]

MAGIC = 0x316C7274636C7473  # SEG_CONTROL_MAGIC, native/shim/control.h
_PYTHON = re.compile(r"(?:lib)?python3\.(\d+)[a-z]*(?:\.so[0-9.]*)?(?: \(deleted\))?")
_SWITCHED_OFF = b"PYTHON_DISABLE_REMOTE_DEBUG="
# In a thread of its own, which ends at once: what goes on is none of the interpreter's, as after ptrace. The numbers
# are PROT_READ | PROT_WRITE and MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE.
_SCRIPT = """\
def _stallscope_begin():
    import _thread
    def begin(path, entry, at, size, magic, left_at, state_at, failed, text_at, text_most):
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        if libc.mmap(at, size, 3, 0x100022, -1, 0) != at:
            return
        ctypes.c_uint64.from_address(at).value = magic
        ctypes.c_uint32.from_address(at + left_at).value = 1
        try:
            function = getattr(ctypes.CDLL(path), entry)
            thread = ctypes.c_ulong()
            libc.pthread_detach.argtypes = [ctypes.c_ulong]
            if libc.pthread_create(ctypes.byref(thread), None, function, ctypes.c_void_p(at)):
                raise OSError("pthread_create failed")
            libc.pthread_detach(thread)
        except (OSError, AttributeError) as error:
            text = str(error).encode(errors="replace")[:text_most - 1]
            ctypes.memmove(at + text_at, text, len(text))
            ctypes.c_uint32.from_address(at + state_at).value = failed
    _thread.start_new_thread(begin, %r)
_stallscope_begin()
del _stallscope_begin
"""


def script(library: Path, entry: str, control: int) -> str:
    """What the interpreter is to run: the block of memory at that address, and the library in a thread."""
    at = {name: ffi.offsetof("struct seg_control", name) for name in ("left", "state", "text")}
    numbers = (control, lib.SEG_CONTROL_BYTES, MAGIC, at["left"], at["state"], lib.SEG_CONTROL_FAILED, at["text"])
    return _SCRIPT % ((str(library), entry, *numbers, lib.SEG_CONTROL_TEXT),)


def is_asked(pid: int) -> bool:
    """Whether this interpreter can ask that of the process."""
    if not hasattr(sys, "remote_exec"):
        return False
    try:
        names = [mapping.path.rpartition("/")[2] for mapping in executable_mappings(pid)]
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    minors = {int(found[1]) for name in names if (found := _PYTHON.fullmatch(name))}
    return minors == {sys.version_info.minor} and _SWITCHED_OFF not in environment


@contextmanager
def asked(pid: int, text: str) -> Iterator[None]:
    """Have the process run the script; its file is there until the end of the block. Raises OSError, RuntimeError."""
    with tempfile.NamedTemporaryFile("w", prefix="stallscope-", suffix=".py") as file:
        file.write(text)
        file.flush()
        os.fchmod(file.fileno(), 0o644)  # the process may be another user's; there is nothing secret in it
        sys.remote_exec(pid, file.name)  # type: ignore[attr-defined]
        yield

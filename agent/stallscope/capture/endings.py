"""What BPF noted of a process's end: the signals that it was sent, since when it tidies up (wire.h)."""

from __future__ import annotations

import mmap
import signal
import struct
from typing import Any, NamedTuple

from stallscope.capture._drain import ffi, lib
from stallscope.capture.procfs import clean

__all__ = ["Endings", "Sent", "exit_body", "sent_of"]

_SIGNAL = struct.Struct("<QIi16s")
# What asks a program to end; its handler may take its time.
_ASKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Sent(NamedTuple):
    """A signal and who sent it: `pid` 0: not visible from here; None: the kernel by itself. `name`: of the thread."""

    signal: int
    at_ns: int
    pid: int | None
    name: str


class Endings:
    """The rows of all slots. `fd` stays its owner's."""

    def __init__(self, fd: int) -> None:
        self._size = ffi.sizeof("struct wire_ending")
        self._map = mmap.mmap(fd, self._size * lib.WIRE_PROCS, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)

    def row(self, slot: int) -> bytes:
        """A copy. Raises IndexError."""
        if not 0 <= slot < lib.WIRE_PROCS:
            raise IndexError(f"slot {slot}")
        return self._map[slot * self._size : (slot + 1) * self._size]

    def clear(self, slot: int) -> None:
        """Before the slot is another process's."""
        if _says_something(self.row(slot)):
            self._map[slot * self._size : (slot + 1) * self._size] = bytes(self._size)

    def close(self) -> None:
        """Unmap."""
        self._map.close()


def _says_something(row: bytes) -> bool:
    return bool(row.strip(b"\0"))


def sent_of(row: bytes, died_of: int | None) -> Sent | None:
    """The signal that the process died of, or else the newest that asked it to end."""
    if not _says_something(row):  # most processes; thousands may end in a second
        return None
    sent = [_sent(number, row) for number in range(1, lib.WIRE_SIGNALS)]
    known = [one for one in sent if one is not None and one.signal in ((died_of,) if died_of else _ASKS)]
    return max(known, key=lambda one: one.at_ns, default=None)


def _sent(number: int, row: bytes) -> Sent | None:
    at_ns, pid, code, name = _SIGNAL.unpack_from(row, 8 + number * _SIGNAL.size)
    if not at_ns:
        return None
    if code > 0:
        return Sent(number, at_ns, None, "kernel")
    return Sent(number, at_ns, pid, clean(name.split(b"\0", 1)[0].decode("utf-8", "replace")))


def exit_body(row: bytes, code: int) -> dict[str, Any]:
    """What an EXIT frame says; `code` as wait(2) encodes it, -1 = unknown."""
    died_of = None if code < 0 else code & 0x7F or None
    sent = None if code < 0 else sent_of(row, died_of)
    begun = int.from_bytes(row[:8], "little") or None
    if sent is not None and sent.signal == died_of:
        begun = min(begun or sent.at_ns, sent.at_ns)
    return {
        "code": None if code < 0 or died_of else code >> 8 & 0xFF, "signal": died_of, "exiting_ns": begun,
        "sender": list(sent) if sent else None,
    }  # fmt: skip

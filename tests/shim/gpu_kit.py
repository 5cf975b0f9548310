"""The GPU's witness alone, from Python: what a wrapper calls, what NCCL calls, and what it tells."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from stallscope.wire.hook_table import BY_NAME

ROOT = Path(__file__).resolve().parents[2]
QUEUED, STARTED, FINISHED = 9, 7, 8
COLL, P2P, KERNEL, KERNEL_STOP = 2, 4, 64, 22
ROOM = 1 << 20


class Told(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_uint32), ("hook", ctypes.c_uint32), ("n", ctypes.c_uint32), ("flags", ctypes.c_uint32),
                ("comm", ctypes.c_uint64)]  # fmt: skip


class Figures(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("unmatched", "untold", "exhausted", "busy", "unbound")]


class Plugin(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), *((name, ctypes.c_void_p) for name in
                ("init", "start", "stop", "state", "finalize"))]  # fmt: skip


class Event(NamedTuple):
    """What was told; `comm` is an address."""

    kind: int
    name: str
    n: int
    comm: int


NAMES = {hook.id: name for name, hook in BY_NAME.items()}


def build(folder: Path, sanitizer: str = "") -> Path:
    """The library: the witness, with a stand-in for the rest of the shim."""
    library = folder / f"libwitness{'-' + sanitizer.split(',')[0] if sanitizer else ''}.so"
    shim = ROOT / "native/shim"
    sources = [*sorted(shim.glob("gpu_*.c")), Path(__file__).parent / "gpu_kit.c"]
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-fPIC", "-fvisibility=hidden"]
    flags += [f"-fsanitize={sanitizer}"] if sanitizer else []
    command = [
        "gcc",
        "-shared",
        *flags,
        f"-I{shim}",
        f"-I{ROOT}/native",
        "-o",
        str(library),
        *map(str, sources),
        "-ldl",
    ]
    subprocess.run([*command, "-pthread"], check=True)
    return library


class Witness:
    """The library, loaded; calls as the wrappers make them."""

    def __init__(self, library: Path) -> None:
        self.lib = ctypes.CDLL(str(library))
        self.lib.kit_take.restype = ctypes.c_uint64
        self._room = (Told * ROOM)()
        self.numbers: dict[int, int] = {}

    def words(self, name: str, **values: int) -> Any:
        """Recorded words of a call, by what they are called in the hook table."""
        names = BY_NAME[name].arguments.split()
        assert set(values) <= set(names), (names, values)
        return (ctypes.c_uint64 * 8)(*(values.get(word, 0) for word in [*names, *[""] * 8][:8]))

    def enter(self, name: str, **values: int) -> int:
        """A call with the next number of its communicator; the number."""
        comm = values.get("comm", 0)
        n = self.numbers.get(comm, 0)
        self.numbers[comm] = n + (comm != 0)
        self.lib.kit_entered(BY_NAME[name].id, self.words(name, **values), n)
        return n

    def leave(self, name: str, n: int = 0, status: int = 0, **values: int) -> None:
        """Its return."""
        self.lib.kit_returned(BY_NAME[name].id, self.words(name, **values), n, status)

    def call(self, name: str, **values: int) -> int:
        """Both."""
        n = self.enter(name, **values)
        self.leave(name, n, **values)
        return n

    def told(self) -> list[Event]:
        """Since the last time."""
        count = self.lib.kit_take(self._room)
        assert all(self._room[i].flags == 128 for i in range(count))
        return [Event(t.kind, NAMES[t.hook], t.n, t.comm) for t in self._room[:count]]

    @property
    def figures(self) -> dict[str, int]:
        """Those that are not 0."""
        found = Figures()
        self.lib.kit_figures(ctypes.byref(found))
        return {name: getattr(found, name) for name, _ in Figures._fields_ if getattr(found, name)}


class Nccl:
    """NCCL's side of the interface, as far as a test needs it.

    Args:
        communicator: memory that stands for one; the context's place is 64 bytes behind its beginning.
    """

    DISTANCE = 64

    def __init__(self, witness: Witness, version: int = 4, ranks: int = 2) -> None:
        self.witness, self.version = witness, version
        self.plugin = Plugin.in_dll(witness.lib, f"ncclProfiler_v{version}")
        self.memory = ctypes.create_string_buffer(4096)
        self.comm = ctypes.addressof(self.memory)
        self.context = ctypes.c_void_p.from_buffer(self.memory, self.DISTANCE)
        self.mask = ctypes.c_int(0)
        self._init(ranks)

    def _init(self, ranks: int) -> None:
        place, mask = ctypes.c_void_p(self.comm + self.DISTANCE), ctypes.byref(self.mask)
        rest = (None, 1, ranks, 0, None)
        hash_ = ctypes.c_uint64(7)
        if self.version == 3:
            arguments: tuple[Any, ...] = (place, mask)
        elif self.version == 4:
            arguments = (place, mask, rest[0], hash_, *rest[1:])
        else:
            arguments = (place, hash_, mask, *rest)
        assert ctypes.CFUNCTYPE(ctypes.c_int)(self.plugin.init)(*arguments) == 0

    def _start(self, kind: int, parent: int, part: bytes) -> int:
        # Up to version 4 the type is one byte, and what stands behind it is left over from before.
        begin = kind.to_bytes(8, "little") if self.version >= 5 else bytes([kind]) + b"\xee" * 7
        data = begin + parent.to_bytes(8, "little") + bytes(8) + part + bytes(128)
        event = ctypes.c_void_p(0xDEAD)
        start = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(self.plugin.start)
        assert start(self.context, ctypes.addressof(event), data) == 0
        return event.value or 0

    def _named(self) -> bytes:
        return bytes(16) if self.version == 3 else b""

    def queue(self, function: str, send: int, recv: int, channels: int = 1) -> int:
        """A collective; its event."""
        self._function = ctypes.create_string_buffer(function.encode())
        words = (0, ctypes.addressof(self._function), send, recv, 99, 0, 0)
        part = b"".join(word.to_bytes(8, "little") for word in words) + bytes([channels, 16])
        return self._start(COLL, 0, self._named() + part)

    def transfer(self, function: str, buffer: int, peer: int, channels: int = 1) -> int:
        """A send or a receive; its event."""
        self._function = ctypes.create_string_buffer(function.encode())
        words = (ctypes.addressof(self._function), buffer, 0, 99)
        part = b"".join(word.to_bytes(8, "little") for word in words) + peer.to_bytes(4, "little") + bytes([channels])
        return self._start(P2P, 0, self._named() + part)

    def begin(self, event: int) -> int:
        """One channel of its kernel."""
        return self._start(KERNEL, event, bytes(16))

    def stop(self, event: int) -> None:
        """Of any event that is not NULL."""
        if event:
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self.plugin.stop)(event)

    def run(self, event: int, channels: int = 1) -> None:
        """All channels, from begin to end."""
        for kernel in [self.begin(event) for _ in range(channels)]:
            self.stop(kernel)

    def finalize(self) -> None:
        """The communicator ends."""
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self.plugin.finalize)(self.context)

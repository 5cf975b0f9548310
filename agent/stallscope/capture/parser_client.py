"""Capture's end of the parser: a process without privileges that reads what a traced program controls.

One request at a time. A parser that dies, stalls or answers nonsense is ended and started anew; what it said is never
taken without the checks of `parser_answers`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack

from stallscope.capture.parser_answers import (
    CommPlace,
    ElfSymbols,
    Imports,
    Inferred,
    InferredFrame,
    NativeFrame,
    Natives,
    Objects,
    ParserFailed,
    Symbol,
    check_comm,
    check_imports,
    check_inferred,
    check_lines,
    check_names,
    check_natives,
    check_needs,
    check_objects,
    check_symbols,
    text,
)

__all__ = ["CommPlace", "ElfSymbols", "Imports", "Inferred", "InferredFrame", "NativeFrame", "Natives", "Objects",
           "ParserClient", "ParserFailed", "Symbol"]  # fmt: skip

NOBODY = 65534
LENGTH = struct.Struct("<I")
MAX_REQUEST, MAX_ANSWER = 8 << 20, 1 << 20
MAX_FILES = 64
ROUNDS = 4
ReadMemory = Callable[[list[tuple[int, int]]], list[bytes]]


class ParserClient:
    """Starts the parser, asks it, checks its answers. Not for use by several threads at once.

    Args:
        deadline_s: how long one request may take before the parser is ended.
    """

    def __init__(self, *, deadline_s: float = 3.0) -> None:
        self._deadline_s = deadline_s
        self._ids = (NOBODY, NOBODY)
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._next = 0

    def start(self, uid: int = NOBODY, gid: int = NOBODY) -> None:
        """Start the process, which becomes that user; does nothing while it runs.

        Raises:
            ParserFailed: it can't be started.
        """
        if self._sock is not None:
            return
        self._ids = (uid, gid)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = _spawn(theirs.fileno(), uid, gid)
        except OSError as problem:
            ours.close()
            raise ParserFailed("cannot start the parser", sys.executable, str(problem), died=True) from problem
        self._sock = ours

    @property
    def pid(self) -> int | None:
        """The parser's pid, or None while there is none."""
        return self._process.pid if self._process else None

    def close(self) -> None:
        """End the process; a later request would start it again."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._process is not None:
            self._process.kill()  # it holds nothing worth a clean end, and may be in hostile hands
            self._process.wait()
            self._process = None

    def symbols(
        self, fd: int, names: Sequence[str], *, words: Sequence[str] = (), prefixes: Sequence[str] = (),
        deadline_s: float | None = None,
    ) -> ElfSymbols:  # fmt: skip
        """Look up which of the names an ELF file defines, and where.

        Args:
            fd: descriptor of the file, stays the caller's.
            words: at most 8 texts to look for in its data.
            prefixes: at most 8 beginnings of names, see `ElfSymbols.hull`.

        Raises:
            ParserFailed: no usable ELF file, or the parser failed.
        """
        body = {"op": "symbols", "names": list(names), "words": list(words), "prefixes": list(prefixes)}
        answer = self._request(body, [fd], deadline_s)
        with self._distrust():
            return check_symbols(answer, frozenset(names), os.fstat(fd).st_size, frozenset(words))

    def nccl_comm(self, fd: int) -> CommPlace:
        """Ask where the NCCL in a file keeps a communicator's rank. Raises ParserFailed."""
        answer = self._request({"op": "nccl_comm"}, [fd], None)
        with self._distrust():
            return check_comm(answer)

    def imports(self, fd: int, names: Sequence[str], *, deadline_s: float | None = None) -> Imports:
        """Which of at most 8 names an ELF file uses and does not define, and the libraries it is linked with.

        Args:
            fd: descriptor of the file, stays the caller's.

        Raises:
            ParserFailed: no usable ELF file, or the parser failed.
        """
        answer = self._request({"op": "imports", "names": list(names)}, [fd], deadline_s)
        with self._distrust():
            return check_imports(answer, frozenset(names))

    def objects(self, fd: int, names: Sequence[str], *, deadline_s: float | None = None) -> Objects:
        """Where a file's variables lie, of at most 8 names. Raises ParserFailed."""
        answer = self._request({"op": "objects", "names": list(names)}, [fd], deadline_s)
        with self._distrust():
            return check_objects(answer, frozenset(names), os.fstat(fd).st_size)

    def lines(self, tables: Sequence[tuple[int, int, int, bytes]]) -> list[int]:
        """Source lines by the line tables of at most 64 Python code objects: (minor version, first line, offset of the
        instruction in bytes, table). 0 = the instruction has none, -1 = it is not in the table. Raises ParserFailed."""
        answer = self._request({"op": "lines", "tables": [list(table) for table in tables]}, [], None)
        with self._distrust():
            return check_lines(answer, len(tables))

    def natives(
        self, *, sp: int, pc: int, bp: int | None, stack: bytes, maps: Sequence[tuple[int, int, int, int]],
        files: Sequence[int], deadline_s: float | None = None,
    ) -> Natives:  # fmt: skip
        """Unwind a copy of a stack; arguments as for `infer`. Raises ParserFailed."""
        body = {"op": "natives", "sp": sp, "pc": pc, "bp": bp, "stack": stack, "maps": maps}
        answer = self._request(body, files, deadline_s)
        with self._distrust():
            return check_natives(answer, len(files))

    def names(self, fd: int, vaddrs: Sequence[int], *, deadline_s: float | None = None) -> list[str | None]:
        """Names of the functions that hold so many addresses of a file, at most 256. Raises ParserFailed."""
        answer = self._request({"op": "names", "vaddrs": list(vaddrs)}, [fd], deadline_s)
        with self._distrust():
            return check_names(answer, len(vaddrs))

    def infer(
        self,
        *,
        sp: int,
        pc: int,
        stack: bytes,
        maps: Sequence[tuple[int, int, int, int]],
        hooks: Sequence[tuple[int, int, int]],
        read: ReadMemory,
        files: Sequence[int] = (),
        bp: int | None = None,
        deadline_s: float | None = None,
    ) -> Inferred:
        """Tell which hooked calls a thread is inside.

        Args:
            sp, pc, bp: the thread's registers; bp None when unknown.
            stack: at most 64 KiB from sp upwards.
            maps: executable ranges (start, end, index into `files` or -1, file offset).
            hooks: (hook id, address of the symbol in this process, its size in bytes).
            read: copies target memory: (address, length) ranges to bytes, b"" where unreadable.
            files: descriptors of ELF files (at most 64). The more of the files on the stack are here, the further
                frames are unwound, and the less is left to guesses.

        Raises:
            ParserFailed: the parser failed.
        """
        body = {"op": "infer", "sp": sp, "pc": pc, "bp": bp, "stack": stack, "maps": maps, "hooks": hooks}
        memory: dict[int, bytes] = {}
        for left in range(ROUNDS, -1, -1):
            answer = self._request({**body, "memory": memory, "final": left == 0}, files, deadline_s)
            if "need" not in answer or left == 0:
                break
            with self._distrust():
                needs = check_needs(answer["need"])
            memory.update((address, data) for (address, _), data in zip(needs, read(needs), strict=True))
        asked = frozenset(hook for hook, _, _ in hooks)
        with self._distrust():
            return check_inferred(answer, asked, sp, stack)

    @contextlib.contextmanager
    def _distrust(self) -> Iterator[None]:
        """End the parser when its answer breaks a rule: the next request gets a fresh one."""
        try:
            yield
        except ParserFailed as problem:
            if problem.died:
                self.close()
            raise
        except (TypeError, ValueError) as problem:
            self.close()
            raise ParserFailed("the parser's answer is refused", "answer", str(problem), died=True) from problem

    def _request(self, body: dict[str, Any], fds: Sequence[int], deadline_s: float | None) -> dict[str, Any]:
        """Ask, and once more where the parser had died; raises ParserFailed."""
        try:
            return self._ask(body, fds, deadline_s or self._deadline_s)
        except ConnectionError:
            self.close()
        try:
            return self._ask(body, fds, deadline_s or self._deadline_s)
        except ConnectionError as problem:
            self.close()
            why = "the parser died twice on this input"
            raise ParserFailed("cannot parse", body["op"], why, died=True) from problem

    def _ask(self, body: dict[str, Any], fds: Sequence[int], deadline_s: float) -> dict[str, Any]:
        """Send one request and read its answer; raises ConnectionError when the parser is gone, and ParserFailed."""
        if len(fds) > MAX_FILES:
            raise ParserFailed("cannot parse", body["op"], f"{len(fds)} files at once")
        self.start(*self._ids)
        self._next += 1
        data = msgpack.packb({**body, "id": self._next})
        if len(data) > MAX_REQUEST:
            raise ParserFailed("cannot parse", body["op"], f"a request of {len(data)} bytes")
        end = time.monotonic() + deadline_s
        try:
            reply = self._exchange(data, fds, end)
        except TimeoutError as problem:
            self.close()
            why = f"no answer within {deadline_s} s"
            raise ParserFailed("cannot parse", body["op"], why, died=True) from problem
        with self._distrust():
            return _open_answer(reply, self._next)

    def _exchange(self, data: bytes, fds: Sequence[int], end: float) -> bytes:
        """Send a request and its descriptors, return the answer's bytes; raises ConnectionError or TimeoutError."""
        sock = self._sock
        if sock is None:
            raise ConnectionError
        _arm(sock, end)
        # The descriptors travel with the first bytes: the parser reads the length with them.
        socket.send_fds(sock, [LENGTH.pack(len(data))], list(fds))
        sock.sendall(data)
        (length,) = LENGTH.unpack(_exactly(sock, LENGTH.size, end))
        with self._distrust():
            if length > MAX_ANSWER:
                raise ValueError(f"an answer of {length} bytes")
        return _exactly(sock, length, end)


def _arm(sock: socket.socket, end: float) -> None:
    """Let the next operation wait until `end` (monotonic seconds) at most."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)


def _exactly(sock: socket.socket, length: int, end: float) -> bytes:
    """Read `length` bytes; raises ConnectionError at the end of the stream, TimeoutError past `end`."""
    data = bytearray()
    while len(data) < length:
        _arm(sock, end)
        part = sock.recv(length - len(data))
        if not part:
            raise ConnectionError
        data += part
    return bytes(data)


def _open_answer(reply: bytes, number: int) -> dict[str, Any]:
    """Unpack an answer; raises ValueError for nonsense, ParserFailed for a refusal of the input."""
    answer = msgpack.unpackb(reply)
    if not isinstance(answer, dict) or answer.get("id") != number:
        raise ValueError("not the answer to this request")
    if answer.get("ok") is True:
        return answer
    error = answer.get("error")
    parts = error if isinstance(error, dict) else {}
    what, obj, why = (text(parts.get(key), 500, key) for key in ("what", "object", "why"))
    raise ParserFailed(what, obj, why)


def _spawn(fd: int, uid: int, gid: int) -> subprocess.Popen[bytes]:
    """Start the parser with a bare environment, in a folder the target can't fill with modules of its own."""
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen(
        [sys.executable, "-B", "-s", "-m", "stallscope.parser", str(fd), str(uid), str(gid)],
        pass_fds=(fd,),
        cwd="/",
        env={"PYTHONPATH": str(root), "PYTHONSAFEPATH": "1", "MALLOC_ARENA_MAX": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for capture, which ends this process
        stderr=subprocess.DEVNULL,  # its words may be the target's: escape sequences for a terminal
    )

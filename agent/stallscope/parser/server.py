"""Requests from capture over a socket, one at a time: a length and a msgpack map, with descriptors beside it."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

import msgpack

from stallscope.parser.errors import ParseError
from stallscope.parser.imports import find_imports
from stallscope.parser.infer import infer
from stallscope.parser.natives import find_names, find_natives
from stallscope.parser.ncclcomm import find_comm
from stallscope.parser.objects import find_objects
from stallscope.parser.pylines import find_lines
from stallscope.parser.source import Source
from stallscope.parser.symbols import find_symbols

__all__ = ["answer", "serve"]

LENGTH = struct.Struct("<I")
MAX_MESSAGE = 8 << 20
MAX_FILES = 64
MAX_EXTRAS = 8
# What reading damaged input may raise besides ParseError; anything else is a bug and ends the process, which capture
# starts again.
EXPECTED = (ValueError, TypeError, LookupError, OverflowError, MemoryError, OSError, AttributeError, struct.error)


def serve(sock: socket.socket) -> None:
    """Answer requests until the other side closes the socket."""
    while True:
        received = _receive(sock)
        if received is None:
            return
        body, fds = received
        try:
            reply = msgpack.packb(answer(body, fds))
        finally:
            for fd in fds:
                os.close(fd)
        sock.sendall(LENGTH.pack(len(reply)) + reply)


def _receive(sock: socket.socket) -> tuple[bytes, list[int]] | None:
    """Return a request and its descriptors; None at the end. They come with the first byte of the length."""
    head, fds, flags, _address = socket.recv_fds(sock, LENGTH.size, MAX_FILES, socket.MSG_CMSG_CLOEXEC)
    rest = _exactly(sock, LENGTH.size - len(head)) if head else None
    if rest is None or flags & socket.MSG_CTRUNC:
        return None
    (length,) = LENGTH.unpack(head + rest)
    body = _exactly(sock, length) if length <= MAX_MESSAGE else None
    return None if body is None else (body, list(fds))


def _exactly(sock: socket.socket, length: int) -> bytes | None:
    """Read `length` bytes; None when the socket ends before."""
    data = bytearray()
    while len(data) < length:
        part = sock.recv(min(length - len(data), 1 << 18))
        if not part:
            return None
        data += part
    return bytes(data)


def answer(body: bytes, fds: list[int]) -> dict[str, Any]:
    """Answer one request. Bad input gives an answer too: {id, ok: False, error: {what, object, why}}."""
    number = 0
    try:
        request = msgpack.unpackb(body, strict_map_key=False)
        number = request["id"]
        return {"id": number, "ok": True, **_dispatch(request, fds)}
    except ParseError as problem:
        error = {"what": problem.what, "object": problem.object, "why": problem.why}
    except EXPECTED as problem:
        error = {"what": "cannot parse", "object": "request", "why": f"{type(problem).__name__}: {problem}"[:400]}
    return {"id": number, "ok": False, "error": error}


def _dispatch(request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Run the named operation."""
    operation = request["op"]
    if operation == "symbols":
        extras = {key: request.get(key, [])[:MAX_EXTRAS] for key in ("words", "prefixes")}
        return find_symbols(Source(fds[0], "the file"), request["names"], **extras)
    if operation == "imports":
        return find_imports(Source(fds[0], "the file"), request["names"][:MAX_EXTRAS])
    if operation == "objects":
        return find_objects(Source(fds[0], "the file"), request["names"][:MAX_EXTRAS])
    if operation == "infer":
        return infer(request, _sources(fds))
    if operation == "natives":
        return find_natives(request, _sources(fds))
    if operation == "names":
        return find_names(Source(fds[0], "the file"), request["vaddrs"])
    if operation == "nccl_comm":
        return find_comm(Source(fds[0], "the file"))
    if operation == "lines":
        return find_lines(request)
    raise ParseError("cannot parse", f"operation {operation!r:.40}", "unknown")


def _sources(fds: list[int]) -> list[Source]:
    return [Source(fd, f"file {index}") for index, fd in enumerate(fds)]

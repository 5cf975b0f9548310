"""The asking end of the socket that `stallscope daemon` and its like listen on."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from stallscope.errors import ArgumentProblem, CaptureProblem, ExitCode, PermissionProblem, StallscopeError

__all__ = ["ask"]

DEADLINE_S = 20.0
MAX_ANSWER_BYTES = 256 << 20
CHUNK_BYTES = 1 << 18
_BY_CODE = {ExitCode.BAD_ARGUMENTS: ArgumentProblem, ExitCode.NOT_PERMITTED: PermissionProblem}


def ask(path: Path, words: list[str]) -> str:
    """Send the words, return the text of the answer.

    Raises:
        StallscopeError: nobody listens, or what the daemon says is wrong.
    """
    what = f"cannot ask the daemon at {path}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(DEADLINE_S)
            sock.connect(str(path))
            sock.sendall(json.dumps({"words": words}).encode() + b"\n")
            data = _all_of(sock)
    except PermissionError as error:
        raise PermissionProblem(what, why=os.strerror(error.errno or 0), hint="use sudo") from error
    except TimeoutError as error:
        raise CaptureProblem(what, why=f"no answer within {DEADLINE_S:g} s", hint="see its messages") from error
    except OSError as error:
        hint = "start it: sudo stallscope daemon; or name its configuration with --config FILE"
        raise CaptureProblem(what, why=os.strerror(error.errno or 0), hint=hint) from error
    return _opened(what, data)


def _all_of(sock: socket.socket) -> bytes:
    data = bytearray()
    while part := sock.recv(CHUNK_BYTES):
        data += part
        if len(data) > MAX_ANSWER_BYTES:
            raise CaptureProblem("cannot read the answer", why="it does not end", hint="restart the daemon")
    return bytes(data)


def _opened(what: str, data: bytes) -> str:
    line, newline, rest = data.partition(b"\n")
    try:
        head = json.loads(line)
        if head["ok"]:
            return rest.decode(errors="replace")
        parts = [str(head[name]) for name in ("what", "why", "hint")]
        code = int(head["code"])
    except (ValueError, TypeError, LookupError) as error:
        why = "it ended before it answered" if not newline else "its answer makes no sense"
        raise CaptureProblem(what, why=why, hint="see its messages") from error
    raise _BY_CODE.get(ExitCode(code) if code in set(ExitCode) else ExitCode.FAILED, StallscopeError)(
        parts[0], why=parts[1], hint=parts[2]
    )

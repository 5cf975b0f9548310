"""Data on stdout: a stream that is closed, full or no longer read must not end in a traceback."""

from __future__ import annotations

import contextlib
import os
from typing import TextIO

from stallscope.errors import StallscopeError

__all__ = ["OutputProblem", "discard", "printable", "put"]


class OutputProblem(StallscopeError):
    """What was asked for could not be written (exit 1)."""


def put(text: str, out: TextIO | None, what: str, hint: str) -> None:
    """Write and flush.

    Args:
        what, hint: of the error, e.g. "cannot print the report".

    Raises:
        OutputProblem: the stream is closed, or takes no more.
        BrokenPipeError: nobody reads any more.
    """
    if out is None:
        raise OutputProblem(what, why="stdout is closed", hint=hint)
    try:
        out.write(text)
        out.flush()
    except BrokenPipeError:
        discard(out)
        raise
    except OSError as error:
        discard(out)
        raise OutputProblem(what, why=f"stdout: {os.strerror(error.errno or 0)}", hint=hint) from error


def discard(out: TextIO) -> None:
    """Let what is still buffered go nowhere: the interpreter flushes once more at exit and would complain."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, out.fileno())
        os.close(null)
        out.flush()


def printable(text: str, out: TextIO) -> str:
    """The text as far as the stream's encoding has its characters; "?" for the others."""
    encoding = out.encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)

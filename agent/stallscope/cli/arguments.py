"""What several commands take."""

from __future__ import annotations

import argparse

__all__ = ["pid_number"]

PID_LIMIT = 1 << 22


def pid_number(text: str) -> int:
    """A process id. Raises argparse.ArgumentTypeError."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a process id (a number)")
    if not 0 < int(text) < PID_LIMIT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a process id (1 to {PID_LIMIT - 1})")
    return int(text)

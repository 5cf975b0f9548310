"""What several commands take."""

from __future__ import annotations

import argparse
import math

__all__ = ["DEFAULT_ONE_IN", "pid_number", "rate", "seconds"]

PID_LIMIT = 1 << 22
DEFAULT_ONE_IN = 100.0


def pid_number(text: str) -> int:
    """A process id. Raises argparse.ArgumentTypeError."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a process id (a number)")
    if not 0 < int(text) < PID_LIMIT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a process id (1 to {PID_LIMIT - 1})")
    return int(text)


def rate(text: str) -> float:
    """`1/N` or a percentage → one in how many. Raises argparse.ArgumentTypeError for 0, more than 1 and nonsense."""
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
        elif "/" in text:
            above, _, below = text.partition("/")
            share = float(above) / float(below)
        else:
            share = float(text)
    except (ValueError, ZeroDivisionError):
        share = math.nan
    if not 0 < share <= 1 or 1 / share > 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r}: give a rate above 0 and at most 1, as 1/N or N%")
    return 1 / share


def seconds(text: str) -> float:
    """A positive number of seconds. Raises argparse.ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r}: give a positive number of seconds")
    return value

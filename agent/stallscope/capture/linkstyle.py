"""Which kind of links this kernel has; found by trying, because distributions port features back."""

from __future__ import annotations

import enum
import errno
import os
import struct

from stallscope.capture.object_loader import load_program
from stallscope.capture.rights import has_uprobe_multi

__all__ = ["COOKIE_PROGRAM", "Style", "best_style", "has_cookies"]

_KPROBE = 2
# r0 = bpf_get_attach_cookie(r1); r0 = 0; exit
COOKIE_PROGRAM = struct.pack("<BBhi", 0x85, 0, 0, 174) + bytes.fromhex("b7000000000000009500000000000000")


class Style(enum.Enum):
    """How programs get onto functions, best first."""

    MULTI = "multi"
    """One link holds any number of functions (from 6.6 on)."""
    PERF = "perf"
    """A perf event a probe, with a cookie (from 5.15 on)."""
    PERF_NO_COOKIE = "perf-nocookie"
    """A perf event and a program a probe: nothing tells a program which function it runs for."""


def has_cookies() -> bool:
    """Whether a program that is not for uprobe_multi can ask for its link's cookie; also True where not permitted."""
    try:
        os.close(load_program("cookie", COOKIE_PROGRAM, _KPROBE, 0, b"GPL"))
    except OSError as error:
        return error.errno in (errno.EPERM, errno.EACCES)
    return True


def best_style() -> Style:
    """The best that works here; where we may not even try, the usual one: its error will name the missing right."""
    if has_uprobe_multi() is not False:
        return Style.MULTI
    return Style.PERF if has_cookies() else Style.PERF_NO_COOKIE

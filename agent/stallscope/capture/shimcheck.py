"""What `doctor PID` says of the shim in a process, and whether one could be put into it."""

from __future__ import annotations

import os

from stallscope.capture.injectable import require_injectable
from stallscope.capture.libmatch import is_shim
from stallscope.capture.preflight import Check
from stallscope.capture.procfs import executable_mappings, facts_of
from stallscope.capture.segment import BadSegment, Segment
from stallscope.capture.segments import candidates, start_ticks_of
from stallscope.errors import StallscopeError

__all__ = ["inject_check", "shim_check"]

_LOSE, _CURE = "the process is traced by probes, which takes rights and a microsecond a call", "stallscope run -- CMD"


def shim_check(pid: int) -> Check:
    """Whether the library is loaded, and what its segment holds; the segment is left as it is."""
    try:
        is_loaded = any(is_shim(mapping.path) for mapping in executable_mappings(pid))
        own = facts_of(pid).ns_pid or pid
    except OSError as error:
        return Check("shim", "unknown", f"its maps can't be read ({error.strerror})", _LOSE, _CURE)
    found = [words for fd in candidates(pid) if (words := _segment(fd, pid, own)) is not None]
    if found:
        return Check("shim", "ok", found[0])
    if is_loaded:
        return Check("shim", "ok", "loaded; no CUDA or NCCL function has been called yet")
    return Check("shim", "not needed", "not loaded")


def inject_check(pid: int) -> Check:
    """Whether `attach --method inject` would try it; nothing is touched."""
    try:
        require_injectable(pid)
    except StallscopeError as problem:
        return Check("inject", "not needed", f"not possible: {problem.why}")
    return Check("inject", "ok", "attach --method inject would try it")


def _segment(fd: int, pid: int, own: int) -> str | None:
    """A sentence about the process's own segment, None for one of another process. Takes the descriptor over."""
    try:
        with Segment(fd) as segment:
            header = segment.header
            if (header.pid, header.start_ticks) != (own, start_ticks_of(pid)):
                return None
            calls = sum(thread.calls for thread in segment.threads())  # counters leave out what nobody has read yet
            return f"loaded; {calls:,} call{'' if calls == 1 else 's'} so far, mode {header.mode.name.lower()}"
    except (BadSegment, OSError) as error:
        return f"loaded; its segment can't be read: {error}"
    finally:
        os.close(fd)

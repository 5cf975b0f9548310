"""Where a return probe would kill its target.

From 6.11 on, x86-64 kernels end a return probe by a system call of its own, uretprobe, made in the target. Up to 6.13
the target's seccomp filter was asked about it, and one that allows only what its program needs kills the process
(libseccomp #438). Stable releases of 6.12 and 6.13 got the repair late, distributions their own: the number alone does
not tell, so the whole range counts as dangerous.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable

from stallscope.capture.procfs import seccomp_mode

__all__ = ["ReturnRule", "return_probes_allowed", "returns_ask_seccomp"]

_FIRST, _LAST = (6, 11), (6, 13)
_MODES = {1: "strict", 2: "filter"}


def returns_ask_seccomp(kernel_release: str, machine: str = "x86_64") -> bool:
    """Whether return probes of that kernel run into the target's seccomp filter, e.g. for "6.12.5-amd64"."""
    found = re.match(r"(\d+)\.(\d+)", kernel_release)
    if not found or machine != "x86_64":
        return False
    return _FIRST <= (int(found[1]), int(found[2])) <= _LAST


def return_probes_allowed(
    kernel_release: str, target_seccomp_mode: int | None, machine: str = "x86_64"
) -> tuple[bool, str]:
    """(allowed, why not) for one process.

    Args:
        kernel_release: as `uname -r` says.
        target_seccomp_mode: 0 none, 1 strict, 2 filter; None = unknown, which counts as filtered.
    """
    if target_seccomp_mode == 0 or not returns_ask_seccomp(kernel_release, machine):
        return True, ""
    mode = _MODES.get(target_seccomp_mode or 0, "unknown")
    return False, (
        f"calls are counted, not timed: the process has a seccomp filter (mode {mode}), and on kernel {kernel_release} "
        "a return probe may run into it and kill the process (kernels 6.11 to 6.13)"
    )


class ReturnRule:
    """The decision for one process after the other.

    Args:
        kernel_release: another kernel's, for tests.

    Attributes:
        anywhere: return probes do no harm in any process, so that links need no filter for them.
    """

    def __init__(self, kernel_release: str | None = None, mode_of: Callable[[int], int | None] = seccomp_mode) -> None:
        self._release = kernel_release or platform.release()
        self._mode_of = mode_of
        self.anywhere = not returns_ask_seccomp(self._release, platform.machine())

    def why_not(self, pid: int) -> str | None:
        """Why this process gets no return probes; None = it gets them. /proc is read on such kernels only."""
        if self.anywhere:
            return None
        allowed, why = return_probes_allowed(self._release, self._mode_of(pid), platform.machine())
        return None if allowed else why

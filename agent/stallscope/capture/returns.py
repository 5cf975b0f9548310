"""Which processes get no return probes, and why: their calls are counted, not timed."""

from __future__ import annotations

from stallscope.capture.cancelling import Cancelling
from stallscope.capture.parser_client import ParserClient
from stallscope.capture.seccomp import ReturnRule

__all__ = ["Returns"]

_LESS = "calls are counted, not timed"


class Returns:
    """The decision for one process after the other.

    Args:
        parser: reads the programs.
        choice: "auto", "always" or "never"; "always" is about threads that may be cancelled: a seccomp filter still
            counts.
        kernel_release: another kernel's, for tests.
    """

    def __init__(self, parser: ParserClient, choice: str = "auto", kernel_release: str | None = None) -> None:
        self._seccomp = ReturnRule(kernel_release)
        self._cancelling = Cancelling(parser)
        self._choice = choice
        self.anywhere = self._seccomp.anywhere

    def why_not(self, pid: int) -> str | None:
        """Why this process gets no return probes; None = it gets them."""
        if self._choice == "never":
            return f"{_LESS}: --returns never"
        if why := self._seccomp.why_not(pid):
            return why
        path = self._cancelling.who(pid) if self._choice == "auto" else None
        if path is None:
            return None
        return (
            f"{_LESS}: the process can cancel threads ({path} imports pthread_cancel), and one that is cancelled "
            "inside a probed return would skip its destructors; --returns always times them all the same"
        )

    def why_not_forked(self, pid: int, parents: str | None) -> str | None:
        """The same for a forked child, which has its parent's image, in a few microseconds."""
        return parents or self._seccomp.why_not(pid)

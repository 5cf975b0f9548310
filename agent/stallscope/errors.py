"""One error type, four parts: what failed, on which object, why, and what to do next."""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "ArgumentProblem",
    "CaptureProblem",
    "ExitCode",
    "MachineProblem",
    "PermissionProblem",
    "RecordingProblem",
    "StallscopeError",
    "TargetProblem",
]


class ExitCode(IntEnum):
    """What the process returns; part of the contract."""

    OK = 0
    FAILED = 1
    BAD_ARGUMENTS = 2
    NOT_PERMITTED = 3
    NOTHING_CAPTURED = 4


class StallscopeError(Exception):
    """A failure that a person can act on; only `cli.main` prints it.

    Args:
        what: what could not be done, e.g. "cannot attach to pid 4242 (python3)".
        why: the cause as observed, e.g. "the kernel refused the uprobe (EPERM)".
        hint: what to do next; a command where there is one.
    """

    exit_code = ExitCode.FAILED

    def __init__(self, what: str, *, why: str, hint: str) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what}: {self.why}\n  next: {self.hint}"


class PermissionProblem(StallscopeError):
    """A right is missing (exit 3)."""

    exit_code = ExitCode.NOT_PERMITTED


class MachineProblem(PermissionProblem):
    """What would work is not done on this kind of machine unless it is asked for (exit 3)."""


class TargetProblem(StallscopeError):
    """The process to trace is not there or can't be traced."""


class CaptureProblem(StallscopeError):
    """BPF, links or rings failed for a reason other than rights."""


class RecordingProblem(StallscopeError):
    """A recording can't be read or written."""


class ArgumentProblem(StallscopeError):
    """An argument makes no sense or can't be honoured (exit 2)."""

    exit_code = ExitCode.BAD_ARGUMENTS

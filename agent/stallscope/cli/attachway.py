"""How `attach` gets at calls: by probes, by the shims that are there, or by one that it puts in."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from stallscope.cli.machine import require_trusted_machine
from stallscope.errors import PermissionProblem, StallscopeError

if TYPE_CHECKING:
    from stallscope.capture.target import Target

__all__ = ["Way", "choose"]


class Way(NamedTuple):
    """`method`: bpf, shim or inject; `note` for the report."""

    method: str
    note: str = ""

    def reach(self, targets: Sequence[Target]) -> tuple[list[str], int]:
        """Libraries that are there, and how many of their functions are seen, over all processes."""
        linked = [library for target in targets for library in target.linked.values()]
        functions = sum(one.by_shim or len(one.resolved.points) for one in linked)
        return sorted({one.library for one in linked}), functions


def choose(method: str, pids: Sequence[int]) -> Way:
    """The way that is asked for, or for auto the first that is open; nothing is changed yet. Raises StallscopeError."""
    if method == "inject":
        return _inject(pids, "asked for by --method inject")
    from stallscope.capture.preflight import require_attach_rights
    from stallscope.capture.segments import has_segment

    try:
        require_trusted_machine(method, platform.machine())
        for pid in pids:
            require_attach_rights(pid)
    except PermissionProblem as problem:
        if method == "bpf":
            raise
        # What shims record can be read without BPF.
        if all(has_segment(pid) for pid in pids):
            return Way("shim", "read through the shims in the processes alone: there are no rights to use BPF")
        return _instead(pids, problem)
    return Way("bpf")


def _inject(pids: Sequence[int], why: str) -> Way:
    from stallscope.capture.injectable import require_injectable
    from stallscope.capture.injections import has_shim

    bare = [pid for pid in pids if not has_shim(pid)]
    for pid in bare:
        require_injectable(pid)
    if not bare:
        return Way("shim", "read through the shims that the processes were started with")
    return Way("inject", f"read through a library that was put into the processes by ptrace: {why}")


def _instead(pids: Sequence[int], problem: PermissionProblem) -> Way:
    try:
        return _inject(pids, f"BPF can't be used: {problem.why}")
    except StallscopeError as other:
        why = f"{problem.why}; and --method inject: {other.why}"
        raise PermissionProblem(problem.what, why=why, hint=problem.hint) from other

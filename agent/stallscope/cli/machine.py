"""Machines on which probes are not set unless somebody asks for them."""

from __future__ import annotations

import sys

from stallscope.errors import MachineProblem

__all__ = ["require_trusted_machine"]

DOUBTFUL = ("aarch64", "arm64")
WHY = "there are public reports of programs that uprobes corrupted on this architecture, and it was never run there"


def require_trusted_machine(method: str, machine: str) -> None:
    """For `attach`: the shim is the default on aarch64; `--method bpf` sets probes there, with a warning.

    Raises:
        MachineProblem: nobody asked for probes.
    """
    if machine not in DOUBTFUL:
        return
    if method != "bpf":
        raise MachineProblem(
            f"cannot attach by probes on {machine} without being told to", why=WHY,
            hint="start the program with `stallscope run -- CMD`, or take the risk: --method bpf",
        )  # fmt: skip
    print(f"warning: probes on {machine}: {WHY}", file=sys.stderr, flush=True)

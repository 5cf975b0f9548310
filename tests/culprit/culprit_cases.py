"""The faults, and the right answer to each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

RANKS = (1, 6, 3, 5, 2, 7, 4)  # at fault, by seed
LIVE, LATE, MID = "live", "late", "mid"
MODES = (LIVE, LATE, MID)
BPF, SHIM = "bpf", "shim"
STEP = {LIVE: 20, LATE: 400, MID: 20}  # some steps of history, and for `late` time to attach
LATE_AFTER_STEPS = 100  # 900 NCCL calls a rank, 7200 in all
IN_BLOCK_S = 10.0
LIMIT_S = 5.0


@dataclass(frozen=True)
class Answer:
    """What the report must say.

    kinds: classes that are right; none: there must be no incident. named: whether the culprits are those of the truth,
    else nobody. evidence: allowed levels, any if empty. settings: of the fault, beside rank and step.
    operations: it must be said before the communicator has gone on by so many.
    """

    kinds: tuple[str, ...]
    named: bool = True
    evidence: tuple[str, ...] = ()
    settings: str = ""
    operations: int | None = None
    also: tuple[str, ...] = field(default=())


SEEN = ("api", "completion")
ABSENT = Answer(("NOT_ARRIVED",), evidence=SEEN, also=("host",))
ANSWERS = {
    "late": Answer(("NOT_ARRIVED",), evidence=SEEN, settings="seconds=8", also=("host", "resolved")),
    "never": ABSENT,
    "io": Answer(("NOT_ARRIVED",), evidence=SEEN, also=("host", "file")),
    "in-init": ABSENT,
    "in-split": ABSENT,
    "die": Answer(("DIED",), evidence=SEEN),
    "skip": Answer(("SKIPPED",), evidence=SEEN),
    "extra": Answer(("EXTRA",), evidence=SEEN),
    "wrong-op": Answer(("MISMATCH",), evidence=SEEN),
    "wrong-count": Answer(("MISMATCH",), evidence=SEEN),
    "wrong-dtype": Answer(("SILENT_MISMATCH",), evidence=SEEN),
    "swap": Answer(("ORDER_DEADLOCK",), evidence=SEEN),
    "slow": Answer(("STRAGGLER",), settings="factor=3", operations=200),
    "gpu-stuck": Answer(("ALL_ARRIVED",), named=False, evidence=SEEN),
    "transport-stuck": Answer(("ALL_ARRIVED",), named=False, evidence=SEEN),
    "in-abort": Answer(("IN_API",), evidence=SEEN, also=("abort",)),
    "send-send": Answer(("ORDER_DEADLOCK",), evidence=SEEN),
    "many-short": Answer((), settings="ms=100,times=20", also=("episodes",)),
}
BY_GPU = {
    "gpu-stuck": Answer(("GPU_STUCK",), evidence=("gpu_start",)),
    "transport-stuck": Answer(("ALL_ARRIVED",), named=False, evidence=("gpu_start",)),
}
"""With the shim: NCCL tells when kernels begin. It remembers what was before the attach, so that the answers inside a
block are those of a capture from the beginning."""
HOST_STATE = ("host_state",)
IN_THE_BLOCK = {
    "late": Answer(("NOT_ARRIVED",), evidence=HOST_STATE, settings="seconds=90", also=("host",)),
    "never": Answer(("NOT_ARRIVED",), evidence=HOST_STATE, also=("host",)),
    "io": Answer(("NOT_ARRIVED",), evidence=HOST_STATE, also=("host", "file")),
    "in-init": Answer(("NOT_ARRIVED",), evidence=HOST_STATE, also=("host",)),
    "in-abort": Answer(("IN_API",), evidence=HOST_STATE, also=("abort",)),
}
UNDECIDED = Answer(("CANNOT_DECIDE",), named=False)
BLOCKS_FOR_GOOD = ("skip", "extra", "wrong-op", "wrong-count", "swap", "gpu-stuck", "transport-stuck", "send-send")
IN_THE_BLOCK |= dict.fromkeys(BLOCKS_FOR_GOOD, UNDECIDED)
NAMED_IN_THE_BLOCK = ("late", "never", "io", "in-init", "in-abort")
AT_CREATION = ("in-init", "in-split")  # nothing can be some thousand operations in
KINDS = tuple(ANSWERS)


class Case(NamedTuple):
    """One run."""

    kind: str
    mode: str = LIVE
    ahead: int = 0
    seed: int = 0
    via: str = BPF

    @property
    def rank(self) -> int:
        """At fault."""
        return RANKS[self.seed % len(RANKS)]

    @property
    def answer(self) -> Answer:
        """The right one."""
        if self.via == SHIM:
            found = (ANSWERS | BY_GPU)[self.kind]
            if self.mode == MID and self.kind == "late":  # it must last until somebody comes
                block = IN_THE_BLOCK[self.kind]
                found = replace(found, settings=block.settings, also=block.also)
            return found
        return (IN_THE_BLOCK if self.mode == MID else ANSWERS)[self.kind]

    def fault(self, step: int) -> str:
        """For the job's command line."""
        more = f",{self.answer.settings}" if self.answer.settings else ""
        return f"{self.kind}:rank={self.rank},step={step}{more}"

    @property
    def name(self) -> str:
        """For people, without blanks."""
        return f"{self.kind}-{self.mode}-{self.ahead}-{self.seed}" + ("-shim" if self.via == SHIM else "")


def is_possible(case: Case) -> bool:
    """Whether there is such a case."""
    if case.mode == LATE:
        return case.kind not in AT_CREATION
    return case.mode == LIVE or case.kind in IN_THE_BLOCK


# One seed of each kind, one half in step and the other ahead; two that are attached late and two in the block.
SHORT = [Case(kind, LIVE, 100 * (i % 2)) for i, kind in enumerate(KINDS)]
THROUGH_THE_SHIM = [Case(kind, LIVE, ahead, via=SHIM) for kind, ahead in (
    ("gpu-stuck", 0), ("gpu-stuck", 100), ("transport-stuck", 0), ("in-split", 100), ("wrong-count", 0), ("slow", 100))]  # fmt: skip
THROUGH_THE_SHIM += [Case("in-init", seed=1, via=SHIM)]  # a rank that has called nothing of NCCL, not even for an id
SHORT += [Case("never", LATE, 100), Case("skip", LATE), Case("io", MID), Case("in-abort", MID, 100)]

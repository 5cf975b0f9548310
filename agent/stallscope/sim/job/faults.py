"""What can go wrong by plan: the kinds, their settings, and what each of them blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from stallscope.sim.job.layout import DATA, PIPELINE, TENSOR, WORLD, Layout

DEFAULT_STEP = 20
# Who is blocked: "others" (all but the rank at fault), "all", or "" (nobody for good).
KINDS = {
    "late": "others",
    "never": "others",
    "io": "others",
    "in-init": "others",
    "in-split": "others",
    "die": "others",
    "skip": "all",
    "extra": "all",
    "wrong-op": "all",
    "wrong-count": "all",
    "wrong-dtype": "",
    "swap": "all",
    "slow": "",
    "gpu-stuck": "all",
    "transport-stuck": "all",
    "in-abort": "others",
    "send-send": "all",
    "many-short": "",
}
ENDS = {"late", "wrong-dtype", "slow", "many-short"}
ABSENT = {"late", "never", "io", "die", "in-abort", "gpu-stuck"}  # from the first operation of the step on
CALL_FAULTS = {"skip", "extra", "wrong-op", "wrong-count", "wrong-dtype", "swap"}
NUMBERS = {
    "rank": 1,
    "step": DEFAULT_STEP,
    "seconds": 3.0,
    "ms": 50.0,
    "times": 20,
    "last": 0.0,
    "factor": 2.0,
    "count": 131072,
}
WORDS = ("comm", "with")
SLACK_BYTES = 64 << 10  # sizes that differ by no more are not noticed


@dataclass(frozen=True)
class Fault:
    """KIND and its settings.

    rank, step: whose, and in which of its steps (from 0). seconds: of `late`. ms, times, last: of `many-short` (so many
    of so long, then one of `last` seconds). factor: of `slow`. count: elements more, of `wrong-count`. comm: kind of
    the communicator (tp, dp, world); with: the kind whose collective `swap` puts before that of comm.
    """

    kind: str
    values: dict[str, float] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return int(self.values["rank"])

    @property
    def step(self) -> int:
        return int(self.values["step"])

    @property
    def comm(self) -> str:
        return self.words["comm"]

    @property
    def other(self) -> str:
        return self.words["with"]

    @property
    def hangs(self) -> bool:
        """Whether the job never goes on by itself."""
        if self.kind == "wrong-count":
            return abs(self.values["count"]) * 4 > SLACK_BYTES
        if self.kind == "swap":
            return WORLD in (self.comm, self.other)
        return self.kind not in ENDS

    def text(self) -> str:
        settings = {**self.values, **self.words}
        return f"{self.kind}:" + ",".join(f"{key}={value}" for key, value in settings.items())

    def culprits(self, layout: Layout) -> list[int]:
        if self.kind == "transport-stuck":
            return []
        return sorted({self.rank, self.partner(layout)}) if self.kind == "send-send" else [self.rank]

    def partner(self, layout: Layout) -> int:
        """The neighbour in the pipeline, for send-send."""
        ranks = layout.group_of(PIPELINE, self.rank).ranks
        index = ranks.index(self.rank)
        return ranks[index + 1] if index + 1 < len(ranks) else ranks[index - 1]

    def blocks(self, layout: Layout) -> list[int]:
        """The ranks that must be blocked while the block lasts."""
        who = KINDS[self.kind] if self.hangs or self.kind == "late" else ""
        return [rank for rank in range(layout.ranks) if who == "all" or (who == "others" and rank != self.rank)]


def parse_fault(text: str) -> Fault:
    """`KIND[:key=value,...]`. Raises ValueError, which says what is wrong."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise ValueError(f"unknown fault {kind!r}; there are {', '.join(KINDS)}")
    fault = Fault(kind, dict(NUMBERS), {})
    for setting in filter(None, rest.split(",")):
        _set(fault, *setting.partition("=")[::2])
    return fault


def _set(fault: Fault, key: str, value: str) -> None:
    if key in NUMBERS:
        try:
            fault.values[key] = float(value) if isinstance(NUMBERS[key], float) else int(float(value))
        except (ValueError, OverflowError):
            raise ValueError(f"{key}={value}: not a number") from None
    elif key in WORDS and value in (TENSOR, DATA, WORLD, PIPELINE):
        fault.words[key] = value
    else:
        raise ValueError(f"{key}={value}: give {', '.join(NUMBERS)} (numbers), comm or with (tp, pp, dp, world)")


def settle(fault: Fault, layout: Layout) -> Fault:
    """With its communicators filled in. Raises ValueError where the layout has no place for it."""
    if layout.ranks < 2 or not 0 <= fault.rank < layout.ranks or fault.step < 0:
        raise ValueError(f"{fault.text()}: needs two ranks or more, a rank of the job, and a step from 0")
    if fault.kind == "send-send" and layout.pp < 2:
        raise ValueError("send-send needs --pp 2 or more")
    usual = WORLD if fault.kind in ("in-init", "transport-stuck", "in-abort") else layout.inner()
    if fault.kind == "in-split":
        usual = layout.split_kind or WORLD
    words = {"comm": usual, "with": WORLD, **fault.words}
    if fault.kind in CALL_FAULTS and words["comm"] == PIPELINE:
        raise ValueError(f"{fault.kind}: comm=pp has no collectives")
    if fault.kind == "swap" and (words["comm"] == words["with"] or words["with"] not in (DATA, WORLD)):
        raise ValueError("swap needs two communicators: comm=tp or dp, with=dp or world")
    if fault.kind in ("in-init", "in-split") and (words["comm"] == layout.split_kind) is (fault.kind == "in-init"):
        raise ValueError(f"{fault.kind}: comm={words['comm']}; ncclCommSplit makes {layout.split_kind}, and only that")
    if any(layout.size(word) < 2 for word in words.values()):
        raise ValueError(f"{fault.text()}: there is no such communicator in this layout")
    return Fault(fault.kind, fault.values, words)

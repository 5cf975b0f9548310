"""What the GPUs did during a block: a kernel of NCCL that waits for a peer keeps the device busy at little power.

Utilisation says only that a kernel was there. Power tells waiting from computing: it is held against the limit of the
device, and against what the same device drew when it was busy before the block.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from stallscope.aggregate.state import State
from stallscope.aggregate.witnesses import Gpu, Sample

__all__ = ["Group", "power_groups", "power_sentence"]

BUSY_PERCENT = 90
IDLE_PERCENT = 10
WORKED_PERCENT = 50  # a second with so much use counts as one of work
LEAST_HISTORY = 3
SETTLE_NS = 1_500_000_000
LOW_SHARE, HIGH_SHARE = 0.4, 0.5  # of the limit
AS_BEFORE = 0.75
WORDS = {
    "spinning": "spinning in NCCL, not computing",
    "computing": "computing",
    "idle": "idle, no kernel runs",
    "unclear": "busy, whether computing or spinning is not clear",
}


class Group(NamedTuple):
    """Devices that did the same: how many, and the median of what they showed (None: NVML did not say)."""

    doing: str
    devices: int
    util_percent: int
    power_w: int | None
    power_limit_w: int | None


class _Device(NamedTuple):
    doing: str
    util_percent: float
    power_mw: float | None
    limit_mw: float | None


def power_sentence(state: State, pids: Iterable[int], from_ns: int, to_ns: int) -> str | None:
    """What the devices of these processes did in that time, e.g. "utilisation 99 %, power 78 W of 700 W on 7 of 8 GPUs:
    spinning in NCCL, not computing". None where NVML said nothing of them.

    Args:
        pids: of victims and culprits, as the host sees them.
        from_ns, to_ns: the block so far, CLOCK_MONOTONIC of the capture.
    """
    groups = power_groups(state, pids, from_ns, to_ns)
    total = sum(group.devices for group in groups)
    return "; ".join(_clause(group, total) for group in groups) or None


def power_groups(state: State, pids: Iterable[int], from_ns: int, to_ns: int) -> list[Group]:
    """The same as numbers, the largest group first."""
    wanted = frozenset(pids)
    found = [_judge(gpu, wanted, from_ns, to_ns) for gpu in state.witnesses.gpus.values()]
    known = [device for device in found if device is not None]
    groups = []
    for doing in WORDS:
        these = [device for device in known if device.doing == doing]
        if these:
            powers = [d.power_mw for d in these if d.power_mw is not None]
            limits = [d.limit_mw for d in these if d.limit_mw is not None]
            util = round(median(d.util_percent for d in these))
            groups.append(Group(doing, len(these), util, _watts(powers), _watts(limits)))
    return sorted(groups, key=lambda group: -group.devices)


def _watts(milliwatts: list[float]) -> int | None:
    return round(median(milliwatts) / 1000) if milliwatts else None


def _clause(group: Group, total: int) -> str:
    power = f"power {group.power_w} W" if group.power_w is not None else "power unknown"
    limit = f" of {group.power_limit_w} W" if group.power_limit_w is not None else ""
    where = f"{group.devices} of {total} GPUs" if total > 1 else "the GPU"
    return f"utilisation {group.util_percent} %, {power}{limit} on {where}: {WORDS[group.doing]}"


def _judge(gpu: Gpu, wanted: frozenset[int], from_ns: int, to_ns: int) -> _Device | None:
    """What a device did; None when none of the processes used it in that time, or NVML gave no utilisation."""
    samples = [s for s in gpu.samples if from_ns <= s.at_ns <= to_ns and s.pids & wanted]
    # NVML's figures are means over the last second or so.
    samples = [s for s in samples if s.at_ns >= from_ns + SETTLE_NS] or samples[-1:]
    util = _median([s.util_percent for s in samples])
    if util is None:
        return None
    power = _median([s.power_mw for s in samples])
    limit = _median([s.power_limit_mw for s in samples])
    before = [s for s in gpu.samples if s.at_ns < from_ns and s.pids & wanted]
    return _Device(_doing(util, power, limit, _when_busy(before)), util, power, limit)


def _median(values: list[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _when_busy(samples: list[Sample]) -> float | None:
    """Milliwatts that the device draws when it works; None where too little is known."""
    powers = [s.power_mw for s in samples if (s.util_percent or 0) >= WORKED_PERCENT and s.power_mw is not None]
    # The upper half: between steps it waits for its peers as well.
    return median(sorted(powers)[len(powers) // 2 :]) if len(powers) >= LEAST_HISTORY else None


def _doing(util: float, power: float | None, limit: float | None, when_busy: float | None) -> str:
    if util < IDLE_PERCENT:
        return "idle"
    if power is None or (not limit and when_busy is None):
        return "unclear"
    if limit and power >= HIGH_SHARE * limit:
        return "computing"
    below_limit = not limit or power < LOW_SHARE * limit
    below_work = when_busy is None or power < AS_BEFORE * when_busy
    if below_limit and below_work:
        return "spinning" if util >= BUSY_PERCENT else "unclear"
    # Little power as ever may be light work, or a job that was spinning before as well.
    return "unclear" if below_work or (limit and below_limit) else "computing"

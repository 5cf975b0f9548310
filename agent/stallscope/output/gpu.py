"""`gpu[]` and `witnesses[]`: what NVML and NCCL's RAS said."""

from __future__ import annotations

from stallscope.aggregate.state import State
from stallscope.aggregate.witnesses import Gpu, Witness
from stallscope.diagnose.incident import Findings
from stallscope.output.rows import Row, since
from stallscope.output.words import clean, duration

__all__ = ["gpu_lines", "gpu_rows", "throttle_names", "witness_rows"]

SHOWN = 3
# nvmlClocksEventReasons of nvml.h.
_THROTTLE = {
    0x1: "gpu_idle", 0x2: "applications_clocks_setting", 0x4: "sw_power_cap", 0x8: "hw_slowdown", 0x10: "sync_boost",
    0x20: "sw_thermal_slowdown", 0x40: "hw_thermal_slowdown", 0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}  # fmt: skip
_HARMLESS = {"gpu_idle", "applications_clocks_setting", "display_clock_setting"}


def throttle_names(mask: int | None) -> list[str] | None:
    """The reasons for lower clocks; bits that nobody named as hexadecimal numbers."""
    if mask is None:
        return None
    bits = [1 << n for n in range(mask.bit_length()) if mask >> n & 1]
    return [_THROTTLE.get(bit, hex(bit)) for bit in bits]


def gpu_rows(state: State) -> list[Row]:
    """Each device as it was last seen with a traced process on it, else as it was last seen."""
    pids = [process.pid for process in state.processes.table.values() if process.traced]
    return [_gpu(state, gpu, pids) for _, gpu in sorted(state.witnesses.gpus.items())]


def _gpu(state: State, gpu: Gpu, pids: list[int]) -> Row:
    seen = gpu.latest(pids)
    return {
        "host": state.capture.host if state.capture else None,
        "index": gpu.index,
        "uuid": gpu.uuid,
        "util_percent": seen.util_percent,
        "power_w": _watts(seen.power_mw),
        "power_limit_w": _watts(seen.power_limit_mw),
        "sm_clock_mhz": seen.sm_mhz,
        "memory_used_bytes": seen.memory_used_bytes,
        "throttle": throttle_names(seen.throttle),
        "at_ns": since(state, seen.at_ns),
        "traced": bool(seen.pids & set(pids)),
    }


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else round(milliwatts / 1000, 1)


def witness_rows(state: State, findings: Findings) -> list[Row]:
    """What was said, in the order in which it came; then, for each incident, what the GPUs of all concerned did."""
    asked = [
        {
            "source": witness.source,
            "at_ns": since(state, witness.at_ns),
            "incident": _during(witness.at_ns, findings),
            "says": witness.says + _whose(state, witness),
        }
        for witness in state.witnesses.table
    ]
    return asked + [
        {"source": "nvml", "at_ns": since(state, i.end_ns or state.now_ns), "incident": i.id, "says": i.gpu}
        for i in findings.incidents
        if i.gpu
    ]


def _during(at_ns: int, findings: Findings) -> int | None:
    """The incident that ran at that time, if it was one."""
    found = [i.id for i in findings.incidents if i.start_ns <= at_ns and (i.end_ns is None or at_ns <= i.end_ns)]
    return found[0] if len(found) == 1 else None


def _whose(state: State, witness: Witness) -> str:
    """Whether the testimony is about this job at all."""
    if witness.source != "ras" or not witness.pids:
        return ""
    ours = {pid for p in state.processes.table.values() for pid in (p.pid, p.ns_pid) if pid is not None}
    named, here = len(witness.pids), len(witness.pids & ours)
    if here == 0:
        return "\nnone of the processes that it names is traced here: it may be about another job"
    return "" if here == named else f"\n{here} of the {named} processes that it names are traced here"


def gpu_lines(report: Row) -> list[str]:
    """For a person: a line on the devices that the job used, and what witnesses said."""
    lines = _devices([gpu for gpu in report["gpu"] if gpu["traced"]])
    for witness in [w for w in report["witnesses"] if w["source"] != "nvml"][:SHOWN]:
        first, *rest = [clean(line) for line in witness["says"].split("\n")]
        lines.append(f"{clean(witness['source']).upper()} at {duration(witness['at_ns'])}: {first}")
        lines += [f"  {line}" for line in rest]
    return lines


def _devices(gpus: list[Row]) -> list[str]:
    if not gpus:
        return []
    limit = _span(gpus, "power_limit_w")
    power = f"power {_span(gpus, 'power_w')} of {limit} W" if limit != "?" else f"power {_span(gpus, 'power_w')} W"
    slowed = sum(bool(set(gpu["throttle"] or ()) - _HARMLESS) for gpu in gpus)
    how_many = f"{len(gpus)} GPUs" if len(gpus) > 1 else "1 GPU"
    throttled = f", {slowed} throttled" if slowed else ""
    return [f"NVML, {how_many} at the end: utilisation {_span(gpus, 'util_percent')} %, {power}{throttled}"]


def _span(gpus: list[Row], key: str) -> str:
    """ "98-100", "98", or "?" where it is not known."""
    values = [round(gpu[key]) for gpu in gpus if gpu[key] is not None]
    if not values:
        return "?"
    return str(values[0]) if min(values) == max(values) else f"{min(values)}-{max(values)}"

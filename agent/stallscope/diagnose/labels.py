"""Waits that are meant to be: checkpoints, evaluation, the first steps."""

from __future__ import annotations

from stallscope.aggregate.hosts import Host
from stallscope.aggregate.state import State
from stallscope.diagnose.incident import Incident

__all__ = ["label_of"]

FIRST_OPERATIONS = 16
BUSY_CALLS = 16
CHECKPOINT_BYTES = 128 << 10  # more than lines of a log
SAVING = ("fsync", "fdatasync", "msync", "sync_file_range", "syncfs")
WAITS_FOR_A_HOST = ("NOT_ARRIVED", "STRAGGLER")


def label_of(state: State, incident: Incident, now: int) -> str | None:
    """checkpoint: the culprit writes a file; eval: it works on its GPU alone; warm_up: nobody has done much yet."""
    if incident.kind not in WAITS_FOR_A_HOST:
        return None
    for culprit in incident.culprits:
        looks = state.hosts.during(culprit.place.proc, incident.start_ns, now)
        if sum(look.writing[1] for look in looks if look.writing) >= CHECKPOINT_BYTES or any(map(_is_saving, looks)):
            return "checkpoint"
    if incident.kind == "STRAGGLER":
        return None
    for culprit in incident.culprits:
        looks = state.hosts.during(culprit.place.proc, incident.start_ns, now)
        if len(looks) > 1 and looks[-1].calls - looks[0].calls >= BUSY_CALLS:
            return "eval"
    return "warm_up" if _is_first(incident) else None


def _is_saving(look: Host) -> bool:
    """Whether the main thread waits for a file to be stored."""
    main = look.tasks[0] if look.tasks else None
    return main is not None and main.syscall in SAVING and (main.file or "").startswith("/")


def _is_first(incident: Incident) -> bool:
    if incident.seq is None:
        return incident.comm is not None  # its creation
    return incident.seq < FIRST_OPERATIONS

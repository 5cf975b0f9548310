"""What each communicator really executed."""

from __future__ import annotations

from stallscope.aggregate.state import State
from stallscope.diagnose.completed import Completed
from stallscope.diagnose.incident import Collective

__all__ = ["collectives"]

# ncclDataType_t (nccl.h): name and bytes.
TYPES = {0: ("int8", 1), 1: ("uint8", 1), 2: ("int32", 4), 3: ("uint32", 4), 4: ("int64", 8), 5: ("uint64", 8),
         6: ("float16", 2), 7: ("float32", 4), 8: ("float64", 8), 9: ("bfloat16", 2), 10: ("float8e4m3", 1),
         11: ("float8e5m2", 1)}  # fmt: skip
LEAST_STEPS = 10


def collectives(state: State, completed: Completed) -> list[Collective]:
    """By communicator, function and type; the count of elements is that of the call's argument."""
    operations = state.operations
    found: dict[tuple[int, str, int], list[int]] = {}
    for (comm, value), calls in completed.calls.items():
        name, elements, dtype, _, _ = operations.meaning.get(value, ("unknown", 0, -1, -1, -1))
        row = found.setdefault((comm, name, dtype), [0, 0, 0])
        row[0] += calls
        row[1] += calls * elements * TYPES.get(dtype, ("", 0))[1]
        row[2] += completed.waits_ns.get((comm, value), 0)
    steps = _steps(completed)
    bounded = completed.cut or any(issuer.missing for issuer in operations.issuers.values())
    return [
        Collective(operations.key_of[comm], name, TYPES.get(dtype, (f"type {dtype}", 0))[0], calls, size,
                   calls / steps if steps else None, waits, bounded)
        for (comm, name, dtype), (calls, size, waits) in sorted(found.items())
    ]  # fmt: skip


def _steps(completed: Completed) -> int | None:
    """How many times the job went round: as often as its rarest repeated operation, and those that only the first
    rounds did otherwise (DDP makes its buckets anew after one)."""
    repeated = [calls for calls in completed.calls.values() if calls >= LEAST_STEPS]
    return max((calls for calls in repeated if calls * 10 <= min(repeated) * 11), default=None)

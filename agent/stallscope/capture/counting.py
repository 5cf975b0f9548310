"""Counters on their way: COUNTS frames, and what they say of whether a process goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stallscope.capture.rings import SlotChanges
from stallscope.capture.target import Target
from stallscope.wire.frames import Kind
from stallscope.wire.hook_table import BY_NAME, HOOKS

__all__ = ["send_changes"]

NCCL = frozenset(hook.id for hook in HOOKS if hook.library == "NCCL")
POLLING = frozenset({BY_NAME["cudaEventQuery"].id})  # torch's watchdog does it in a rank that hangs, too


def send_changes(send: Callable[[Kind, dict[str, Any]], None], target: Target, changed: SlotChanges, now: int) -> None:
    """Send rows that changed, if any, and note on the target that it made calls."""
    if not POLLING.issuperset(changed.hooks):
        target.counted_ns = now
        target.used_nccl = target.used_nccl or not NCCL.isdisjoint(changed.hooks)
    if changed.hooks or changed.time_ids:
        send(
            Kind.COUNTS,
            {"proc": target.proc, "at_ns": now, "hooks": list(changed.hooks), "counts": bytes(changed.counts),
             "times": list(changed.time_ids), "timed": bytes(changed.times)},
        )  # fmt: skip

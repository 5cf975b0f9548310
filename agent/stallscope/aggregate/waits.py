"""Calls that waited for the device, and what their end proves."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.events import DONE, NESTED
from stallscope.aggregate.hooks import WIRE_HOOKS, Hooks
from stallscope.wire.hook_table import BY_NAME

__all__ = ["ALL_STREAMS", "LONG_NS", "WAIT", "WaitFacts"]

Array = NDArray[Any]
LONG_NS = 200_000
DEVICE_TO_HOST, DEVICE_TO_DEVICE = 2, 3
ALL_STREAMS = (1 << 64) - 1
WHOLE_DEVICE = ("cudaDeviceSynchronize", "cudaThreadSynchronize", "cuCtxSynchronize")
WAIT = np.dtype([("ts_ns", "<i8"), ("end_ns", "<i8"), ("stream", "<u8"), ("hook", "<u2"), ("ends", "?")])
"""ends: everything issued before ts_ns on that stream was done at end_ns."""


class WaitFacts:
    """Which functions wait, and where their stream stands among the recorded words.

    Attributes:
        stream: by hook, index of the argument, -1 without one.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._is_wait = hooks.column(lambda h: h.kind in ("wait", "copy") and h.timed)
        self._is_copy = hooks.column(lambda h: h.kind == "copy")
        self._is_inside = hooks.column(lambda h: "DtoD" in h.name or "Peer" in h.name)
        self._whole = hooks.column(lambda h: h.name in WHOLE_DEVICE)
        self.stream = np.full(WIRE_HOOKS, -1, np.int8)
        self._direction = np.full(WIRE_HOOKS, -1, np.int8)
        for number, facts in hooks.by_id.items():
            words = BY_NAME[facts.name].arguments.split()[:8] if facts.name in BY_NAME else []
            for word, column in (("stream", self.stream), ("copy_kind", self._direction)):
                column[number] = words.index(word) if word in words else -1

    def chosen(self, recs: Array) -> Array:
        """Which records are ends of long waits."""
        outermost = (recs["flags"] & NESTED) == 0
        found: Array = self._is_wait[recs["hook"]] & (recs["kind"] == DONE) & outermost & (recs["dur_ns"] >= LONG_NS)
        return found

    def copies(self, recs: Array) -> tuple[Array, Array]:
        """(which records are ends of copies, which of those are copies between places on devices)."""
        found: Array = self._is_copy[recs["hook"]] & (recs["kind"] == DONE)
        direction = self._direction[recs["hook"]]
        way = recs["a"][np.arange(len(recs)), np.maximum(direction, 0)]
        inside: Array = self._is_inside[recs["hook"]] | ((direction >= 0) & (way == DEVICE_TO_DEVICE))
        return found, found & inside

    def rows(self, recs: Array) -> Array:
        """WAIT rows of such records, in the order of their ends."""
        rows = np.zeros(len(recs), WAIT)
        hook, each = recs["hook"], np.arange(len(recs))
        rows["ts_ns"], rows["hook"] = recs["ts_ns"].astype(np.int64), hook
        rows["end_ns"] = rows["ts_ns"] + recs["dur_ns"].astype(np.int64)
        stream, direction = self.stream[hook], self._direction[hook]
        rows["stream"] = np.where(stream >= 0, recs["a"][each, np.maximum(stream, 0)], np.uint64(ALL_STREAMS))
        to_host = (direction >= 0) & (recs["a"][each, np.maximum(direction, 0)] == DEVICE_TO_HOST)
        # A copy to the host from pageable memory ends with its stream; one that took long has waited for it.
        rows["ends"] = self._whole[hook] | ((stream >= 0) & (~self._is_copy[hook] | to_host))
        return rows[np.argsort(rows["end_ns"], kind="stable")]

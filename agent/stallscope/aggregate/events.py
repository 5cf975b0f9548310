"""Counts records by the batch: a frame holds up to 100,000 of them, so nothing here loops over records in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.checks import BadField
from stallscope.aggregate.hooks import WIRE_HOOKS, Hooks
from stallscope.aggregate.limits import Overflow
from stallscope.aggregate.process import Process
from stallscope.wire.columns import REC

__all__ = ["ABANDONED", "BY_PLUGIN", "CALL", "DONE", "ENTER", "ENTERED", "FINISHED", "LEFT", "NESTED", "NO_OUT",
           "NO_SEQ", "QUEUED", "STARTED", "Events"]  # fmt: skip

CALL, ENTER, DONE, ABANDONED = 0, 1, 2, 3
STARTED, FINISHED, QUEUED = 7, 8, 9  # what a GPU did: no calls
LAST_KIND = QUEUED
NESTED, ENTERED, NO_OUT, NO_SEQ, LEFT = 1, 2, 8, 32, 64
BY_PLUGIN = 128  # of what a GPU did: NCCL told it as it happened; else a pair of events, when somebody looked
WIRE_PROCS = 128
LONGEST = 5
MAX_NS = 1 << 62
COMM_BITS = 57  # user addresses end there with five page table levels

# A DONE whose ENTER was sent is the second record of one call.
_KINDS = range(LAST_KIND + 1)
_IS_EVENT = np.array([kind <= ABANDONED and not (kind >= DONE and entered) for kind in _KINDS for entered in (0, 1)])


def _first(stamps: NDArray[np.uint64], chosen: NDArray[np.bool_]) -> int | None:
    """Where the earliest of the chosen records is."""
    at = np.flatnonzero(chosen)
    return int(at[stamps[at].argmin()]) if len(at) else None


class Events:
    """Totals of the record stream, and the few records worth keeping.

    Args:
        hooks: the capture's hooks.
        overflow: counts what does not fit.
        creation: called with (process, record) for each record of a communicator being created.
    """

    def __init__(self, hooks: Hooks, overflow: Overflow, creation: Callable[[Process, Any], None]) -> None:
        self.total = self.homeless = 0
        self.next_seq: dict[tuple[int, int], int] = {}
        self._hooks, self._overflow, self._creation = hooks, overflow, creation
        self._slots: list[Process | None] = [None] * WIRE_PROCS
        self._floor = np.zeros(WIRE_PROCS * WIRE_HOOKS, dtype=np.uint64)
        self._lists = 0
        self.forward: Callable[[list[Process | None], NDArray[Any]], None] = lambda slots, recs: None

    def settle(self, slot: int, process: Process | None) -> None:
        """From now on records with this slot belong to this process."""
        self._slots = [*self._slots[:slot], process, *self._slots[slot + 1 :]]
        self._floor[slot * WIRE_HOOKS : (slot + 1) * WIRE_HOOKS] = 0

    def restart(self, proc: int, pointer: int) -> int:
        """Another communicator lies there now; the number that the one before had come to."""
        return self.next_seq.pop((proc, pointer), 0)

    def told(self, proc: int, pointer: int, numbered: int) -> None:
        """So many operations have been numbered there, be they recorded or not."""
        place = (proc, pointer)
        if numbered and (place in self.next_seq or not self._overflow.full("sequence numbers", len(self.next_seq))):
            self.next_seq[place] = max(self.next_seq.get(place, 0), numbered)

    def owner(self, slot: int) -> Process | None:
        """The process that holds a slot now."""
        return self._slots[slot] if slot < WIRE_PROCS else None

    def add(self, data: bytes, *, creations: bool = True) -> None:
        """Records back to back (a whole number). Raises BadField when one is impossible; nothing is counted then.

        Args:
            creations: whether to tell of communicators being created; False when the caller does, with unique ids.
        """
        if not data:
            return
        recs = np.frombuffer(data, dtype=REC)
        kind, flags, hook, slot = (np.ascontiguousarray(recs[name]) for name in ("kind", "flags", "hook", "slot"))
        if kind.max() > LAST_KIND or hook.max() >= WIRE_HOOKS or slot.max() >= WIRE_PROCS:
            raise BadField("a record has an impossible kind, hook or slot")
        self._count(kind, flags, slot)
        self.forward(self._slots, recs)
        self._first_cuda(recs, hook, slot, kind)
        outermost = (flags & NESTED) == 0
        self._longest(recs, hook, slot, (kind == DONE) & outermost & self._hooks.is_stall[hook])
        if self._hooks.is_nccl[hook].any():
            if creations:
                self._create(recs, self._hooks.is_creator[hook] & outermost & (kind >= ENTER) & (kind <= ABANDONED))
            counted = (kind == ENTER) & ((flags & (NESTED | NO_SEQ)) == 0)
            self._number(recs, hook, self._hooks.is_numbered[hook] & counted)

    def _count(self, kind: NDArray[np.uint8], flags: NDArray[np.uint8], slot: NDArray[np.uint16]) -> None:
        is_event = _IS_EVENT[kind << 1 | (flags >> 1 & 1)]
        by_slot = np.bincount(slot, weights=is_event, minlength=WIRE_PROCS)
        for place in np.flatnonzero(by_slot).tolist():
            events, process = int(by_slot[place]), self._slots[place]
            self.total += events
            if process is None:
                self.homeless += events
            else:
                process.events += events

    def _first_cuda(
        self, recs: NDArray[Any], hook: NDArray[np.uint16], slot: NDArray[np.uint16], kind: NDArray[np.uint8]
    ) -> None:
        stamps = recs["ts_ns"]
        earliest = int(stamps.min())
        if all(p is None or (p.first_launch_ns or MAX_NS) <= earliest for p in self._slots):
            return
        is_call = kind <= ABANDONED
        is_cuda, is_launch = self._hooks.is_cuda[hook] & is_call, self._hooks.is_launch[hook] & is_call
        for place in np.unique(slot).tolist():
            process, here = self._slots[place], slot == place
            if process is None:
                continue
            if (at := _first(stamps, is_cuda & here)) is not None:
                first = int(stamps[at])
                if process.first_cuda_ns is None or first < process.first_cuda_ns:
                    process.first_cuda_ns = first
                    process.first_cuda_call = int(hook[at]), int(recs["dur_ns"][at])
            if (at := _first(stamps, is_launch & here)) is not None:
                process.first_launch_ns = min(int(stamps[at]), process.first_launch_ns or MAX_NS)

    def _longest(
        self, recs: NDArray[Any], hook: NDArray[np.uint16], slot: NDArray[np.uint16], chosen: NDArray[np.bool_]
    ) -> None:
        at = np.flatnonzero(chosen)
        key = slot[at].astype(np.int64) * WIRE_HOOKS + hook[at]
        duration = recs["dur_ns"][at]
        # Nearly every call is shorter than the fifth longest so far: the sort sees the few that are not.
        few = duration > self._floor[key]
        at, key, duration = at[few], key[few], duration[few]
        if not len(at):
            return
        start = recs["ts_ns"][at]
        order = np.lexsort((start, ~duration, key))
        key, duration, start = key[order], duration[order], start[order]
        heads = np.flatnonzero(np.concatenate(([True], key[1:] != key[:-1])))
        for head, end in zip(heads.tolist(), [*heads[1:].tolist(), len(key)], strict=True):
            top = slice(head, min(end, head + LONGEST))
            self._merge(int(key[head]), list(zip(duration[top].tolist(), start[top].tolist(), strict=True)))

    def _merge(self, key: int, calls: list[tuple[int, int]]) -> None:
        process, hook = self._slots[key // WIRE_HOOKS], key % WIRE_HOOKS
        if process is None:
            return
        if hook not in process.longest:
            if self._overflow.full("longest lists", self._lists):
                return
            self._lists += 1
        merged = sorted(process.longest.get(hook, []) + calls, key=lambda c: (-c[0], c[1]))[:LONGEST]
        process.longest[hook] = merged
        if len(merged) == LONGEST:
            self._floor[key] = merged[-1][0]

    def _create(self, recs: NDArray[Any], chosen: NDArray[np.bool_]) -> None:
        for i in np.flatnonzero(chosen).tolist():
            process = self._slots[int(recs["slot"][i])]
            if process is not None:
                self._creation(process, recs[i])

    def _number(self, recs: NDArray[Any], hook: NDArray[np.uint16], chosen: NDArray[np.bool_]) -> None:
        for number in np.unique(hook[chosen]).tolist():
            self._number_one(recs[chosen & (hook == number)], self._hooks.get(number).comm)

    def _number_one(self, recs: NDArray[Any], index: int) -> None:
        comm = recs["a"][:, index]
        key = comm + (recs["slot"].astype(np.uint64) << np.uint64(COMM_BITS))
        order = np.argsort(key, kind="stable")
        key = key[order]
        heads = np.flatnonzero(np.concatenate(([True], key[1:] != key[:-1])))
        highest = np.maximum.reduceat(recs["n"][order], heads)
        for head, last in zip(order[heads].tolist(), highest.tolist(), strict=True):
            process = self._slots[int(recs["slot"][head])]
            if process is None:
                continue
            place = (process.proc, int(comm[head]))
            if place in self.next_seq or not self._overflow.full("sequence numbers", len(self.next_seq)):
                self.next_seq[place] = max(self.next_seq.get(place, 0), last + 1)

"""What the GPU did with the operations that a process issued, as a witness inside the process told it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.arrivals import Arrivals
from stallscope.aggregate.events import BY_PLUGIN, FINISHED, QUEUED, STARTED
from stallscope.aggregate.issuer import Issuer
from stallscope.aggregate.numbering import COLLECTIVE, RECV, SEND
from stallscope.aggregate.starts import Starts

__all__ = ["forget", "told_by_device"]

Array = NDArray[Any]
FIELDS = {QUEUED: "queued_ns", STARTED: "begun_ns", FINISHED: "ended_ns"}
MAX_EARLY = 4096


def told_by_device(issuer: Issuer, recs: Array, pointers: Array, arrivals: Arrivals, starts: Starts) -> None:
    """Mark the operations that these records are about; call it when their entries, so far, are in the log.

    Records come from threads of NCCL's own and may overtake the entry: such a one is kept until the entry is there.

    Args:
        issuer: of all records.
        recs: records of the three kinds.
        pointers: the communicator of each.
        arrivals, starts: of the job; when collectives began is added to `starts`.
    """
    if issuer.early is not None:
        recs, pointers = np.concatenate((issuer.early[0], recs)), np.concatenate((issuer.early[1], pointers))
        issuer.early = None
    if not len(recs):
        return
    rows = issuer.log.newest(len(issuer.log))
    ahead = np.zeros(len(recs), bool)
    for pointer in np.unique(pointers).tolist():
        place = issuer.places.get(pointer)
        mine = np.flatnonzero(pointers == pointer)
        numbers = recs["n"][mine].astype(np.int64)
        ahead[mine] = place is None or place.next_n is None or numbers >= place.next_n
        began = _mark(issuer, rows, pointer, recs[mine])
        if place is not None and place.comm >= 0 and place.base is not None:
            numbers, times = began
            starts.began(place.comm, int(arrivals.size[place.comm]), place.rank, numbers + place.base, times)
    if ahead.sum() > MAX_EARLY:
        issuer.untold_ns = int(recs["ts_ns"].max())
    if ahead.any():
        issuer.early = recs[ahead][-MAX_EARLY:], pointers[ahead][-MAX_EARLY:]


def forget(issuer: Issuer, pointer: int) -> None:
    """Another communicator lies there now: what was told early was of the one before."""
    if issuer.early is not None:
        kept = issuer.early[1] != pointer
        issuer.early = issuer.early[0][kept], issuer.early[1][kept]


def _mark(issuer: Issuer, rows: Array, pointer: int, recs: Array) -> tuple[Array, Array]:
    """(numbers, instants) of collectives that the GPU began, as NCCL told: events are asked too seldom for that."""
    began = np.zeros(0, np.int64), np.zeros(0, np.int64)
    at = np.flatnonzero((rows["pointer"] == pointer) & np.isin(rows["kind"], (COLLECTIVE, SEND, RECV)))
    if not len(at):
        return began
    at = at[np.argsort(rows["n"][at], kind="stable")]
    numbers = rows["n"][at]
    for kind, field in FIELDS.items():
        told = recs[recs["kind"] == kind]
        found = np.minimum(np.searchsorted(numbers, told["n"]), len(numbers) - 1)
        fits = (numbers[found] == told["n"]) & (rows["ts_ns"][at[found]] <= told["ts_ns"].astype(np.int64))
        places, times = at[found[fits]], told["ts_ns"][fits].astype(np.int64)
        issuer.log.assign(field, places, times)
        if kind == STARTED:
            collective = (rows["kind"][places] == COLLECTIVE) & (told["flags"][fits] & BY_PLUGIN > 0)
            began = rows["index"][places[collective]], times[collective]
    return began

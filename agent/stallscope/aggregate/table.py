"""What a shim's own table says of its process's communicators (COMMS frames): for a capture that came late."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.checks import BadField, items
from stallscope.aggregate.events import ENTER
from stallscope.aggregate.hooks import WIRE_HOOKS
from stallscope.wire.columns import REC
from stallscope.wire.frames import Body

__all__ = ["TableRow", "newest_of", "table_rows"]

UID_BYTES, MAX_ROWS, MAX_RANKS = 128, 4096, 1 << 16
WORD = 1 << 64


class TableRow(NamedTuple):
    """One communicator.

    Attributes:
        next: operations numbered so far; of the newest one hook, elements, dtype and redop.
        rank, nranks: None where the creation did not tell.
        uid: the 128 bytes it was made from, None for a child.
    """

    pointer: int
    next: int
    hook: int
    elements: int
    dtype: int
    redop: int
    rank: int | None
    nranks: int | None
    uid: bytes | None


def table_rows(body: Body) -> list[TableRow]:
    """Decode a COMMS frame. Raises BadField."""
    return [_row(row) for row in items(body, "comms", MAX_ROWS)]


def _row(row: Any) -> TableRow:
    if not isinstance(row, list) or len(row) != len(TableRow._fields):
        raise BadField("comms holds something else than communicators")
    *words, rank, nranks, uid = row
    if not all(type(word) is int and 0 <= word < WORD for word in words) or words[2] >= WIRE_HOOKS:
        raise BadField("comms holds something else than numbers")
    for number in (rank, nranks):
        if number is not None and not (type(number) is int and 0 <= number <= MAX_RANKS):
            raise BadField("comms holds an impossible rank")
    if not isinstance(uid, bytes) or len(uid) not in (0, UID_BYTES):
        raise BadField("comms holds something else than a unique id")
    pointer, numbered, hook, elements, dtype, redop = words
    return TableRow(pointer, numbered, hook, elements, dtype, redop, rank, nranks, uid or None)


def newest_of(row: TableRow, at_ns: int, columns: dict[str, NDArray[Any]]) -> NDArray[Any]:
    """The newest operation as one REC row, entered at that instant.

    Args:
        columns: where the arguments of each function stand (`Arguments.columns`).
    """
    rec = np.zeros(1, REC)
    rec["ts_ns"], rec["hook"], rec["kind"], rec["n"] = at_ns, row.hook, ENTER, (row.next - 1) & 0xFFFFFFFF
    words = {"comm": row.pointer, "count": row.elements, "dtype": row.dtype, "redop": row.redop}
    for word, value in words.items():
        index = int(columns[word][row.hook])
        if index >= 0:
            rec["a"][0, index] = value
    return rec

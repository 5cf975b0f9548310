"""The structs of native/wire.h as numpy dtypes, and the arithmetic of its histograms. For the aggregating side only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BUCKETS", "COUNT", "FRAME", "REC", "ROW", "TIME", "UID_REC", "bucket_bounds", "bucket_from", "columns",
           "percentile", "records"]  # fmt: skip

DEPTH = 4
BUCKETS = 160
_FIRST_EXPONENT = 7

REC = np.dtype(
    [("ts_ns", "<u8"), ("dur_ns", "<u8"), ("tgid", "<u4"), ("tid", "<u4"), ("hook", "<u2"), ("kind", "u1"),
     ("flags", "u1"), ("slot", "<u2"), ("depth", "u1"), ("reserved", "u1"), ("n", "<u4"), ("status", "<i4"),
     ("a", "<u8", 8)]
)  # fmt: skip
UID_REC = np.dtype([("rec", REC), ("uid", "u1", 128)])
COUNT = np.dtype(
    [("calls", "<u8"), ("nested", "<u8"), ("errors", "<u8"), ("lost", "<u8"), ("sampled_out", "<u8"),
     ("filtered", "<u8"), ("reserved", "<u8", 2)]
)  # fmt: skip
TIME = np.dtype([("n", "<u8"), ("sum_ns", "<u8"), ("max_ns", "<u8"), ("hist", "<u4", BUCKETS)])
FRAME = np.dtype(
    [("ts_ns", "<u8"), ("sp", "<u8"), ("cookie", "<u8"), ("n", "<u4"), ("flags", "u1"), ("pick", "u1"),
     ("site", "<u2"), ("a", "<u8", 8)]
)  # fmt: skip
ROW = np.dtype(
    [("owner", "<u8"), ("seq", "<u4"), ("depth", "<u4"), ("slot", "<u4"), ("shared", "<u4"), ("calls", "<u8"),
     ("copy_stack", "<u8"), ("copy_stream", "<u8"), ("copy_class", "<u4"), ("deeds", "<u4", 8), ("reserved", "<u4"),
     ("wait_ns", "<u8"), ("was", "<u8"), ("f", FRAME, DEPTH)]
)  # fmt: skip


def columns(data: bytes | memoryview, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A read-only array over structs that stand back to back. Raises ValueError when the length does not fit."""
    if len(data) % dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no multiple of {dtype.itemsize}")
    rows = np.frombuffer(data, dtype)
    rows.flags.writeable = False
    return rows


def records(data: bytes | memoryview) -> npt.NDArray[Any]:
    """`columns` of `wire_rec`."""
    return columns(data, REC)


def bucket_bounds(index: int) -> tuple[int, int]:
    """[low, high) of a histogram bucket in ns; quarters of an octave. Raises IndexError.

    Bucket 0 also takes everything shorter, the last one everything longer. Example: bucket 13 is [1280, 1536).
    """
    if not 0 <= index < BUCKETS:
        raise IndexError(f"bucket {index}")
    octave, quarter = divmod(index, 4)
    exponent = octave + _FIRST_EXPONENT
    low = (4 + quarter) << (exponent - 2)
    return (0 if index == 0 else low), low + (1 << (exponent - 2))


def bucket_from(ns: int) -> int:
    """The first bucket that holds nothing shorter; BUCKETS where all do."""
    return next((index for index in range(BUCKETS) if bucket_bounds(index)[0] >= ns), BUCKETS)


def percentile(hist: npt.ArrayLike, q: float) -> int | None:
    """A duration in ns that is within 12.5 % of the q-quantile (0 < q <= 1), None for an empty histogram.

    It is the middle of the bucket that holds the ceil(q * n)-th shortest duration. In bucket 0 it is off by at most
    80 ns, and in the last one it is a lower bound. Raises ValueError for another q or number of buckets.
    """
    counts = np.asarray(hist, dtype=np.uint64)
    if counts.shape != (BUCKETS,) or not 0 < q <= 1:
        raise ValueError(f"quantile {q} of {counts.shape}")
    upto = np.cumsum(counts)
    total = int(upto[-1])
    if not total:
        return None
    rank = max(1, math.ceil(q * total * (1 - 1e-12)))  # 0.07 * 100 is more than 7
    low, high = bucket_bounds(int(np.searchsorted(upto, rank)))
    return (low + high) // 2

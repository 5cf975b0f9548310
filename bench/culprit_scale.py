"""Time and memory of one look at a job of many ranks, each in six communicators, with one fault.

Usage: bench/culprit_scale.py [RANKS...], multiples of 2048. Exit code 1 if a look does not find the culprit.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stallscope.aggregate.arrivals import Arrivals

__all__ = ["Job", "Look", "lagging", "make_job", "mismatching", "with_absent", "with_mismatch"]

Array = NDArray[Any]
TENSOR, PIPELINE, EXPERT = 8, 16, 16
SCALES = (16_384, 102_400)
ROUNDS = 7
NOW_NS = 3_600_000_000_000
WORLD, TP, PP, DP, EP, EDP = range(6)


@dataclass
class Job:
    """Who is in which communicator, and how far. The columns are [rank, which of its six communicators].

    Attributes:
        sizes: by communicator: number of its ranks.
        comm: index of the communicator; place: the rank in it.
        arrived: collectives issued on it; last_enter_ns: when the last of them; signature: of the last of them.
        culprit: the rank at fault, and where it shows first: (communicator, rank in it).
    """

    sizes: Array
    comm: Array
    place: Array
    arrived: Array
    last_enter_ns: Array
    signature: Array
    culprit: tuple[int, int] = (-1, -1)


Look = Callable[[Arrivals], list[tuple[int, int]]]
"""(communicator, rank in it) of those at fault, where a fault shows."""


def make_job(ranks: int, seed: int = 1) -> Job:
    """A healthy job of tensor, pipeline, data and expert parallel ranks, and one communicator of all."""
    rank = np.arange(ranks)
    t, p, d = rank % TENSOR, rank // TENSOR % PIPELINE, rank // (TENSOR * PIPELINE)
    replicas = ranks // (TENSOR * PIPELINE)
    if ranks % (TENSOR * PIPELINE * EXPERT):
        raise SystemExit(f"{ranks} is not a multiple of {TENSOR * PIPELINE * EXPERT}")
    e, f, model = d % EXPERT, d // EXPERT, p * TENSOR + t
    shards = replicas // EXPERT
    groups = [  # which group of its kind, place in it, how many groups of what size
        (np.zeros_like(rank), rank, 1, ranks),
        (d * PIPELINE + p, t, replicas * PIPELINE, TENSOR),
        (d * TENSOR + t, p, replicas * TENSOR, PIPELINE),
        (model, d, TENSOR * PIPELINE, replicas),
        (model * shards + f, e, TENSOR * PIPELINE * shards, EXPERT),
        (model * EXPERT + e, f, TENSOR * PIPELINE * EXPERT, shards),
    ]
    before = np.cumsum([0, *(count for _, _, count, _ in groups)])
    sizes = np.concatenate([np.full(count, size) for _, _, count, size in groups])
    comm = np.stack([group + before[kind] for kind, (group, _, _, _) in enumerate(groups)], axis=1)
    place = np.stack([where for _, where, _, _ in groups], axis=1)
    rng = np.random.default_rng(seed)
    counts, signatures = rng.integers(1000, 100_000, len(sizes)), rng.integers(1, 1 << 63, len(sizes), np.uint64)
    late_ns = rng.integers(0, 5_000_000, comm.shape)
    return Job(sizes, comm, place, counts[comm], NOW_NS - 10_000_000 - late_ns, signatures[comm])


def with_absent(job: Job, culprit: int) -> Job:
    """One rank never comes to the next operation of its tensor parallel group. All others do; in the world's next
    operation the whole group is missing, as it waits."""
    group = job.comm[:, TP] == job.comm[culprit, TP]
    came = group & (np.arange(len(group)) != culprit)
    job.arrived[came, TP] += 1
    job.arrived[~group, WORLD] += 1
    job.culprit = int(job.comm[culprit, TP]), int(job.place[culprit, TP])
    return job


def with_mismatch(job: Job, culprit: int) -> Job:
    """One rank calls something else than the others of its data parallel group."""
    job.signature[culprit, DP] ^= np.uint64(0xFF)
    job.culprit = int(job.comm[culprit, DP]), int(job.place[culprit, DP])
    return job


def filled(job: Job) -> Arrivals:
    """The columns as they would stand after the records of the whole job."""
    arrivals = Arrivals()
    for size in job.sizes.tolist():
        arrivals.add(size, 0)
    rows = arrivals.first[job.comm] + job.place
    arrivals.present[rows] = True
    arrivals.arrived[rows], arrivals.last_ns[rows] = job.arrived, job.last_enter_ns
    arrivals.signature[rows] = job.signature
    return arrivals


def lagging(arrivals: Arrivals) -> list[tuple[int, int]]:
    """Those who are missing where nobody else is: a rank that holds a group back that others wait for."""
    found = arrivals.lagging(NOW_NS)
    fewest = min((len(lag.missing) for lag in found), default=0)
    return [(lag.comm, rank) for lag in found for rank in lag.missing if len(lag.missing) == fewest]


def mismatching(arrivals: Arrivals) -> list[tuple[int, int]]:
    """Those whose last signature is not the most frequent one of their communicator."""
    found = []
    for comm in arrivals.differing():
        values = arrivals.signature[arrivals.rank_rows(comm)]
        kinds, counts = np.unique(values, return_counts=True)
        found += [(comm, rank) for rank in np.flatnonzero(values != kinds[counts.argmax()]).tolist()]
    return found


def resident_mb() -> float:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def column_mb(arrivals: Arrivals) -> float:
    """What the columns of the arrivals take."""
    return sum(v.nbytes for v in vars(arrivals).values() if isinstance(v, np.ndarray)) / 1e6


def measure(what: str, job: Job, look: Look) -> bool:
    """Print time and memory of a look. Returns whether it found the culprit and nobody else."""
    begin = time.perf_counter()
    arrivals = filled(job)
    filled_s, took_ms, found = time.perf_counter() - begin, [], []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        found = look(arrivals)
        took_ms.append((time.perf_counter() - begin) * 1000)
    right = found == [job.culprit]
    print(f"{len(job.comm):8} ranks {len(job.sizes):7} communicators  {what:22} {statistics.median(took_ms):8.2f} ms "
          f"(most {max(took_ms):.2f})  columns {column_mb(arrivals):6.1f} MB  filled in {filled_s:.2f} s  "
          f"peak {resident_mb():.0f} MB  {'found' if right else f'NOT FOUND: {found[:4]}'}")  # fmt: skip
    return right


def main(scales: list[int]) -> int:
    """Both faults at each scale."""
    right = True
    for ranks in scales:
        culprit = ranks * 5 // 7
        right &= measure("a rank never arrives", with_absent(make_job(ranks), culprit), lagging)
        right &= measure("a mismatch", with_mismatch(make_job(ranks), culprit), mismatching)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]] or list(SCALES)))

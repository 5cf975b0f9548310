"""How long a simulated all-reduce takes: `python tests/sim/nccl_bench.py` prints medians; nothing is asserted."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from nccl_kit import FLOAT32, Nccl, everywhere, ranks


def all_reduces(nccl: Nccl, uid: bytes, count: int, rounds: int, size: int, rank: int) -> float:
    """Median of one all-reduce and the wait for it, in seconds."""
    comm, took = nccl.init(uid, size, rank), []
    send, recv = nccl.array(count, FLOAT32), nccl.array(count, FLOAT32)
    send[:] = 1
    for _ in range(rounds):
        began = time.perf_counter()
        comm.all_reduce(send, recv, FLOAT32)
        nccl.synchronize()
        took.append(time.perf_counter() - began)
    assert (recv == size).all()
    comm.destroy()
    return statistics.median(took)


def main() -> None:
    import nccl_bench  # as the ranks know it

    nccl = Nccl()
    for size in (2, 4, 8):
        with ranks(size) as pool:
            for count in (1, 1 << 18):
                median = everywhere(pool, nccl_bench.all_reduces, nccl.unique_id(), count, 100)[0]
                print(f"all-reduce of {4 * count:8} bytes over {size} ranks: {median * 1e3:7.3f} ms")


if __name__ == "__main__":
    main()

"""A trainer with torch's own DataLoader and spawn workers, one of them slow; says what it waited for as JSON.

python loading.py WORKERS BATCHES: says "ready" and the workers' pids, and begins at a line of its stdin.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

SLOW_WORKER, SLOW_S, STEP_S = 1, 1.2, 0.1


class Slow(Dataset[torch.Tensor]):
    """One item a batch; which worker makes it decides how long that takes."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        worker = get_worker_info()
        assert worker is not None
        if worker.id == SLOW_WORKER and index >= worker.num_workers * 2:  # what is fetched before the beginning is fast
            time.sleep(SLOW_S)
        return torch.full((8,), os.getpid())


def main() -> None:
    workers, batches = int(sys.argv[1]), int(sys.argv[2])
    torch.ones(2, device="cuda")
    loader = DataLoader(Slow(batches), batch_size=None, num_workers=workers, multiprocessing_context="spawn")
    batch = iter(loader)
    pids = {index: int(next(batch)[0]) for index in range(workers)}
    print("ready", json.dumps(pids), flush=True)
    sys.stdin.readline()
    begin, waited = time.monotonic(), 0.0
    for _ in range(batches - workers):
        asked = time.monotonic()
        next(batch)
        waited += time.monotonic() - asked
        stop = time.monotonic() + STEP_S
        while time.monotonic() < stop:
            torch.cuda.synchronize()
    print(json.dumps({"waited_s": waited, "total_s": time.monotonic() - begin}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()

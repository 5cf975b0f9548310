"""The last rank never comes to the second all-reduce."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from rank_kit import RANK, WORLD, join, say

TIMEOUT_S, ABSENT_S = 8, 25


def main() -> None:
    join(TIMEOUT_S)
    tensor = torch.ones(1000).cuda()
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    if RANK == WORLD - 1:
        time.sleep(ABSENT_S)
        say(came=False)
        os._exit(0)
    start = time.monotonic()
    dist.all_reduce(tensor)
    say(blocked_s=time.monotonic() - start)
    torch.cuda.synchronize()
    say(blocked_s=time.monotonic() - start, ended=True)


if __name__ == "__main__":
    main()

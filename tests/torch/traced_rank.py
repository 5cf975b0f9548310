"""One of two ranks: a known number of collectives between "ready" and its end."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from rank_kit import join

REDUCES, BROADCASTS = 50, 20


def main() -> None:
    join()
    tensor = torch.ones(1000).cuda()
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(REDUCES):
        dist.all_reduce(tensor)
    for _ in range(BROADCASTS):
        dist.broadcast(tensor, 1)
    torch.cuda.synchronize()
    print(json.dumps({"ncclAllReduce": REDUCES, "ncclBroadcast": BROADCASTS}), flush=True)
    sys.stdin.readline()
    os._exit(0)


if __name__ == "__main__":
    main()

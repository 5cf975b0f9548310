"""Does a known number of everything between "ready" and its end, and says how many."""

from __future__ import annotations

import json
import os
import sys

import torch

ITEMS, SYNCHRONIZES, COPIES, ADDS, REPLAYS = 137, 11, 23, 1000, 7


def main() -> None:
    x, pinned = torch.zeros(1000).cuda(), torch.zeros(1000).pin_memory()
    x.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    x[0].item()
    graph.replay()
    x.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(ADDS):
        x.add_(1)
    for _ in range(ITEMS):
        x[0].item()
    for _ in range(COPIES):
        x.copy_(pinned, non_blocking=True)
    for _ in range(REPLAYS):
        graph.replay()
    for _ in range(SYNCHRONIZES):
        torch.cuda.synchronize()
    truth = {
        "cudaLaunchKernel": ADDS,
        "cudaMemcpyAsync": ITEMS + COPIES,
        "cudaStreamSynchronize": ITEMS,
        "cudaGraphLaunch": REPLAYS,
        "cudaDeviceSynchronize": SYNCHRONIZES,
    }
    print(json.dumps(truth), flush=True)
    os._exit(0)  # what torch calls on its way out is not counted


if __name__ == "__main__":
    main()

"""A training loop with every implicit wait that PyTorch makes, each on a line of its own, and how often it ran.

waits.py STEPS: says "ready" once CUDA runs, waits for a line, and ends with one line of JSON: {function: calls}.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

calls: Counter[str] = Counter()


def item(loss: torch.Tensor) -> None:
    loss.item()


def cpu(loss: torch.Tensor) -> None:
    loss.cpu()


def tolist(loss: torch.Tensor) -> None:
    loss.tolist()


def nonzero(values: torch.Tensor) -> None:
    values.nonzero()


def synchronize(_: torch.Tensor) -> None:
    torch.cuda.synchronize()


def stream_synchronize(_: torch.Tensor) -> None:
    torch.cuda.current_stream().synchronize()


def event_synchronize(_: torch.Tensor) -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


def unpinned(values: torch.Tensor) -> None:
    UNPINNED.to("cuda", non_blocking=True)


def unpinned_blocking(values: torch.Tensor) -> None:
    UNPINNED.cuda()


def pinned(values: torch.Tensor) -> None:
    held.pinned.to("cuda", non_blocking=True)


def pinned_blocking(values: torch.Tensor) -> None:
    held.pinned.cuda()


class Held:
    pinned: torch.Tensor


UNPINNED, held = torch.ones(1000), Held()
WAITS = (
    item, cpu, tolist, nonzero, synchronize, stream_synchronize, event_synchronize, unpinned, unpinned_blocking, pinned,
    pinned_blocking,
)  # fmt: skip


def pinned_by_its_thread(count: int) -> None:
    """A loader with a worker has a thread that pins."""
    data = TensorDataset(torch.ones(count, 4096))
    for (batch,) in DataLoader(data, batch_size=1, num_workers=1, pin_memory=True):
        assert batch.is_pinned()


def main() -> None:
    steps = int(sys.argv[1])
    model = nn.Linear(64, 64).cuda()
    inputs = torch.ones(64, 64, device="cuda")
    for wait in WAITS[:4]:
        wait(model(inputs).sum())
    print("ready", flush=True)
    sys.stdin.readline()
    held.pinned = torch.ones(1000).pin_memory()
    for _ in range(steps):
        for wait in WAITS:
            wait(model(inputs).sum())
            calls[wait.__name__] += 1
    pinned_by_its_thread(8)
    print(json.dumps(calls), flush=True)
    sys.stdin.readline()
    os._exit(0)


if __name__ == "__main__":
    main()

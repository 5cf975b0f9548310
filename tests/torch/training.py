"""Training with DistributedDataParallel on several ranks, of which one may do what it should not, at one step.

    training.py SAYS.json --steps 100 [--fault sleep --rank 2 --at 40] [--timeout 60]

SAYS.json: what the rank did, by its own count; SAYS.json.fault: when (CLOCK_MONOTONIC) and on which line it went wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rank_kit import RANK, WORLD, join, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SLEEP_S, LONG_S = 12, 40
PACED = 10
STEP_S = 0.02  # of data that is prepared


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("says")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--fault", choices=("none", "sleep", "sleep-long", "raise", "short"), default="none")
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--at", type=int, default=40)
    parser.add_argument("--timeout", type=float, default=60)
    return parser.parse_args()


def note(**words: float) -> None:
    Path(sys.argv[1] + ".fault").write_text(json.dumps({"at_ns": time.monotonic_ns(), **words}))


class Training:
    """One rank. The loss is averaged over pairs of ranks, in a group of their own, to have two communicators."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(64, 512), nn.ReLU(), nn.LayerNorm(512), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)]
        self.inner = nn.Sequential(*layers).cuda()
        self.model = DistributedDataParallel(self.inner, device_ids=[RANK], bucket_cap_mb=0.25)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        pairs = [dist.new_group([first, first + 1]) for first in range(0, WORLD, 2)]
        self.pair = pairs[RANK // 2]
        self.steps = self.losses = 0

    def step(self, fault: str) -> None:
        time.sleep(STEP_S)
        inputs, labels = torch.randn(16, 64).pin_memory(), torch.randint(0, 10, (16,))
        loss = nn.functional.cross_entropy(self.model(inputs.cuda(non_blocking=True)), labels.cuda())
        self.optimizer.zero_grad(set_to_none=True)
        if fault.startswith("sleep"):
            seconds = SLEEP_S if fault == "sleep" else LONG_S
            note(line=sys._getframe().f_lineno + 1)
            time.sleep(seconds)
        if fault == "raise":
            note()
            raise RuntimeError("a bad batch")
        loss.backward()
        self.optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss, group=self.pair)
        self.losses += 1
        loss.item()
        self.steps += 1

    def truth(self) -> dict[str, int]:
        """Of the gradients: calls by what DDP itself logged of its buckets, bytes by the parameters."""
        log = self.model._get_ddp_logging_data()
        first, rest = (str(log.get(name, "")).split(",") for name in ("bucket_sizes", "rebuilt_bucket_sizes"))
        gradients = sum(p.numel() * p.element_size() for p in self.inner.parameters())
        return {
            "steps": self.steps,
            "reduces": len(first) + (self.steps - 1) * len(rest) if self.steps else 0,
            "reduced_bytes": self.steps * gradients,
            "losses": self.losses,
        }


def pace(training: Training, seconds: float) -> int:
    """How many steps take so long: all ranks must make the same number, so the first one says it."""
    start = time.monotonic()
    for _ in range(PACED):
        training.step("none")
    steps = max(1, round(seconds / (time.monotonic() - start) * PACED))
    store = dist.distributed_c10d._get_default_store()
    if RANK == 0:
        store.set("steps", str(steps))
    return int(store.get("steps"))


def main() -> None:
    wish = arguments()
    join(wish.timeout)
    training = Training()
    if wish.seconds:
        wish.steps = pace(training, wish.seconds)
    for step in range(wish.steps):
        mine = wish.fault if (RANK, step) == (wish.rank, wish.at) else "none"
        if mine == "short":
            note()
            break
        training.step(mine)
        if step == 0:
            Path(sys.argv[1] + ".going").touch()
    torch.cuda.synchronize()
    say(**training.truth())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Five steps of distributed training."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rank_kit import RANK, join, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    join()
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.LayerNorm(256), nn.Linear(256, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers).cuda(), device_ids=[RANK], bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters())
    steps = 0
    for _ in range(5):
        inputs, labels = torch.randn(16, 64).pin_memory(), torch.randint(0, 10, (16,))
        loss = nn.functional.cross_entropy(model(inputs.cuda(non_blocking=True)), labels.cuda())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        loss.item()
        steps += 1
    torch.cuda.synchronize()
    dist.barrier()
    say(steps=steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

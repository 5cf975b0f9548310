"""Each collective on the simulated NCCL and on gloo, with the same integer-valued tensors from the host."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rank_kit import RANK, WORLD, join, say

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
SIZES = (1, 1000, 100_003)


def values(dtype: torch.dtype, size: int, salt: int) -> torch.Tensor:
    """Small whole numbers, so that no order of adding rounds; another in each rank."""
    return ((torch.arange(size) * 7 + RANK * 3 + salt) % 8).to(dtype)


def main() -> None:
    join()
    gloo = dist.new_group(backend="gloo")
    unequal, compared = [], 0

    def compare(what: str, device: torch.Tensor, host: torch.Tensor) -> None:
        nonlocal compared
        compared += 1
        if not torch.equal(device.cpu(), host):
            unequal.append(what)

    for number, (dtype, size) in enumerate((d, s) for d in DTYPES for s in SIZES):
        name, host = f"{dtype} {size}", values(dtype, size, number)
        operations = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN]
        for operation in operations:
            device, own = host.cuda(), host.clone()
            dist.all_reduce(device, operation)
            if dtype is torch.bfloat16:
                wide = own.float()
                dist.all_reduce(wide, operation, group=gloo)
                own = wide.to(dtype)
            else:
                dist.all_reduce(own, operation, group=gloo)
            compare(f"all_reduce {operation} {name}", device, own)
        root = number % WORLD
        device, own = host.cuda(), host.clone()
        dist.broadcast(device, root)
        dist.broadcast(own, root, group=gloo)
        compare(f"broadcast {name}", device, own)
        devices, owns = [torch.empty_like(host).cuda() for _ in range(WORLD)], [host.clone() for _ in range(WORLD)]
        dist.all_gather(devices, host.cuda())
        dist.all_gather(owns, host, group=gloo)
        for device, own in zip(devices, owns, strict=True):
            compare(f"all_gather {name}", device, own)
    dist.barrier()
    say(unequal=unequal, compared=compared)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

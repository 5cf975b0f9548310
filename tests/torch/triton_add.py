"""A Triton kernel: launched on the driver, past the runtime."""

import torch
import triton
import triton.language as tl


@triton.jit
def add(x, y, out, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * block + tl.arange(0, block)
    mask = index < count
    tl.store(out + index, tl.load(x + index, mask=mask) + tl.load(y + index, mask=mask), mask=mask)


def run() -> None:
    a, b = torch.ones(1024, device="cuda"), torch.ones(1024, device="cuda")
    out = torch.empty_like(a)
    add[(4,)](a, b, out, 1024, block=256)
    torch.cuda.synchronize()

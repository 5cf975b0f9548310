"""A Triton kernel: it has to stand in a file, at the top level."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_one(x_ptr, n, block: tl.constexpr):
    """x += 1."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1, mask=at < n)

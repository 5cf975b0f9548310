"""Which library a mapped file's name suggests. A hint only: what counts is what the file defines."""

from __future__ import annotations

import re

__all__ = ["SHIM", "WANTED", "is_shim", "match"]

SHIM = "libstallscope.so"

# A package may carry a copy under a hashed name (auditwheel): libcudart-4f6ac1d2.so.12. A stub (libcuda_stub.so,
# stubs/libcuda.so) has another shape or is never mapped.
_SHAPES = (
    ("CUDART", re.compile(r"libcudart(-[0-9a-f]{6,})?\.so(\.\d+)*")),
    ("CUDA", re.compile(r"libcuda(-[0-9a-f]{6,})?\.so(\.\d+)*")),
    ("NCCL", re.compile(r"libnccl(-[0-9a-f]{6,})?\.so(\.\d+)*")),
)

# The same, coarser and on bytes: what a reader of all mappings of the system need not look at twice.
WANTED = re.compile(rb"/lib(?:cudart|cuda|nccl)[^/]*$")


def match(path: str) -> str | None:
    """Return "CUDART", "CUDA" or "NCCL" by a path as /proc/PID/maps shows it, or None.

    >>> match("/opt/venv/nvidia/cuda_runtime/lib/libcudart.so.12 (deleted)")
    'CUDART'
    """
    name = path.removesuffix(" (deleted)").rpartition("/")[2]
    return next((library for library, shape in _SHAPES if shape.fullmatch(name)), None)


def is_shim(path: str) -> bool:
    """Whether that is our own library, by a path as /proc/PID/maps shows it."""
    return path.removesuffix(" (deleted)").rpartition("/")[2] == SHIM

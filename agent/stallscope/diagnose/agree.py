"""Which calls of one operation fit together, and in what they differ."""

from __future__ import annotations

from collections.abc import Iterable

from stallscope.diagnose.view import Signature

__all__ = ["P2P", "blocks", "difference", "differs", "size_bytes"]

P2P = "p2p"
_DTYPE_BYTES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
"""Of ncclDataType_t, from ncclInt8 = 0 to ncclFloat8e5m2 = 11."""
_SLACK_BYTES = 64 << 10
"""Sizes of one collective that differ by no more have been seen to end, with wrong numbers (NVIDIA/nccl#1417)."""


def size_bytes(signature: Signature) -> int:
    """What is moved, as the call counts it. A type that is not known counts one byte."""
    known = 0 <= signature.dtype < len(_DTYPE_BYTES)
    return signature.elements * (_DTYPE_BYTES[signature.dtype] if known else 1)


def blocks(signatures: Iterable[Signature]) -> bool:
    """Whether NCCL can't end an operation that was called like this: by another function, with another root, with
    sizes far apart. Other types and reductions end with wrong numbers."""
    different = set(signatures)
    if len(different) < 2 or P2P in {one.api for one in different}:
        return False
    if len({(one.api, one.root) for one in different}) > 1:
        return True
    sizes = [size_bytes(one) for one in different]
    return max(sizes) - min(sizes) > _SLACK_BYTES


def differs(signatures: Iterable[Signature]) -> bool:
    """Whether they disagree in anything that must be equal; of a send and its receive that is the size."""
    different = set(signatures)
    if len(different) < 2:
        return False
    return P2P not in {one.api for one in different} or len({size_bytes(one) for one in different}) > 1


def difference(odd: Signature, usual: Signature) -> tuple[str, str]:
    """The first field in which two differ, as people say it: (of the odd one, of the usual one)."""
    if odd.api != usual.api:
        return odd.api, usual.api
    if odd.root != usual.root:
        return f"root {odd.root}", f"root {usual.root}"
    if odd.elements != usual.elements:
        return f"{odd.elements} elements", f"{usual.elements} elements"
    if odd.dtype != usual.dtype:
        return f"data type {odd.dtype}", f"data type {usual.dtype}"
    return f"reduction {odd.redop}", f"reduction {usual.redop}"

"""Which environment variables are read, and what of their values may be shown.

The environment of a process holds secrets. So names go by an allow-list, and both sides hold it: capture sends nothing
else, aggregate takes nothing else from a recording.
"""

from __future__ import annotations

import re

from stallscope.wire.secrets import CUT, without_secrets

__all__ = ["CUT", "MAX_NAME", "MAX_NAMES", "MAX_READ", "MAX_VALUE", "is_wanted", "shown", "wanted"]

MAX_NAMES = 256
MAX_NAME, MAX_VALUE = 64, 512
MAX_READ = 4096  # a longer value is not looked through
NAMES = frozenset((
    "TRACEPARENT", "TRACESTATE",
    "RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "PMI_RANK", "PMI_SIZE", "PMIX_RANK", "DEEPSPEED_TIMEOUT",
    "HOSTNAME", "POD_NAME", "POD_NAMESPACE", "POD_UID", "NODE_NAME", "MY_POD_NAME", "MY_POD_NAMESPACE", "MY_NODE_NAME",
    "K8S_POD_NAME", "K8S_POD_NAMESPACE", "K8S_POD_UID", "K8S_NODE_NAME", "KUBERNETES_POD_NAME", "JOB_COMPLETION_INDEX",
    "NVIDIA_VISIBLE_DEVICES",
))  # fmt: skip
FAMILIES = ("OTEL_", "SLURM_", "OMPI_", "NCCL_", "TORCH_NCCL_", "CUDA_")
_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
# Headers carry the exporter's credentials; SLURM_JWT is a token.
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|HEADERS|JWT|AUTH|PRIVATE|COOKIE|SIGNATURE")


def is_wanted(name: str) -> bool:
    """Whether a variable of this name may be read at all."""
    if len(name) > MAX_NAME or not _NAME.fullmatch(name) or _SECRET_NAME.search(name):
        return False
    return name in NAMES or name.startswith(FAMILIES)


def shown(value: str) -> str:
    """The value as it may be told: printable, at most MAX_VALUE characters, without what looks like a secret."""
    # Cut before shortening: half a secret is one, too.
    if len(value) > MAX_READ:
        return CUT
    text = without_secrets(value)
    return "".join(c if c.isprintable() and not "\ud800" <= c <= "\udfff" else "?" for c in text)[:MAX_VALUE]


def wanted(words: list[bytes]) -> dict[str, str]:
    """NAME=value strings as they stand in memory: the wanted ones, at most MAX_NAMES, the first of each name."""
    found: dict[str, str] = {}
    for word in words:
        raw, equals, value = word.partition(b"=")
        name = raw[: MAX_NAME + 1].decode("ascii", "replace")
        if equals and name not in found and is_wanted(name) and len(found) < MAX_NAMES:
            found[name] = shown(value.decode("utf-8", "replace"))
    return found

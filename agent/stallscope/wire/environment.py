"""Which environment variables are read, and what of their values may be shown.

The environment of a process holds secrets. So names go by an allow-list, and both sides hold it: capture sends nothing
else, aggregate takes nothing else from a recording.
"""

from __future__ import annotations

import re

__all__ = ["CUT", "MAX_NAME", "MAX_NAMES", "MAX_READ", "MAX_VALUE", "is_wanted", "shown", "wanted"]

CUT = "[cut]"
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
_USER_OF_URL = re.compile(r"(?<=://)\S*@")
# A word begins where none stands before: without that, a long one takes time by its square.
_PAIR = re.compile(
    r"(?<![\w.%-])([\w.%-]+)(\s{0,4}[=:]\s{0,4})((?:(?:bearer|basic)(?:\s|%20){1,4})?[^,;&\s]+)", re.IGNORECASE
)
_SECRET_PART = re.compile(
    r"key|token|secret|passw|pwd|credential|cookie|signature|jwt|auth(?!or(?:s|ed|ity)?$)", re.IGNORECASE
)
# Words that are secrets wherever they stand: of GitHub, GitLab, Slack, AWS, Google, Hugging Face, OpenAI; a JWT; PEM.
_SECRET_WORD = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:gh[a-z]_|github_pat_|glpat-|xox[a-z]-|AIza|hf_|sk-|eyJ)[\w.+/=-]{8,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|"
    r"-----BEGIN.*|[Bb](?:earer|asic)(?:\s|%20){1,4}[\w.+/=-]{8,})",
    re.DOTALL,
)


def is_wanted(name: str) -> bool:
    """Whether a variable of this name may be read at all."""
    if len(name) > MAX_NAME or not _NAME.fullmatch(name) or _SECRET_NAME.search(name):
        return False
    return name in NAMES or name.startswith(FAMILIES)


def shown(value: str) -> str:
    """The value as it may be told: printable, at most MAX_VALUE characters, without what looks like a secret.

    What looks like one is replaced by CUT: user and password in a URL, the value of a pair whose name says so, a word
    of a form that tokens have.
    """
    # Cut before shortening: half a secret is one, too.
    if len(value) > MAX_READ:
        return CUT
    text = _USER_OF_URL.sub(f"{CUT}@", value)
    text = _PAIR.sub(_without_secret, text)
    text = _SECRET_WORD.sub(CUT, text)
    return "".join(c if c.isprintable() and not "\ud800" <= c <= "\udfff" else "?" for c in text)[:MAX_VALUE]


def _without_secret(pair: re.Match[str]) -> str:
    return pair[1] + pair[2] + CUT if _SECRET_PART.search(pair[1]) else pair[0]


def wanted(words: list[bytes]) -> dict[str, str]:
    """NAME=value strings as they stand in memory: the wanted ones, at most MAX_NAMES, the first of each name."""
    found: dict[str, str] = {}
    for word in words:
        raw, equals, value = word.partition(b"=")
        name = raw[: MAX_NAME + 1].decode("ascii", "replace")
        if equals and name not in found and is_wanted(name) and len(found) < MAX_NAMES:
            found[name] = shown(value.decode("utf-8", "replace"))
    return found

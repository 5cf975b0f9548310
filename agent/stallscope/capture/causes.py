"""What BPF has to know of each function to tell why it waits: one word a hook (native/wire.h, wire_conf.sites)."""

from __future__ import annotations

from stallscope.wire.hook_table import Hook

__all__ = ["SITE_KINDS", "cause_word"]

SITE_KINDS = ("wait", "copy", "alloc", "collective", "p2p", "group", "comm")
WAIT_STREAM, WAIT_DEVICE, COPY, PIN, LOCK, UNPIN = range(1, 7)  # enum wire_role
TO_DEVICE, TO_HOST, ANY_WAY = 1, 2, 3  # enum wire_class
_ROLES = {
    "cudaMallocHost": PIN, "cudaHostAlloc": PIN, "cuMemAllocHost_v2": PIN, "cuMemHostAlloc": PIN,
    "cudaHostRegister": LOCK, "cuMemHostRegister_v2": LOCK,
    "cudaFreeHost": UNPIN, "cudaHostUnregister": UNPIN, "cuMemFreeHost": UNPIN, "cuMemHostUnregister": UNPIN,
    "cudaDeviceSynchronize": WAIT_DEVICE, "cudaThreadSynchronize": WAIT_DEVICE, "cuCtxSynchronize": WAIT_DEVICE,
    "cuCtxSynchronize_v2": WAIT_DEVICE,
}  # fmt: skip
# enum wire_deed; of copies 1 less than the first one: the way of the copy is added.
_DEEDS = {"launch": 0, "graph": 0, "wait": 1, "copy": 1, "alloc": 5, "collective": 6, "p2p": 6, "group": 6, "comm": 6}
_OTHER, _COPY = 7, 4


def cause_word(hook: Hook) -> int:
    """The word of one function; bit 0: its call sites are looked up."""
    words = hook.arguments.split()
    if "*config" in words or "uid[128]" in words:
        words = []  # places differ from the arguments, and none is needed
    role, direct = _role(hook), 0
    kind = _place(words, "copy_kind") if role == COPY else 0
    if role == COPY and not kind:
        direct = TO_DEVICE if "HtoD" in hook.name else TO_HOST if "DtoH" in hook.name else ANY_WAY
    deed = _DEEDS.get(hook.kind, _OTHER)
    if hook.kind == "copy" and role != COPY:
        deed = _COPY  # a memset
    return (
        (hook.kind in SITE_KINDS) | role << 1 | direct << 4 | _place(words, "stream") << 8 | kind << 12
        | _place(words, "src") << 16 | _place(words, "dst") << 20 | deed << 28
    )  # fmt: skip


def _role(hook: Hook) -> int:
    if hook.kind == "copy":
        return COPY if "Memcpy" in hook.name else 0
    if hook.kind == "wait" and "stream" in hook.arguments.split():
        return WAIT_STREAM
    return _ROLES.get(hook.name, 0)


def _place(words: list[str], name: str) -> int:
    return words.index(name) + 1 if name in words[:8] else 0

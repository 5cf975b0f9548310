"""System calls that Python lacks, and where members lie in this kernel's structs."""

from __future__ import annotations

import os
from collections.abc import Iterable

from stallscope.capture._drain import ffi, lib

__all__ = ["BTF_PATH", "PERF_FLAG_FD_CLOEXEC", "bpf", "btf_offsets", "perf_event_open"]

BTF_PATH = "/sys/kernel/btf/vmlinux"
PERF_FLAG_FD_CLOEXEC = 8


def _result(result: int, what: str) -> int:
    if result < 0:
        raise OSError(-result, f"{what}: {os.strerror(-result)}")
    return result


def bpf(command: int, attr: bytes | bytearray) -> int:
    """bpf(2): a descriptor or 0.

    Args:
        command: BPF_MAP_CREATE, ...
        attr: union bpf_attr as far as the command needs it. The kernel writes results into a bytearray; what it would
            write into bytes is lost. Buffers that it points to must live until the call returns.

    Raises:
        OSError: with the kernel's errno.
    """
    room = attr if isinstance(attr, bytearray) else bytearray(attr)
    return _result(lib.sys__bpf(command, ffi.from_buffer(room), len(room)), f"bpf({command})")


def perf_event_open(
    attr: bytes | bytearray, pid: int, cpu: int, group: int = -1, flags: int = PERF_FLAG_FD_CLOEXEC
) -> int:
    """perf_event_open(2): the descriptor. `attr` is struct perf_event_attr with its size in place. Raises OSError."""
    room = bytearray(attr)
    return _result(lib.sys__perf_event_open(ffi.from_buffer(room), pid, cpu, group, flags), "perf_event_open")


def btf_offsets(members: Iterable[tuple[str, str]], path: str = BTF_PATH) -> dict[tuple[str, str], int | None]:
    """Offsets in bytes of (struct, member), also of members of anonymous structs and unions inside.

    None for what this kernel does not have, and for bit fields. About 10 ms, 6 MB while it runs.

    Raises:
        OSError: no such file (no CONFIG_DEBUG_INFO_BTF), no right to read it, or EPROTO: it is no BTF.
    """
    opened = ffi.new("struct btf **")
    _result(lib.btf__open(os.fsencode(path), opened), path)
    try:
        found = {key: int(lib.btf__offset(opened[0], key[0].encode(), key[1].encode())) for key in members}
    finally:
        lib.btf__close(opened[0])
    return {key: offset if offset >= 0 else None for key, offset in found.items()}

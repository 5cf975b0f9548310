"""The file behind a mapping, whatever path the target shows."""

from __future__ import annotations

import os
import stat

from stallscope.capture.procfs import Mapping, clean, live_path

__all__ = ["has_breakpoint", "open_mapping"]


def open_mapping(pid: int, mapping: Mapping) -> int:
    """Descriptor of the mapped file itself, also when it was deleted or lives in another mount namespace.

    The path comes from the target: whatever it leads to is taken only if it is the regular file that is mapped.
    Raises OSError.
    """
    path = mapping.path.removesuffix(" (deleted)")
    itself = f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}"
    last: OSError | None = None
    # The mapping itself first; it needs CAP_CHECKPOINT_RESTORE or more, the path does not.
    for candidate in (itself, f"{live_path(pid)}/root{path}"):
        try:
            found = _open_if(candidate, mapping.inode)
        except OSError as error:
            last = error
            continue
        if found is not None:
            return found
    # An overlay over several file systems shows other inode numbers in maps than in stat: there the kernel's own way to
    # the mapping counts, as long as it is the same one.
    found = _open_if(itself, None) if _leads_to(itself, mapping.path) else None
    if found is None:
        raise last or FileNotFoundError(f"{clean(path)} is no longer the file that is mapped")
    return found


def _leads_to(link: str, path: str) -> bool:
    try:
        return os.readlink(link) == path
    except OSError:
        return False


def _open_if(path: str, inode: int | None) -> int | None:
    """Descriptor of a regular file, of that inode if one is given; None where it is another. Raises OSError."""
    # O_PATH first: opening what the target put there (a pipe, a device) could block or act.
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        info = os.fstat(handle)
        if inode not in (None, info.st_ino) or not stat.S_ISREG(info.st_mode):
            return None
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(handle)


def has_breakpoint(pid: int, mapping: Mapping, fd: int, offset: int) -> bool:
    """Whether the process's copy of the byte at that file offset is not the file's: a probe stands there (the kernel
    writes int3, or a call in place of a nop)."""
    address = mapping.start + offset - mapping.offset
    if not mapping.start <= address < mapping.end:
        return False
    try:
        with open(f"{live_path(pid)}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            now = memory.read(1)
    except OSError:
        return False
    return now in (b"\xcc", b"\xe8") and now != os.pread(fd, 1, offset)

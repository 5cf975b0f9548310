"""Compiles and loads the BPF programs with bcc, hands the descriptors over, and exits.

A process of its own, and a script that imports nothing of ours, for three reasons: bcc belongs to the system's Python,
not to ours; LLVM holds 125 MB that leave with this process; and bcc changes the working directory while it compiles.

Usage: bcc_helper.py SOCKET_FD SOURCE KERNEL_DIR INCLUDE_DIR,... ATTACH_TYPE [-Dname=value ...]

ATTACH_TYPE is the kernel's number that probe programs are loaded for: 48 for uprobe_multi links, 0 for perf events.

Answers with one message on the inherited SOCK_SEQPACKET socket: a JSON object, and on success the descriptors in the
order of its "programs", then its "maps". On failure it is {"error": stage, "detail": text}; stage is one of import,
source, compile, load.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import socket
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

SYSTEM_PACKAGES = "/usr/lib/python3/dist-packages"
DETAIL_BYTES = 6000  # JSON may write six characters for one, and the answer is one message
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)".*$', re.MULTILINE)
PROGRAM = re.compile(r'\bON\("([^"]+)"\)\s+int\s+(\w+)\s*\(')


class Failure(Exception):
    """A stage that did not work, with what was printed meanwhile."""

    def __init__(self, stage: str, detail: str) -> None:
        super().__init__(detail)
        self.stage = stage
        self.detail = detail


def inline(path: Path, folders: list[Path]) -> str:
    """The text with each `#include "x.h"` replaced by the file.

    Not left to clang: bcc rewrites map methods and finds programs in the main text only.

    Raises:
        Failure: an included file is in none of the folders.
    """

    def replace(match: re.Match[str]) -> str:
        for folder in folders:
            if (folder / match.group(1)).is_file():
                return inline(folder / match.group(1), folders)
        raise Failure("source", f"{path}: {match.group(1)} is in none of {', '.join(map(str, folders))}")

    return INCLUDE.sub(replace, path.read_text())


def import_bcc() -> Any:
    """bcc, from this interpreter's packages or Debian's (it needs ctypes only, so any interpreter will do)."""
    sys.path.append(SYSTEM_PACKAGES)
    try:
        import bcc
    except Exception as error:  # a broken libbcc raises OSError, AttributeError or worse
        raise Failure("import", f"{type(error).__name__}: {error}") from error
    return bcc


def compiled(bcc: Any, text: str, flags: list[str]) -> Any:
    """The compiled module, its maps created already.

    Raises:
        Failure: clang or the kernel refused.
    """
    try:
        return bcc.BPF(text=text, cflags=flags)
    except Exception as error:
        raise Failure("compile", str(error)[:200]) from error


def compiled_sections(bcc: Any, module: Any, text: str) -> dict[str, str]:
    """Section by program name, of those that the preprocessor left in."""
    library, handle = bcc.lib, ctypes.c_void_p(module.module)
    library.bpf_num_functions.restype, library.bpf_num_functions.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    name_of = library.bpf_function_name
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_size_t]
    left = {name_of(handle, i).decode() for i in range(library.bpf_num_functions(handle))}
    return {name: section for section, name in PROGRAM.findall(text) if name in left}


def load_programs(bcc: Any, module: Any, sections: dict[str, str], attach_type: int) -> dict[str, int]:
    """Descriptors by program name.

    Raises:
        Failure: the verifier refused one, or rights are missing.
    """
    loaded = {}
    # Not passed for perf events: it would be the default, and older versions of bcc don't know the argument.
    probe = {"attach_type": attach_type} if attach_type else {}
    for name, section in sections.items():
        raw = section.startswith("raw_tracepoint/")
        try:
            if raw:
                loaded[name] = module.load_func(name, bcc.BPF.RAW_TRACEPOINT).fd
            else:
                loaded[name] = module.load_func(name, bcc.BPF.KPROBE, **probe).fd
        except Exception as error:
            raise Failure("load", f"{name}: {error}") from error
    return loaded


def map_descriptors(bcc: Any, module: Any) -> dict[str, int]:
    """Descriptors by map name; not through bcc's table classes, which would rebuild every struct in ctypes."""
    library, handle = bcc.lib, ctypes.c_void_p(module.module)
    # bcc declares only some of these: undeclared, ctypes would cut the 64-bit handle to 32 bits.
    library.bpf_num_tables.restype, library.bpf_num_tables.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    name_of, fd_of = library.bpf_table_name, library.bpf_table_fd
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_size_t]
    fd_of.restype, fd_of.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p]
    names = [name_of(handle, i) for i in range(library.bpf_num_tables(handle))]
    return {name.decode(): fd_of(handle, name) for name in names}


def build(
    source: Path, folders: list[Path], attach_type: int, flags: list[str]
) -> tuple[dict[str, Any], list[int], Any]:
    """The answer, the descriptors, and the module that keeps them open.

    Raises:
        Failure: any stage.
    """
    try:
        text = inline(source, folders)
    except OSError as error:
        raise Failure("source", str(error)) from error
    bcc = import_bcc()
    module = compiled(bcc, text, flags)
    sections = compiled_sections(bcc, module, text)
    programs = load_programs(bcc, module, sections, attach_type)
    maps = map_descriptors(bcc, module)
    answer = {
        "programs": list(programs),
        "sections": sections,
        "maps": list(maps),
        "bcc": str(getattr(bcc, "__version__", "unknown")),
        "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    return answer, [*programs.values(), *maps.values()], module


def described(error: Exception, printed: IO[bytes]) -> dict[str, str]:
    """The answer for a failure: its stage, its text, and the end of what was printed."""
    printed.seek(0, os.SEEK_END)
    printed.seek(max(0, printed.tell() - DETAIL_BYTES))
    stage = error.stage if isinstance(error, Failure) else "load"
    text = str(error) if isinstance(error, Failure) else repr(error)
    return {"error": stage, "detail": f"{text}\n{printed.read().decode(errors='replace')}"}


def answer_on(channel: socket.socket, arguments: list[str]) -> int:
    """Build and send; returns the exit status."""
    source, kernel, folders, attach_type, *flags = arguments
    os.environ["BCC_KERNEL_SOURCE"] = kernel
    with tempfile.TemporaryFile() as printed:
        # clang and the verifier print from C, past sys.stderr; bcc's exception says only that it failed
        os.dup2(printed.fileno(), 2)
        try:
            reply, descriptors, _module = build(
                Path(source), [Path(p) for p in folders.split(",")], int(attach_type), flags
            )
        except Exception as error:
            channel.send(json.dumps(described(error, printed)).encode())
            return 1
        socket.send_fds(channel, [json.dumps(reply).encode()], descriptors)
    return 0


def main() -> None:
    """Leaves by os._exit: bcc's own exit handler would take a while to free what the kernel frees anyway."""
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        status = answer_on(channel, sys.argv[2:])
    os._exit(status)


if __name__ == "__main__":
    main()

"""Builds stallscope.capture._drain (cffi, API mode) from native/drain/*.c, native/inject/*.c and native/wire.h.

setup.py names `ffibuilder`. For development `python native/drain/build_drain.py` puts the module beside its users,
into agent/stallscope/capture/.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MODULE = "stallscope.capture._drain"
FLAGS = ["-std=c11", "-O2", "-fvisibility=hidden"]
PRELUDE = '#include "wire.h"\n#include "drain.h"\n#include "control.h"\n#include "inject.h"\n'
INJECT, SHIM = ROOT / "native/inject", ROOT / "native/shim"


def preprocess(header: Path, *options: str) -> str:
    """What the compiler's first pass makes of a header. Raises CalledProcessError."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, "-E", "-P", "-DWIRE_CDEF", *options, str(header)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def constants() -> str:
    """The numeric macros of wire.h; the preprocessor has used them up in the text that cdef gets."""
    names = re.findall(r"^#define (WIRE_\w+) \d+$", preprocess(ROOT / "native/wire.h", "-dM"), re.MULTILINE)
    return "".join(f"#define {name} ...\n" for name in sorted(names) if name != "WIRE_CDEF")


def make(base: Path | None) -> FFI:
    """The builder, with paths relative to `base`: setuptools wants no absolute ones. None = absolute paths."""
    ffi = FFI()
    ffi.cdef(constants() + preprocess(HERE / "drain.h", "-include", str(ROOT / "native/wire.h")))
    for header in (SHIM / "control.h", INJECT / "inject.h"):
        ffi.cdef(preprocess(header))
    files = [*sorted(HERE.glob("*.c")), *sorted(INJECT.glob("*.c"))]
    sources = [os.path.relpath(path, base) if base else str(path) for path in files]
    folders = [os.path.relpath(path, base) if base else str(path) for path in (HERE, ROOT / "native", INJECT, SHIM)]
    ffi.set_source(MODULE, PRELUDE, sources=sources, include_dirs=folders, extra_compile_args=FLAGS)
    return ffi


def build_in_place() -> Path:
    """Compiles into agent/stallscope/capture; the file it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        # Relative paths would put the object files beside the sources.
        built = Path(make(None).compile(tmpdir=folder))
        target = ROOT / "agent/stallscope/capture" / built.name
        shutil.copy(built, target.with_suffix(".new"))
        target.with_suffix(".new").replace(target)  # a running process may have the old one mapped
    return target


if __name__ == "__main__":
    sys.stdout.write(f"{build_in_place()}\n")
else:
    ffibuilder = make(ROOT)

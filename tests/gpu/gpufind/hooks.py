"""The hook table and the name matcher of the package, read by path: the package itself need not be installed."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]
# Not hooked by default, but they show how a library reaches the driver.
EXTRA = ("cuGetProcAddress", "cuGetProcAddress_v2", "cuGetExportTable", "cuStreamQuery", "cuEventQuery")
_SUFFIX = r"(_v\d+)?(_ptsz|_ptds)?"


def load_by_path(relative: str) -> ModuleType:
    """A module of the package that imports nothing of the package."""
    path = ROOT / "agent" / "stallscope" / relative
    name = f"_gpufind_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec and spec.loader
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library_of(path: str) -> str | None:
    """Return "CUDART", "CUDA", "NCCL" or None."""
    found: str | None = load_by_path("capture/libmatch.py").match(path)
    return found


def hooked_names(library: str) -> list[str]:
    """Names that are counted in a library."""
    names = [hook.name for hook in load_by_path("wire/hook_table.py").HOOKS if hook.library == library]
    return [*names, *(EXTRA if library == "CUDA" else ())]


def is_variant(name: str, pattern: str) -> bool:
    """Whether the name is one that the pattern means, whatever its version and default stream.

    >>> is_variant("cuMemcpyHtoD_v2_ptds", "cuMemcpyHtoD")
    True
    """
    return re.fullmatch(f"({pattern}){_SUFFIX}", name) is not None


def base_name(name: str) -> str:
    """The name as cuGetProcAddress takes it: without version and default stream."""
    return re.sub(f"{_SUFFIX}$", "", name)


def mapped_libraries() -> dict[str, str]:
    """CUDA libraries mapped into this process: path -> kind."""
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[5] if line.count("/") else ""
        library = library_of(path) if path.startswith("/") else None
        if library:
            found[path] = library
    return found

"""The CPythons that tests of call sites run in: the own one, and for `make test-pythons` every other one that is found.

Those of newer Debian releases stand in roots below build/roots (tests/integration/make_roots.sh) and are started by
chroot. Files have the same paths in there, so that what a program says of itself is the same.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, SIM_LIB
from run_kit import SHIM

__all__ = ["EVERY", "KNOWN", "OTHERS", "TARGET", "command", "minor"]

EVERY = os.environ.get("STALLSCOPE_ALL_PYTHONS") == "1"  # make test-pythons
TARGET = ROOT / "tests/targets/waitsites.py"
ROOTS = ROOT / "build/roots"
# The pid stays the same, and the mount goes with the process. A segment says when its process began: that takes /proc.
ENTER = 'mount -t proc proc "$0/proc" && exec chroot "$0" "$@"'
NEEDED = [*TARGET.parent.glob("*.py"), *SIM_LIB.glob("*.so*"), *(ROOT / "build/targets/border").glob("*/*.so"), SHIM]


def interpreters() -> list[str]:
    """Paths as `command` wants them."""
    found = [sys.executable]
    if EVERY:
        homes = [os.environ.get("PYENV_ROOT", ""), str(Path.home() / ".pyenv")]
        found += sorted(str(p) for home in homes if home for p in Path(home).glob("versions/3.*/bin/python3"))
        found += sorted(str(p) for p in Path("/usr/bin").glob("python3.*") if re.fullmatch(r"python3\.\d+", p.name))
        found += sorted(str(p) for p in ROOTS.glob("*/usr/bin/python3")) if os.geteuid() == 0 else []
    return list({os.path.realpath(path): path for path in found}.values())


def _root_of(python: str) -> Path | None:
    path = Path(python)
    return ROOTS / path.relative_to(ROOTS).parts[0] if path.is_relative_to(ROOTS) else None


def command(python: str) -> list[str]:
    """How it is started. What programs of the tests need is put into its root."""
    root = _root_of(python)
    if root is None:
        return [python]
    for file in NEEDED:
        there = root / file.relative_to("/")
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, there.with_suffix(".new"))
        os.replace(there.with_suffix(".new"), there)  # another program may have the old one mapped
    return ["unshare", "--mount", "sh", "-c", ENTER, str(root), f"/{Path(python).relative_to(root)}"]


def minor(python: str) -> int:
    """Of 3.x."""
    words = [*command(python), "-c", "import sys; print(sys.version_info.minor)"]
    return int(subprocess.run(words, capture_output=True, check=True).stdout)


_ALL = [(minor(path), path) for path in interpreters()]
KNOWN = [pytest.param(path, id=f"3.{number}-{path}") for number, path in _ALL if 9 <= number <= 14]
OTHERS = [pytest.param(path, id=f"3.{number}-{path}") for number, path in _ALL if number < 9 or number > 14]

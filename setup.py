"""The native parts of a wheel; everything else stands in pyproject.toml, which has no word for them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
BUILD = "build/wheel"
# What stallscope.paths looks for, from the root of the tree.
SHIPPED = ("probes", "native/wire.h")
BUILT = ("probes", "shim/libstallscope.so", "shim/libstallscope-inject.so", "sim/lib")


class BuildWithNatives(build_py):
    """Also compiles shim, BPF objects and simulated stack, and puts them beside the modules, in stallscope/_data.

    Takes make, gcc and clang. Nothing is installed: `APT=` keeps the Makefile from asking for packages.
    """

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        subprocess.run(
            ["make", "-s", "APT=", f"PYTHON={sys.executable}", f"BUILD={BUILD}", "natives"], cwd=ROOT, check=True
        )
        data = Path(self.build_lib, "stallscope", "_data")
        shutil.rmtree(data, ignore_errors=True)
        for name in SHIPPED:
            _copy(ROOT / name, data / name)
        for name in BUILT:
            _copy(ROOT / BUILD / name, data / "build" / name)
        # Nobody debugs what a wheel holds, and a sidecar copies the shim into memory.
        subprocess.run(["strip", "-g", *data.rglob("*.so*")], check=True)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy2(source, target)


setup(
    cffi_modules=["native/drain/build_drain.py:ffibuilder"],
    cmdclass={"build_py": BuildWithNatives},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)

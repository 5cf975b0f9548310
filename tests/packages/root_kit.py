"""A root file system of another Debian, as a machine that has nothing but Python; programs run there in a container."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROOTS = ROOT / "build" / "package-roots"  # others than those of test-pythons: they hold other packages
PACKAGES = "python3,python3-venv,ca-certificates"
SECONDS = 900
LIMITS = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"]


def mirror() -> str:
    """The one that this machine takes its own packages from."""
    places = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    text = "\n".join(place.read_text() for place in places if place.is_file())
    found = re.search(r"^(?:URIs:\s*|deb\s+(?:\[[^]]*\]\s+)?)(\S+)", text, re.MULTILINE)
    assert found, "no mirror in /etc/apt"
    return found.group(1)


def root_of(suite: str) -> Path:
    """Made once, and kept in build/."""
    folder = ROOTS / suite
    if not (folder / "usr/bin/python3").exists():
        folder.mkdir(parents=True, exist_ok=True)
        words = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, str(folder), mirror()]
        subprocess.run(words, check=True, capture_output=True, timeout=SECONDS)
    return folder


def python_of(root: Path) -> str:
    """E.g. "3.13"."""
    return os.readlink(root / "usr/bin/python3").removeprefix("python")


def wheelhouse(folder: Path, wheel: Path, python: str) -> Path:
    """The wheel with all that it needs, so that nothing is fetched in there."""
    place = folder / f"wheels-{python}"
    platforms = [
        "--platform",
        "manylinux_2_28_x86_64",
        "--platform",
        "manylinux2014_x86_64",
        "--platform",
        "linux_x86_64",
    ]
    words = [
        "-m",
        "pip",
        "download",
        "-q",
        "--only-binary=:all:",
        "--python-version",
        python,
        *platforms,
        "-d",
        place,
        wheel,
    ]
    done = subprocess.run([ROOT / ".venv/bin/python", *words], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    return place


class Root:
    """Runs words in a container with rights like a node daemon's, in a copy of the root that is thrown away."""

    def __init__(self, root: Path, *volumes: str) -> None:
        options = [option for volume in volumes for option in ("-v", volume)]
        self.command = ["podman", "--runtime", "runc", "run", "-i", "--rm", "--network=none", "--privileged", *LIMITS,
                        *options, "--rootfs", f"{root}:O"]  # fmt: skip

    def run(self, *words: Any, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command, *map(str, words)], capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )


__all__: Sequence[str] = ["ROOT", "ROOTS", "Root", "mirror", "python_of", "root_of", "wheelhouse"]

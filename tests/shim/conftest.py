"""Compiled once a session: stub libraries and the program that calls them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from shim_kit import HERE, Agent

FLAGS = ["gcc", "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]


def library(folder: Path, kind: str, soname: str, *more: str) -> Path:
    """One of stubs.c."""
    out = folder / soname
    shared = ["-shared", "-fPIC", f"-Wl,-soname,{soname}", f"-DLIBRARY_{kind}", *more]
    subprocess.run([*FLAGS, *shared, str(HERE / "stubs.c"), "-o", str(out)], check=True)
    return out


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the libraries, `program` among them."""
    folder = tmp_path_factory.mktemp("stubs")
    made = [
        library(folder, "cudart", "libcudart.so.12", "-DMARK=12"),
        library(folder, "cuda", "libcuda.so.1"),
        library(folder, "nccl", "libnccl.so.2"),
    ]
    library(folder, "cudart", "libcudart.so.13", "-DMARK=13")
    program = [
        str(HERE / "program.c"),
        "-o",
        str(folder / "program"),
        f"-Wl,--no-as-needed,-rpath,{folder}",
        *map(str, made),
    ]
    subprocess.run([*FLAGS, *program], check=True)
    return folder


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    """A socket that takes segments."""
    with Agent(tmp_path) as found:
        yield found

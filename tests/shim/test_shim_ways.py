"""How a call comes to the library, and to which real function it goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from shim_kit import HERE, SHIM, Agent, environment, run

PYTHON = [sys.executable, str(HERE / "ways.py")]


@pytest.fixture(scope="session")
def callers(stubs: Path) -> Path:
    """Libraries that are linked with one version of the runtime each."""
    for version in ("12", "13"):
        out = stubs / f"libcaller{version}.so"
        words = ["gcc", "-shared", "-fPIC", f"-DNAME=caller{version}", str(HERE / "callers.c"), "-o", str(out)]
        subprocess.run([*words, str(stubs / f"libcudart.so.{version}"), f"-Wl,-rpath,{stubs}"], check=True)
    return stubs


def ways(way: str, agent: Agent, folder: Path) -> Any:
    return run([*PYTHON, way, folder], environment(folder, STALLSCOPE_SHIM=f"socket:{agent.path}"))["found"]


def test_two_runtimes_in_one_process(agent: Agent, callers: Path) -> None:
    """Each caller reaches its own."""
    assert ways("two_runtimes", agent, callers) == [12, 13, 12, 13, 12, 13]
    (read,) = agent.wait_for(1)
    assert read.conserved() == {"cudaMalloc": 6}


@pytest.mark.parametrize("way", ["deepbind", "deepbind_lazy"])
def test_libraries_that_bind_deep(agent: Agent, callers: Path, way: str) -> None:
    """Their slots are set after the load."""
    assert ways(way, agent, callers) == [12, 12, 12]
    (read,) = agent.wait_for(1)
    assert read.conserved() == {"cudaMalloc": 3}


def test_addresses_from_the_driver(agent: Agent, callers: Path) -> None:
    """Exported or not, what the driver hands out is wrapped."""
    assert ways("proc_address", agent, callers) == [[0, True], [0, True], [500, False]]
    (read,) = agent.wait_for(1)
    assert read.conserved() == {"cuLaunchKernel": 2}


def test_names_that_are_not_ours(agent: Agent, callers: Path) -> None:
    """dlsym answers and complains as without us."""
    assert ways("names", agent, callers) == [True, [True, True]]
    assert not agent.read


def test_a_version_of_a_name(agent: Agent, callers: Path, tmp_path: Path) -> None:
    """dlvsym finds a wrapper of the version that was asked for."""
    versions = tmp_path / "versions"
    versions.write_text("V1 { global: *; };\n")
    words = ["gcc", "-shared", "-fPIC", "-DLIBRARY_cudart", str(HERE / "stubs.c"), f"-Wl,--version-script={versions}"]
    subprocess.run([*words, "-Wl,-soname,libcudart.so.11.0", "-o", str(callers / "versioned.so")], check=True)
    assert ways("versions", agent, callers) == [False, True]
    (read,) = agent.wait_for(1)
    assert read.conserved() == {"cudaLaunchKernel": 1}


def test_children_of_a_program_that_cleared_its_environment(agent: Agent, callers: Path) -> None:
    """They are followed, except the one that says off."""
    codes = ways("children", agent, callers)
    assert codes == [0] * 9
    reads = agent.wait_for(8)
    assert [read.conserved() for read in reads] == [{"cudaLaunchKernel": 10}] * 8


@pytest.mark.parametrize("words", [["sh", "-c", "true && ls /"], ["python3", "-c", "import subprocess"],
                                   ["gcc", "--version"]])  # fmt: skip
def test_programs_without_cuda_are_left_alone(agent: Agent, stubs: Path, words: list[str]) -> None:
    """No segment, no descriptor, no thread."""
    done = subprocess.run(words, env=environment(stubs, STALLSCOPE_SHIM=f"socket:{agent.path}"), capture_output=True)
    assert done.returncode == 0
    assert done.stderr == b""
    assert not agent.said


def test_another_library_is_preloaded_too(agent: Agent, stubs: Path, tmp_path: Path) -> None:
    """Theirs is reached through ours."""
    source = tmp_path / "other.c"
    source.write_text(
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <stdio.h>\n"
        "int cudaLaunchKernel(long a, long b, long c, long d, long e, long f, long g, long h) {\n"
        '  int (*next)(long, long, long, long, long, long, long, long) = dlsym(RTLD_NEXT, "cudaLaunchKernel");\n'
        '  fputs("through the other one\\n", stderr);\n  return next(a, b, c, d, e, f, g, h);\n}\n'
    )
    other = tmp_path / "libother.so"
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(other), "-ldl"], check=True)
    for order in (f"{SHIM}:{other}", f"{other} {SHIM}"):
        env = environment(stubs, STALLSCOPE_SHIM=f"socket:{agent.path}") | {"LD_PRELOAD": order}
        done = subprocess.run([str(stubs / "program"), "calls", "7"], env=env, capture_output=True, text=True)
        assert done.returncode == 0
        assert done.stderr == "through the other one\n" * 7
    for read in agent.wait_for(2):
        assert read.conserved() == {"cudaLaunchKernel": 7}


def test_a_path_with_blanks(agent: Agent, stubs: Path, tmp_path: Path) -> None:
    """LD_PRELOAD can't name one; a link can."""
    place = tmp_path / "a folder with blanks"
    place.mkdir()
    library = shutil.copy(SHIM, place / "libstallscope.so")
    link = tmp_path / "libstallscope.so"
    os.symlink(library, link)
    env = environment(stubs, STALLSCOPE_SHIM=f"socket:{agent.path}") | {"LD_PRELOAD": str(link)}
    assert run([stubs / "program", "calls", "3"], env) == {"cudaLaunchKernel": 3}
    agent.wait_for(1)

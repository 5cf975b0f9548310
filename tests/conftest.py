"""What several tests need: rights to use BPF, the built object, a C compiler.

Privileged tests have three states. STALLSCOPE_ROOT_TESTS unset: they run where they can, else they skip and say why.
STALLSCOPE_ROOT_TESTS=1: a skip is a failure. STALLSCOPE_ROOT_TESTS=0: they skip.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from stallscope.capture.parser_client import ParserClient

ROOT = Path(__file__).resolve().parents[1]
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what is in the background: the programs of tests would ignore it, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def unavailable(reason: str) -> None:
    """Skip the test, or fail it where everything has to run."""
    if os.environ.get("STALLSCOPE_ROOT_TESTS") == "1":
        pytest.fail(f"STALLSCOPE_ROOT_TESTS=1, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def needs_tool() -> Callable[[str], str]:
    """Gives the path of a program that the test can't do without."""

    def path_of(name: str) -> str:
        found = shutil.which(name)
        if not found:
            unavailable(f"{name} is not installed")
        return str(found)

    return path_of


@pytest.fixture(scope="session")
def _bpf_refusal() -> str:
    from stallscope.capture.rights import has_uprobe_multi, refusal

    found = refusal()
    if found:
        return found.why
    return "" if has_uprobe_multi() else "this kernel has no uprobe_multi"


@pytest.fixture
def needs_bpf(_bpf_refusal: str) -> None:
    """The test loads and links BPF programs."""
    if os.environ.get("STALLSCOPE_ROOT_TESTS") == "0":
        pytest.skip("STALLSCOPE_ROOT_TESTS=0")
    if _bpf_refusal:
        unavailable(_bpf_refusal)


@pytest.fixture
def needs_bcc() -> None:
    """The test compiles with bcc."""
    places = ("python3*/dist-packages/bcc", "python3*/site-packages/bcc")
    if not any(True for place in places for _ in Path("/usr/lib").glob(place)):
        unavailable("bcc is not installed (apt install python3-bpfcc)")


@pytest.fixture
def needs_root() -> None:
    """The test drops capabilities or changes owners."""
    if os.environ.get("STALLSCOPE_ROOT_TESTS") == "0":
        pytest.skip("STALLSCOPE_ROOT_TESTS=0")
    if os.geteuid():
        unavailable("not root")


def _compiled(clang: str, path: Path, *more: str) -> Path:
    arch = {"x86_64": "x86", "aarch64": "arm64"}[platform.machine()]
    flags = ["-O2", "-g", "-target", "bpf", "-mcpu=v3", f"-D__TARGET_ARCH_{arch}", "-DWIRE_BPF", *more, "-c"]
    folders = [f"{ROOT}/native", f"{ROOT}/probes", f"/usr/include/{platform.machine()}-linux-gnu"]
    command = [clang, *flags, *(f"-I{folder}" for folder in folders), f"{ROOT}/probes/stallscope.bpf.c"]
    subprocess.run([*command, "-o", str(path)], check=True, capture_output=True, text=True)
    return path


@pytest.fixture(scope="session")
def bpf_object(tmp_path_factory: pytest.TempPathFactory, needs_tool: Callable[[str], str]) -> Path:
    """The programs, compiled from this tree's source: the one in build/ may be older."""
    return _compiled(needs_tool("clang"), tmp_path_factory.mktemp("bpf") / "stallscope.bpf.o")


@pytest.fixture(scope="session")
def no_cookies_object(tmp_path_factory: pytest.TempPathFactory, needs_tool: Callable[[str], str]) -> Path:
    """The same for kernels without link cookies."""
    path = tmp_path_factory.mktemp("bpf") / "stallscope.nocookies.bpf.o"
    return _compiled(needs_tool("clang"), path, "-DNO_COOKIES")


WHEELS = ROOT / "build" / "wheels"


def wheel_library(package: str, version: str, member: str) -> Path:
    """A library from its wheel on PyPI, downloaded once into build/wheels; the test is skipped where that fails."""
    place = WHEELS / f"{package}-{version}"
    found = place / member
    if found.exists():
        return found
    place.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(place)]
    done = subprocess.run([*command, f"{package}=={version}"], capture_output=True, text=True)
    if done.returncode:
        unavailable(f"{package} {version} can't be downloaded: {done.stderr.strip()[-200:]}")
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(member, place)
    wheel.unlink()
    return found


@pytest.fixture(scope="session")
def real_cudart() -> Path:
    """NVIDIA's runtime 12.9."""
    return wheel_library("nvidia-cuda-runtime-cu12", "12.9.79", "nvidia/cuda_runtime/lib/libcudart.so.12")


@pytest.fixture(scope="session")
def real_nccl() -> Path:
    """NVIDIA's NCCL 2.27."""
    return wheel_library("nvidia-nccl-cu12", "2.27.5", "nvidia/nccl/lib/libnccl.so.2")


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with stub libraries of CUDA and NCCL, and `program` that calls them (tests/shim)."""
    from shim_kit import build_stubs

    folder = tmp_path_factory.mktemp("stubs")
    build_stubs(folder)
    return folder


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Any]:
    """A socket that takes segments (tests/shim)."""
    from shim_kit import Agent

    with Agent(tmp_path) as found:
        yield found


@pytest.fixture(autouse=True)
def _faults_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a user's hands a fault of our own costs a section; here it fails the test."""
    from stallscope.aggregate.faults import Faults

    monkeypatch.setattr(Faults, "strict", True)


@pytest.fixture(scope="module")
def parser() -> Iterator[ParserClient]:
    """A parser process, as capture has one."""
    from stallscope.capture.parser_client import ParserClient

    client = ParserClient()
    client.start()
    yield client
    client.close()

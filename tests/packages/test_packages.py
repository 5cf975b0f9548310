"""The wheel where nothing else is: Debian 12 and 13, a clean environment, no compiler, no bcc. `make test-packages`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import unavailable
from root_kit import LIMITS, ROOT, Root, python_of, root_of, wheelhouse

MOST_NS = 500_000_000
TOOLS = ("debootstrap", "podman", "runc", "conmon")


@pytest.fixture(scope="session")
def roots() -> None:
    """Containers with roots of their own can be had."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing or os.geteuid() != 0:
        unavailable(f"needs root and {', '.join(missing or TOOLS)}")


@pytest.fixture(scope="session")
def wheel() -> Path:
    """What `make dist` made."""
    (found,) = (ROOT / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="session", params=["bookworm", "trixie"])
def installed(
    request: pytest.FixtureRequest, roots: None, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Root:
    """The wheel in an environment of its own in /venv."""
    root = root_of(request.param)
    wheels = wheelhouse(tmp_path_factory.mktemp("wheels"), wheel, python_of(root))
    venv = tmp_path_factory.mktemp("venv")
    venv.chmod(0o755)  # also others than root run it
    made = Root(root, f"{wheels}:/wheels:ro", f"{venv}:/venv", f"{ROOT / 'tests/packages'}:/kit:ro")
    line = "python3 -m venv /venv && /venv/bin/pip install -q --no-index --find-links /wheels stallscope"
    done = made.run("/bin/sh", "-c", line)
    assert done.returncode == 0, done.stderr[-2000:]
    return made


def test_nothing_else_is_there(installed: Root) -> None:
    """Neither compiler nor bcc, so that what works does so by the wheel alone."""
    line = "! command -v gcc && ! command -v clang && ! python3 -c 'import bcc' 2>/dev/null && ls /venv/share/man/man1"
    done = installed.run("/bin/sh", "-c", line)
    assert done.returncode == 0 and done.stdout == "stallscope.1\n", done.stderr


def test_doctor(installed: Root) -> None:
    done = installed.run("/venv/bin/stallscope", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["attach"] == "possible"
    states = {check["name"]: check["state"] for check in answer["checks"]}
    assert "ok" in states.values(), states


def test_demo(installed: Root) -> None:
    """The simulated job, whose blocking rank is named."""
    done = installed.run("/venv/bin/stallscope", "demo", "--ranks", "4", "--fault", "never", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [incident["class"] for incident in report["incidents"]] == ["NOT_ARRIVED"]
    assert report["capture"]["lost"] == 0


def test_run(installed: Root) -> None:
    """The shim of the wheel in a program of that Debian."""
    code = "import ctypes; cuda = ctypes.CDLL('libcudart.so.12'); [cuda.cudaDeviceSynchronize() for _ in range(7)]"
    stack = '"$(/venv/bin/python -c "from stallscope.paths import SIM_LIB; print(SIM_LIB)")"'
    line = f'export LD_LIBRARY_PATH={stack} STALLSCOPE_SIM_LIB={stack}; exec /venv/bin/stallscope run --json -- python3 -c "$0"'
    done = installed.run("/bin/sh", "-c", line, code)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {call["api"]: call["count"] for call in report["calls"]}["cudaDeviceSynchronize"] == 7


def test_attach_by_the_object(installed: Root) -> None:
    """Without bcc the prebuilt object is used: from its load to the first event half a second at most."""
    answers = []
    for _ in range(3):  # the machine may be busy
        done = installed.run("/venv/bin/python", "/kit/load_to_event.py")
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout.splitlines()[-1]))
        if answers[-1]["load_to_event_ns"] <= MOST_NS:
            break
    print(answers)
    assert all((answer["code"], answer["backend"]) == (0, "object") for answer in answers)
    assert answers[-1]["events"] > 100
    assert min(answer["load_to_event_ns"] for answer in answers) <= MOST_NS


def test_sidecar_in_the_slim_root(installed: Root) -> None:
    """An unprivileged user of that Debian: install, watch, report of nothing."""
    line = (
        "mkdir /tmp/shim /tmp/segments && /venv/bin/stallscope sidecar --install /tmp/shim --dir /tmp/segments && "
        "LD_PRELOAD=/tmp/shim/libstallscope.so /bin/true && "
        "(timeout -s TERM 3 /venv/bin/stallscope sidecar --dir /tmp/segments --json; echo $? >&2)"
    )
    done = installed.run("setpriv", "--reuid=65532", "--regid=65532", "--clear-groups", "/bin/sh", "-c", line)
    assert "STALLSCOPE_SHIM=dir:/tmp/segments" in done.stdout
    assert "nothing captured" in done.stderr and "LD_PRELOAD=DIR/libstallscope.so" in done.stderr, done.stderr


def test_from_the_sdist(tmp_path: Path) -> None:
    """On this machine, with its compilers: pip builds and installs it, and the result finds its parts."""
    (source,) = (ROOT / "dist").glob("*.tar.gz")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    done = subprocess.run([venv / "bin/pip", "install", "-q", source], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    code = "from stallscope.paths import SHIM, BPF_OBJECT, SIM_LIB; print(SHIM.is_file(), BPF_OBJECT.is_file(), SIM_LIB.is_dir(), SHIM)"
    words = subprocess.run(
        [venv / "bin/python", "-c", code], capture_output=True, text=True, cwd=tmp_path
    ).stdout.split()
    assert words[:3] == ["True"] * 3 and str(venv) in words[3]


IMAGE, BASE = "localhost/stallscope-tested", "localhost/stallscope-tested-base"


@pytest.fixture
def image(roots: None, wheel: Path, tmp_path: Path) -> Iterator[str]:
    """deploy/container/Containerfile, on the root that was made here, with the wheels that were fetched here."""
    root = root_of("trixie")
    wheels = wheelhouse(tmp_path, wheel, python_of(root))
    (tmp_path / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    mounts = ["-v", f"{wheels}:/wheels:ro", "-v", f"{tmp_path / 'pip.conf'}:/etc/pip.conf:ro"]
    file = ["-f", ROOT / "deploy/container/Containerfile", "-t", IMAGE, ROOT]
    try:
        with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as tar:
            subprocess.run(["podman", "import", "-", BASE], stdin=tar.stdout, check=True, capture_output=True)
        words = [
            "podman",
            "--runtime",
            "runc",
            "build",
            "--isolation=chroot",
            "--network=host",
            f"--build-arg=BASE={BASE}",
        ]
        done = subprocess.run([*words, *mounts, *file], capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-2000:]
        yield IMAGE
    finally:
        subprocess.run(["podman", "rmi", "-f", IMAGE, BASE], capture_output=True)


def test_the_container_image(image: str) -> None:
    """As the manifests run it: the sidecar without any right, doctor with those of the node daemon's pod."""
    run = ["podman", "--runtime", "runc", "run", "--rm", "--network=none", *LIMITS]
    bare = [*run, "--read-only", "--cap-drop=ALL", "--tmpfs=/shared:mode=1777", image]
    said = subprocess.run([*bare, "sidecar", "--install", "/shared"], capture_output=True, text=True, timeout=120)
    assert said.stdout.splitlines() == [
        "LD_PRELOAD=/shared/libstallscope.so", "STALLSCOPE_SHIM=dir:/stallscope/segments",
    ], said.stderr  # fmt: skip
    words = [*run, "--privileged", "--user=0", image, "doctor", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and json.loads(done.stdout)["attach"] == "possible", done.stderr

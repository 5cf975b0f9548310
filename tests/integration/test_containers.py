"""Containers by podman and runc: one overlay layer under several of them, and the tracer inside one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import unavailable
from daemon_kit import Daemon, until
from harness import ROOT, SIM_LIB, TARGETS, Program, Tracer, balance
from test_attach_counts import hooked, own

pytestmark = pytest.mark.usefixtures("needs_bpf", "needs_root")
PROGRAM = TARGETS / "million"
WORDS = [PROGRAM, "2000", "50", "300"]


@pytest.fixture(scope="module")
def podman(needs_tool: Callable[[str], str]) -> list[str]:
    """The command, up to its options."""
    for tool in ("podman", "runc", "conmon"):
        needs_tool(tool)
    limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"]
    command = ["podman", "--runtime", "runc", "run", "-i", "--rm", "--network=none", *limits]
    done = subprocess.run([*command, "--rootfs", "/:O", "/bin/true"], capture_output=True, text=True, timeout=120)
    if done.returncode:
        unavailable(f"podman can't start a container here: {done.stderr.strip()[-300:]}")
    return command


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system with the program and what it loads, at the paths they have here."""
    root = tmp_path_factory.mktemp("layer")
    linked = subprocess.run(["ldd", PROGRAM], capture_output=True, text=True, check=True).stdout
    libraries = [Path(word) for word in linked.split() if word.startswith("/")]
    for file in {PROGRAM, *libraries, SIM_LIB / "libcuda.so.1", SIM_LIB / "libcudart.so.12"}:
        place = root / str(file).lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file.resolve(), place)
    for name in ("proc", "sys", "dev", "tmp", "etc", "run"):
        (root / name).mkdir(exist_ok=True)
    return root


class Container(Program):
    """The program in a container of its own."""

    def __init__(self, podman: list[str], layer: Path, files: Path) -> None:
        files.mkdir()
        self.pid_file, self.id_file = files / "pid", files / "id"
        options = ["--pidfile", self.pid_file, "--cidfile", self.id_file, "--rootfs", f"{layer}:O"]
        super().__init__([*podman, *options, *WORDS], sim=False)

    def started(self) -> int:
        """The program's pid here."""
        self.wait_for("ready", 120)
        end = time.monotonic() + 10
        while not self.pid_file.exists() and time.monotonic() < end:
            time.sleep(0.01)
        return int(self.pid_file.read_text())


@pytest.fixture
def containers(podman: list[str], layer: Path, tmp_path: Path) -> Iterator[list[Container]]:
    """Three of one layer, ready."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(Container(podman, layer, tmp_path / str(n))) for n in range(3)]
        yield found
        for container in found:  # podman's own process is not the program
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(container.pid_file.read_text()), 9)


@pytest.mark.parametrize("limit", ["8", "1"])
def test_two_containers_of_one_layer(containers: list[Container], limit: str) -> None:
    """Each call once and in the right process, by filtered links and by unfiltered ones; the third is a stranger."""
    pids = [container.started() for container in containers]
    with Tracer(pids[:2], "--links-per-file", limit, "--sample", "1/10").attached() as tracer:
        for container in containers:
            container.say()
        truths = [container.truth() for container in containers]
        report = tracer.report()
    for container, pid, truth in zip(containers[:2], pids, truths, strict=False):
        assert own(report, pid) == hooked(truth["calls"])
        (process,) = [p for p in report["processes"] if p["pid"] == pid]
        assert process["ns_pid"] == truth["pid"] == 1
        assert process["container_id"] == container.id_file.read_text().strip()
    assert {process["pid"] for process in report["processes"] if process["traced"]} == set(pids[:2])
    assert balance(report)[0] == balance(report)[1]


def test_tracer_in_a_privileged_container(podman: list[str]) -> None:
    """This machine's files as the container's; pids as the container numbers them."""
    words: list[Any] = [*podman, "--privileged", "-e", "STALLSCOPE_SIM_DRIVER=inside", "--rootfs", "/:O"]
    words += [ROOT / ".venv/bin/python", ROOT / "tests/targets/inside.py", SIM_LIB / "libcudart.so.12", "7"]
    done = subprocess.run(
        [str(w) for w in words], capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    truth, report = json.loads(done.stdout)
    assert own(report) == hooked(truth["calls"])
    assert truth["calls"]["cudaLaunchKernel"] == 7
    (process,) = [p for p in report["processes"] if p["traced"]]
    assert process["pid"] == truth["pid"] < 100


@pytest.mark.parametrize("inside", [False, True], ids=["on the host", "in a privileged container"])
def test_a_daemon_sees_two_containers(containers: list[Container], podman: list[str], inside: bool) -> None:
    """Two containers of one layer, allowed by their ids: each call once, the right ids; the third is kept out."""
    pids = [container.started() for container in containers]
    ids = [container.id_file.read_text().strip() for container in containers]
    with tempfile.TemporaryDirectory(prefix="stallscope-daemon-") as name:
        folder = Path(name)
        with Daemon(folder, 0) as daemon:
            daemon.write("", rules="".join(f'[[allow]]\ncontainer = "{one[:12]}"\n' for one in ids[:2]))
            around = [*podman, "--privileged", "--pid=host", "-v", f"{folder}:{folder}", "--rootfs", "/:O"]
            daemon.start("all", around if inside else [])
            daemon.wait_for("watching this node", deadline_s=120)
            until(lambda: len(daemon.ask("status")["processes"]) == 2, "two processes")
            for container in containers:
                container.say()
            truths = [container.truth() for container in containers]
            until(lambda: daemon.ask("status")["ended"] >= 2, "their ends")
            report = until(lambda: _whole(daemon.ask("report"), pids[:2]), "their last counters")
            assert daemon.ask("status")["denied"]["no allow rule is met"] >= 1
            assert daemon.ctl("stop").returncode == 0
            daemon.parts["all"].wait(60)
    for pid, one, truth in zip(pids[:2], ids, truths, strict=False):
        assert own(report, pid) == hooked(truth["calls"])
        (process,) = [p for p in report["processes"] if p["pid"] == pid]
        assert (process["container_id"], process["ns_pid"]) == (one, 1)
    assert {process["pid"] for process in report["processes"] if process["traced"]} == set(pids[:2])


def _whole(report: dict[str, Any], pids: list[int]) -> dict[str, Any] | None:
    """Once all of these have ended."""
    ended = {p["pid"] for p in report["processes"] if p["exit"] is not None}
    return report if ended >= set(pids) else None

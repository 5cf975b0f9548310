"""A trainer's container and an unprivileged sidecar's that share a tmpfs, as in a pod; and a tracer of two containers."""

from __future__ import annotations

import json
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import BACKEND, ROOT, STALLSCOPE, balance
from sidecar_kit import GROUP, HERE, Process, Sidecar, in_container, installed, job, preloaded, variables, volume
from test_attach_counts import hooked, own
from test_containers import Container, layer, podman  # noqa: F401 - fixtures

pytestmark = pytest.mark.usefixtures("needs_root")
ANYBODY = f"123456:{GROUP}"  # a user that the machine does not know


@pytest.fixture
def folder() -> Iterator[Path]:
    with volume() as found:
        yield found


@contextmanager
def named(podman: Sequence[str]) -> Iterator[tuple[list[str], str]]:  # noqa: F811
    """The command with a name, by which the container is taken away at the end, whatever became of it."""
    name = f"stallscope-{uuid.uuid4().hex[:12]}"
    try:
        yield [*podman, f"--name={name}"], name
    finally:
        subprocess.run(["podman", "rm", "-f", "-t", "0", name], capture_output=True, timeout=60)


def trainer(command: Sequence[str], folder: Path, library: Path, *options: Any, words: Sequence[Any]) -> Process:
    """In a container of a user of its own, with what `sidecar --install` says in its environment."""
    said = installed(library)
    env = preloaded(HERE, LD_PRELOAD="/shim/libstallscope.so", STALLSCOPE_SIM_DEVICES="4", TMPDIR="/dev/shm")
    assert said["STALLSCOPE_SHIM"] == env["STALLSCOPE_SHIM"]
    mount = ["-v", f"{library}:/shim:ro", *variables(env), *options]
    return Process([*in_container(command, folder, *mount, user=f"777:{GROUP}"), *words])


def sidecar(command: Sequence[str], folder: Path, *options: Any, more: Sequence[Any] = (), user: str = ANYBODY) -> Any:
    before = [*in_container(command, folder, *more, user=user), *STALLSCOPE]
    return Sidecar(HERE, "--uid", "777", *options, before=before)


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so() and time.monotonic() < end:
        time.sleep(0.05)
    assert is_so()


@pytest.mark.parametrize("shares_pids", [False, True])
def test_it_names_the_culprit(podman: list[str], folder: Path, tmp_path: Path, shares_pids: bool) -> None:  # noqa: F811
    """No capability, a read-only root, late: as another user without its pids, and as its own user with them."""
    fault = job("--ranks=4", "--duration=20", "--fault=never:rank=2,step=20")
    with ExitStack() as stack:
        command, name = stack.enter_context(named(podman))
        program = stack.enter_context(trainer(command, folder, tmp_path / "shim", words=fault))
        wait_until(lambda: len(list(folder.glob("*.seg"))) == 4)
        beside, other = stack.enter_context(named(podman))
        more = [f"--pid=container:{name}"] if shares_pids else []
        user = f"777:{GROUP}" if shares_pids else ANYBODY
        watcher = stack.enter_context(sidecar(beside, folder, more=more, user=user)).watching()
        line = watcher.errors.wait_for("incident 1", 60)
        subprocess.run(["podman", "kill", "-s", "TERM", other], check=True, capture_output=True)
        report = watcher.report()
        assert program.process.poll() is None
    assert "NOT_ARRIVED" in line and "rank 2 (pid " in line
    (incident,) = report["incidents"]
    (culprit,) = incident["culprits"]
    assert (culprit["global_rank"], len(incident["victims"])) == (2, 3)
    processes = {process["global_rank"]: process for process in report["processes"] if process["traced"]}
    assert processes.keys() >= {0, 1, 2, 3}
    assert culprit["pid"] == processes[2]["pid"] == processes[2]["ns_pid"]
    assert bool(culprit["stack"]) == bool(culprit["waiting_in"]) == shares_pids
    hidden = [note for note in report["capture"]["notes"] if "its own pid namespace" in note]
    assert len(hidden) == (0 if shares_pids else 1)
    assert report["capture"]["lost"] == 0 and balance(report)[0] == balance(report)[1]


def test_two_trainers_and_a_restart(podman: list[str], folder: Path, tmp_path: Path) -> None:  # noqa: F811
    """Two containers, each with a pid 1, one of them twice: three processes, each with its own calls."""
    words = [ROOT / "build/targets/million", "500", "20", "300"]
    truths = []
    with ExitStack() as stack:
        beside, other = stack.enter_context(named(podman))
        watcher = stack.enter_context(sidecar(beside, folder)).watching()
        for ranks in ("01", "0"):
            with ExitStack() as those:
                programs = []
                for rank in ranks:
                    command, _ = those.enter_context(named(podman))
                    option = variables({"RANK": rank})
                    one = trainer(command, folder, tmp_path / "shim", *option, words=words)
                    programs.append(those.enter_context(one))
                for program in programs:
                    program.lines.wait_for("ready")
                for program in programs:
                    program.say()
                truths += [program.truth() for program in programs]
        wait_until(lambda: not list(folder.glob("*.seg")))
        subprocess.run(["podman", "kill", "-s", "TERM", other], check=True, capture_output=True)
        report = watcher.report()
    processes = [process for process in report["processes"] if process["traced"]]
    assert [truth["pid"] for truth in truths] == [process["pid"] for process in processes] == [1, 1, 1]
    assert sorted(process["global_rank"] for process in processes) == [0, 0, 1]
    expected = hooked(truths[0]["calls"]) + hooked(truths[0]["before_calls"])
    assert all(truth["calls"] == truths[0]["calls"] for truth in truths)
    for process in processes:
        assert own({"calls": [call for call in report["calls"] if call["proc"] == process["proc"]]}) == expected


@pytest.mark.usefixtures("needs_bpf")
def test_a_tracer_in_a_container_sees_two_others(
    podman: list[str], layer: Path, tmp_path: Path, needs_tool: Callable[[str], str]  # noqa: F811
) -> None:  # fmt: skip
    """As a node daemon's pod: privileged, with the host's pids. Two trainers of one layer: each call once, right ids."""
    with ExitStack() as stack:
        trainers = [stack.enter_context(Container(podman, layer, tmp_path / str(n))) for n in range(2)]
        pids = [container.started() for container in trainers]
        for pid in pids:
            stack.callback(_end, pid)
        command, _ = stack.enter_context(named(podman))
        words = [*command, "--privileged", "--pid=host", "--rootfs", "/:O", *STALLSCOPE]
        words += ["attach", *pids, "--json", "--sample", "1/10", *BACKEND]
        tracer = stack.enter_context(Process(words))
        tracer.errors.wait_for("attached to PID")
        for container in trainers:
            container.say()
        truths = [container.truth() for container in trainers]
        report = json.loads(tracer.lines.rest())
    for container, pid, truth in zip(trainers, pids, truths, strict=True):
        assert own(report, pid) == hooked(truth["calls"])
        (process,) = [p for p in report["processes"] if p["pid"] == pid and p["traced"]]
        assert (process["ns_pid"], process["container_id"]) == (1, container.id_file.read_text().strip())
    assert balance(report)[0] == balance(report)[1]


def _end(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        return


CAPABILITIES = ("BPF", "PERFMON", "SYS_PTRACE", "DAC_READ_SEARCH", "SETUID", "SETGID")


@pytest.mark.usefixtures("needs_bpf")
def test_probes_from_a_container_with_the_trainers_pids(podman: list[str]) -> None:  # noqa: F811
    """Where a sidecar may have BPF: `attach` in the trainer's pid namespace, with the daemon's capabilities."""
    with ExitStack() as stack:
        command, name = stack.enter_context(named(podman))
        stack_of = preloaded(HERE)
        env = variables({key: stack_of[key] for key in ("LD_LIBRARY_PATH", "STALLSCOPE_SIM_LIB")})
        # As in a pod, whose first process is nobody's: with a trainer as pid 1 the namespace would end with it.
        line = 'exec 3<&0; "$@" <&3; read end <&3'
        million = [ROOT / "build/targets/million", "500", "20", "300"]
        words = [*command, "--cap-drop=ALL", *env, "--rootfs", "/:O", "/bin/sh", "-c", line, "sh", *million]
        program = stack.enter_context(Process(words))
        program.lines.wait_for("ready")
        beside, other = stack.enter_context(named(podman))
        rights = ["--cap-drop=ALL", *(f"--cap-add={one}" for one in CAPABILITIES), "--security-opt=seccomp=unconfined"]
        words = [*beside, *rights, f"--pid=container:{name}", "--rootfs", "/:O", *STALLSCOPE]
        tracer = stack.enter_context(Process([*words, "attach", "1", "--json", "--sample", "1/10", *BACKEND]))
        tracer.errors.wait_for("attached to PID 1 (sh)")
        program.say()
        truth = json.loads(program.lines.wait_for("{"))
        subprocess.run(["podman", "kill", "-s", "INT", other], check=True, capture_output=True)
        report = json.loads(tracer.lines.rest())
        program.say("end")
        assert program.process.wait(60) == 0
    assert own(report, truth["pid"]) == hooked(truth["calls"])
    assert balance(report)[0] == balance(report)[1]

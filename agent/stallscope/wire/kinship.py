"""What names and command lines say of a process's part in a job."""

from __future__ import annotations

import itertools
from typing import NamedTuple, Protocol

__all__ = [
    "Named",
    "Person",
    "is_forkserver",
    "is_launcher",
    "is_service",
    "is_shell",
    "is_spawned",
    "is_system",
    "looks_python",
]

SHELLS = frozenset(("sh", "bash", "dash", "zsh", "ksh", "ash", "fish", "busybox"))
LAUNCHERS = frozenset((
    "torchrun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "prte", "prted", "orted", "hydra_pmi_proxy",
    "srun", "sbatch", "slurmstepd", "deepspeed", "accelerate", "horovodrun", "composer", "fairseq-hydra-train", "ray",
))  # fmt: skip
MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.", "deepspeed.launcher.")
# What starts jobs of anybody's: not part of one.
SYSTEM = frozenset((
    "systemd", "init", "sshd", "sshd-session", "login", "su", "sudo", "cron", "crond", "tmux", "tmux: server", "screen",
    "SCREEN", "conmon", "containerd", "dockerd", "docker", "podman", "runc", "crun", "kubelet", "slurmd", "tini",
    "dumb-init", "catatonit", "supervisord", "docker-init",
))  # fmt: skip
DATA_WORKER = "pt_data_worker"
MOST_WORDS = 64


class Named(Protocol):
    """What is looked at."""

    @property
    def pid(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def cmdline(self) -> list[str]: ...


class Person(NamedTuple):
    """A process of which no more is known."""

    pid: int
    name: str
    cmdline: list[str]


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _program(process: Named) -> str:
    """What runs: of an interpreter's command line the script, where one is named; a login shell's "-bash" is bash."""
    words = process.cmdline[:MOST_WORDS]
    first = _base(words[0]).removeprefix("-") if words else process.name
    if looks_python(process):
        script = next((word for word in words[1:] if not word.startswith("-")), "")
        return _base(script) or first
    return first


def looks_python(process: Named) -> bool:
    """Whether it is a Python interpreter, whatever it calls itself by now."""
    first = _base(process.cmdline[0]) if process.cmdline else ""
    return process.name.startswith(("python", "pt_")) or first.startswith("python")


def is_shell(process: Named) -> bool:
    """A shell, interactive or with a script."""
    return process.name in SHELLS or _program(process) in SHELLS


def is_launcher(process: Named) -> bool:
    """A program whose trade it is to start ranks."""
    words = process.cmdline[:MOST_WORDS]
    if process.name in LAUNCHERS or _program(process) in LAUNCHERS:
        return True
    return any(word == "-m" and module.startswith(MODULES) for word, module in itertools.pairwise(words))


def is_system(process: Named) -> bool:
    """What runs programs of all kinds: an init, a container's keeper, a terminal's server."""
    if process.name in SYSTEM or process.name.startswith("containerd-shim"):
        return True
    # A container's first process may be the job's own.
    return process.pid == 1 and not (is_launcher(process) or is_shell(process) or looks_python(process))


def is_spawned(process: Named) -> bool:
    """A worker by multiprocessing's "spawn", or one that PyTorch's loader named."""
    return process.name.startswith(DATA_WORKER) or "--multiprocessing-fork" in process.cmdline[:MOST_WORDS]


def _says(process: Named, *texts: str) -> bool:
    return any(text in word for word in process.cmdline[:MOST_WORDS] for text in texts)


def is_forkserver(process: Named) -> bool:
    """The server of multiprocessing's "forkserver", or a worker that it forked: both have its command line."""
    return _says(process, "from multiprocessing.forkserver import main")


def is_service(process: Named) -> bool:
    """A process that Python or PyTorch starts for its own needs."""
    return _says(process, "from multiprocessing.resource_tracker", "semaphore_tracker import", "compile_worker")

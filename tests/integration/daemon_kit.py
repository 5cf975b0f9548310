"""A daemon as its units start it: three users, exact capabilities, sockets in a folder of the test's own.

Every daemon of a test traces one user's processes only: others run beside it on this machine, and are none of its.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from harness import ROOT, SIM_LIB, STALLSCOPE, Lines

FOUR = ("bpf", "perfmon", "sys_ptrace", "dac_read_search")
CAPTURE, PARSER, AGGREGATE = 34567, 34568, 34569
_users = itertools.count(40000 + os.getpid() % 10000)
DEADLINE_S = 60.0


def fresh_user() -> int:
    """A user id that nobody else here has."""
    return next(_users)


def as_user(uid: int, capabilities: Sequence[str] = ()) -> list[str]:
    """The words that start a program as that user, with these capabilities and no way to others."""
    held = ",".join(["-all", *(f"+{name}" for name in capabilities)])
    sets = [f"--inh-caps={held}", f"--ambient-caps={held}", f"--bounding-set={held}"]
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *sets, "--no-new-privs"]


def until(true: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Its first value that counts as true."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if found := true():
            return found
        time.sleep(0.05)
    raise AssertionError(f"no {what} within {deadline_s} s")


class Daemon:
    """`stallscope daemon` in a folder.

    Args:
        user: whose processes are traced.
        settings: further lines of the configuration.
        words: how stallscope is started.
    """

    def __init__(self, folder: Path, user: int, settings: str = "", words: Sequence[str] = STALLSCOPE) -> None:
        self.folder, self.user, self.words = folder, user, words
        folder.chmod(0o755)
        self.run_folder = folder / "run"
        self.run_folder.mkdir()
        self.run_folder.chmod(0o755)
        self.config = folder / "daemon.toml"
        self.write(settings)
        self.parts: dict[str, subprocess.Popen[str]] = {}
        self.lines: dict[str, Lines] = {}

    def write(self, settings: str, rules: str | None = None) -> None:
        """The configuration."""
        own = rules if rules is not None else f'[[allow]]\nuser = "{self.user}"\n'
        sockets = f'[sockets]\nfolder = "{self.run_folder}"\ncapture_user = "{CAPTURE}"\n'
        metrics = "" if "[metrics]" in settings else "[metrics]\nport = 0\n"
        capture = "" if "[capture]" in settings else '[capture]\nbackend = "object"\n'
        self.config.write_text(f"{capture}{sockets}{metrics}{settings}\n{own}")

    def start(self, role: str, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
        """One process; "all" is the whole of it."""
        command = [*prefix, *self.words, "daemon", "--config", str(self.config), "--role", role]
        env = dict(os.environ, PYTHONPATH=str(ROOT / "agent"))
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env
        )
        self.parts[role], self.lines[role] = process, Lines(process.stderr)
        return process

    def start_units(self, capabilities: Sequence[str] = FOUR) -> None:
        """As three units, in no order; capture with these capabilities."""
        for name, uid in (("capture", CAPTURE), ("parser", PARSER), ("aggregate", AGGREGATE)):
            place = self.run_folder / f"stallscope-{name}"
            place.mkdir()
            os.chown(place, uid, uid)
        self.start("capture", as_user(CAPTURE, capabilities))
        self.start("parser", as_user(PARSER))
        self.start("aggregate", as_user(AGGREGATE))
        self.lines["aggregate"].wait_for("ready for streams")

    def wait_for(self, start: str, role: str = "all", deadline_s: float = DEADLINE_S) -> str:
        """The next line of a part that begins so."""
        return self.lines[role].wait_for(start, deadline_s)

    def ctl(self, *words: str, user: int | None = None) -> subprocess.CompletedProcess[str]:
        """`stallscope ctl`."""
        prefix = [] if user is None else as_user(user)
        command = [*prefix, *STALLSCOPE, "ctl", "--config", str(self.config), *words]
        env = dict(os.environ, PYTHONPATH=str(ROOT / "agent"))
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=DEADLINE_S)

    def ask(self, *words: str) -> Any:
        """Its answer in JSON."""
        done = self.ctl(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def stop(self, role: str = "all") -> float:
        """SIGTERM; seconds until it has ended."""
        begin = time.monotonic()
        self.parts[role].send_signal(signal.SIGTERM)
        self.parts[role].wait(DEADLINE_S)
        return time.monotonic() - begin

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.parts.values():
            process.terminate()
        for process in self.parts.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def job(folder: Path, user: int, *options: str, library: Path = SIM_LIB) -> Iterator[subprocess.Popen[bytes]]:
    """The simulated job, of that user; its truth is in `folder`/truth."""
    place = folder / f"job-{user}"
    place.mkdir()
    os.chown(place, user, user)
    command = [*as_user(user), sys.executable, "-m", "stallscope.sim.job", f"--truth={place / 'truth'}", *options]
    env = {
        "PATH": os.defpath,
        "PYTHONPATH": str(ROOT / "agent"),
        "TMPDIR": str(place),
        "STALLSCOPE_SIM_LIB": str(library),
    }
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

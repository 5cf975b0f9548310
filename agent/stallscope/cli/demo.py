"""`stallscope demo`: a simulated job, traced from its first call."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from typing import Any

from stallscope.capture.forward import StandIn
from stallscope.cli import attach
from stallscope.cli.attach import Attach, seconds
from stallscope.cli.caller import caller
from stallscope.errors import ArgumentProblem, StallscopeError
from stallscope.paths import SIM_LIB

__all__ = ["add_parser", "run"]

MAX_RANKS = 16
END_S = 5.0
LOAD_S = 0.5  # between a rank's loading of CUDA and its first call, as frameworks have it


def ranks(text: str) -> int:
    """Number of ranks. Raises argparse.ArgumentTypeError."""
    if not text.isdigit() or not 1 <= int(text) <= MAX_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r}: give 1 to {MAX_RANKS} ranks")
    return int(text)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("demo", help="a simulated job, traced", allow_abbrev=False)
    parser.add_argument("--ranks", type=ranks, default=4, metavar="N", help="processes of the job (default 4)")
    parser.add_argument("--fault", metavar="KIND", help="a fault to inject: KIND[:rank=R,step=S,...]")
    parser.add_argument(
        "--ahead", type=int, default=0, metavar="N", help="let hosts run N operations ahead (default 0)"
    )
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--truth", metavar="FILE", help="let the job write what really happened to FILE")
    parser.add_argument("--duration", type=seconds, default=8.0, metavar="S", help="length of the job (default 8)")
    parser.add_argument("--json", action="store_true", help="report as JSON on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start the job, attach to it, let it go, report. Returns attach's exit code; raises StallscopeError."""
    if not (SIM_LIB / "libcudart.so.12").exists():
        raise StallscopeError(
            "cannot start the demo", why=f"the simulated CUDA stack is not built ({SIM_LIB})", hint="run `make build`"
        )
    command = _job_command(args)
    print(f"demo: {args.ranks} simulated ranks for {args.duration:g} s", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="stallscope-demo-", ignore_cleanup_errors=True) as figures:
        os.chmod(figures, 0o755)  # noqa: S103 - the poller is another user
        environment = {"STALLSCOPE_SIM_DEVICES": str(args.ranks), **os.environ, "STALLSCOPE_SIM_STATS": figures}
        environment["STALLSCOPE_SIM_LIB"] = str(SIM_LIB)
        _check(command, environment)
        return _run(args, command, environment)


def _run(args: argparse.Namespace, command: list[str], environment: dict[str, str]) -> int:
    job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, env=environment, start_new_session=True)
    settings = {name: value for name, value in environment.items() if name.startswith("STALLSCOPE_SIM_")}
    try:
        return _attach(args, job, StandIn(SIM_LIB / "libnvidia-ml.so.1", settings))
    finally:
        job.terminate()  # the launcher ends its ranks and writes the truth
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # the launcher and its ranks: a session of their own
        job.wait()


def _job_command(args: argparse.Namespace) -> list[str]:
    """How the job is started; without a fault, one rank is slower than the others."""
    command = [sys.executable, "-I", "-m", "stallscope.sim.job", f"--ranks={args.ranks}", f"--seed={args.seed}"]
    command += [f"--duration={args.duration:g}", f"--ahead={args.ahead}", f"--load-time={LOAD_S}", "--hold"]
    command += [f"--fault={args.fault}"] if args.fault else [f"--slow-rank={min(1, args.ranks - 1)}"]
    return command + ([f"--truth={args.truth}"] if args.truth else [])


def _check(command: list[str], environment: dict[str, str]) -> None:
    """The job knows its faults, and says what is wrong with one. Raises ArgumentProblem."""
    done = subprocess.run(
        [*command, "--check"], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or ["it said nothing"])[-1].partition("error: ")
        raise ArgumentProblem(
            "the simulated job can't be started so", why=why[2] or why[0], hint="python -m stallscope.sim.job --help"
        )


def _attach(args: argparse.Namespace, job: subprocess.Popen[bytes], nvml: StandIn) -> int:
    def go() -> None:
        assert job.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            job.stdin.write(b"go\n")
            job.stdin.close()

    parser = argparse.ArgumentParser()
    attach.add_parser(parser.add_subparsers())
    wanted = parser.parse_args(["attach", str(job.pid), *(["--json"] if args.json else [])])
    return Attach(wanted, caller(), on_attached=go, nvml=nvml).run()

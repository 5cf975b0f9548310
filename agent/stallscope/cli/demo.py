"""`stallscope demo`: a simulated job, traced from its first call."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from stallscope.capture.forward import StandIn
from stallscope.cli import attach
from stallscope.cli.arguments import seconds
from stallscope.cli.attach import Attach
from stallscope.cli.caller import Caller, caller
from stallscope.cli.demo_truth import comparison
from stallscope.errors import ArgumentProblem, StallscopeError
from stallscope.output.stdout import put
from stallscope.paths import SIM_LIB

__all__ = ["add_parser", "run"]

MAX_RANKS = 16
RECORDING = "demo.stall"
END_S = 5.0
HEALTHY_S, FAULTY_S = 8.0, 14.0
LONGER_S = {"late": 20.0, "die": 16.0}
SETTINGS = {"late": "seconds=8", "slow": "factor=3"}  # beyond every threshold
PROGRESS_S = 5.0
LOAD_S = 0.5  # between a rank's loading of CUDA and its first call, as frameworks have it


class Trace(NamedTuple):
    """How the job is traced; `over` ends the progress."""

    who: Caller
    nvml: StandIn
    folder: Path
    over: threading.Event


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
    parser.add_argument("--duration", type=seconds, metavar="S", help="length of the job (default: by the fault)")
    parser.add_argument("--attach-after", type=seconds, metavar="S", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="report as JSON on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start the job, attach to it, let it go, report. Returns attach's exit code; raises StallscopeError."""
    if not (SIM_LIB / "libcudart.so.12").exists():
        raise StallscopeError(
            "cannot start the demo", why=f"the simulated CUDA stack is not built ({SIM_LIB})", hint="run `make build`"
        )
    who = caller()
    with _folder(who) as folder:
        args.truth = args.truth or str(folder / "truth.json")
        args.fault, args.duration = _shown(args)
        code = _play(args, who, folder)
        if not args.json:
            line = comparison(args.truth, str(folder / RECORDING), faulty=args.fault is not None)
            put(f"{line}\n", sys.stdout, "cannot print what the job says", "the report stands before it")
    return code


@contextlib.contextmanager
def _folder(who: Caller) -> Iterator[Path]:
    """For what is gone afterwards; the recording is opened with the caller's rights."""
    with tempfile.TemporaryDirectory(prefix="stallscope-demo-") as name:
        if os.geteuid() == 0:
            os.chown(name, who.uid, who.gid)
        yield Path(name)


def _shown(args: argparse.Namespace) -> tuple[str | None, float]:
    """The fault so that it can be told, and for how long the job must run to that end, unless the caller says it."""
    if args.fault is None:
        return None, args.duration or HEALTHY_S
    kind, _, settings = args.fault.partition(":")
    usual = SETTINGS.get(kind, "")
    if usual and usual.partition("=")[0] not in settings:
        settings = ",".join(filter(None, [usual, settings]))
    fault = f"{kind}:{settings}" if settings else kind
    return fault, args.duration or LONGER_S.get(kind, FAULTY_S) + (args.attach_after or 0)


def _play(args: argparse.Namespace, who: Caller, folder: Path) -> int:
    """The job from its start to its end, traced."""
    command = _job_command(args)
    fault = f", with the fault {args.fault}" if args.fault else ""
    print(f"demo: {args.ranks} simulated ranks for {args.duration:g} s{fault}", file=sys.stderr)
    figures = folder / "figures"
    figures.mkdir()
    for path in (folder, figures):
        path.chmod(0o755)  # the poller is another user
    environment = {"STALLSCOPE_SIM_DEVICES": str(args.ranks), **os.environ, "STALLSCOPE_SIM_STATS": str(figures)}
    environment["STALLSCOPE_SIM_LIB"] = str(SIM_LIB)
    _check(command, environment)
    settings = {name: value for name, value in environment.items() if name.startswith("STALLSCOPE_SIM_")}
    nvml = StandIn(SIM_LIB / "libnvidia-ml.so.1", settings)
    job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, env=environment, start_new_session=True)
    over = threading.Event()
    try:
        return _attach(args, Trace(who, nvml, folder, over), job)
    finally:
        over.set()
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
    return [*command, f"--truth={args.truth}"]


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


def _attach(args: argparse.Namespace, trace: Trace, job: subprocess.Popen[bytes]) -> int:
    def go() -> None:
        assert job.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            job.stdin.write(b"go\n")
            job.stdin.close()
        threading.Thread(target=_progress, args=(args.duration, trace.over), daemon=True).start()

    words = ["attach", str(job.pid), *(["--json"] if args.json else ["-o", str(trace.folder / RECORDING)])]
    if args.attach_after is not None:
        go()
        time.sleep(args.attach_after)
        # A process of its own: a capture does not look among its own children for those of a target.
        return subprocess.run([sys.executable, "-I", "-m", "stallscope.cli.main", *words], check=False).returncode
    parser = argparse.ArgumentParser()
    attach.add_parser(parser.add_subparsers())
    return Attach(parser.parse_args(words), trace.who, on_attached=go, nvml=trace.nvml).run()


def _progress(duration_s: float, over: threading.Event) -> None:
    start_s = time.monotonic()
    while not over.wait(PROGRESS_S):
        passed_s = time.monotonic() - start_s
        if passed_s > duration_s:
            return
        print(f"demo: {passed_s:.0f} of {duration_s:g} s", file=sys.stderr, flush=True)

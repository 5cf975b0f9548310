"""`stallscope attach PID`: trace running processes with BPF and report."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stallscope import __version__
from stallscope.cli.arguments import pid_number
from stallscope.cli.caller import Caller, caller
from stallscope.errors import ArgumentProblem, CaptureProblem, ExitCode, StallscopeError
from stallscope.wire.frames import Kind
from stallscope.wire.hook_table import HOOKS

if TYPE_CHECKING:
    from stallscope.capture.forward import StandIn

__all__ = ["add_parser", "run"]

DEFAULT_ONE_IN = 100.0
PRIORITY = -10


def rate(text: str) -> float:
    """`1/N` or a percentage → one in how many. Raises argparse.ArgumentTypeError for 0, more than 1 and nonsense."""
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
        elif "/" in text:
            above, _, below = text.partition("/")
            share = float(above) / float(below)
        else:
            share = float(text)
    except (ValueError, ZeroDivisionError):
        share = math.nan
    if not 0 < share <= 1 or 1 / share > 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r}: give a rate above 0 and at most 1, as 1/N or N%")
    return 1 / share


def seconds(text: str) -> float:
    """A positive number of seconds. Raises argparse.ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r}: give a positive number of seconds")
    return value


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("attach", help="trace running processes and report", allow_abbrev=False)
    parser.add_argument("pids", nargs="+", type=pid_number, metavar="PID")
    parser.add_argument("--duration", type=seconds, metavar="S", help="end after S seconds (default: with the targets)")
    parser.add_argument("--no-children", action="store_true", help="do not follow fork")
    parser.add_argument("--job", action="store_true", help="also the processes of the same job (not built yet)")
    parser.add_argument("--method", choices=("auto", "bpf", "inject"), default="auto")
    parser.add_argument("--backend", choices=("auto", "bcc", "object"), default="auto", help=argparse.SUPPRESS)
    parser.add_argument("--links-per-file", type=int, default=8, help=argparse.SUPPRESS)
    links = ("auto", "multi", "perf", "perf-nocookie")
    parser.add_argument("--links", choices=links, default="auto", help=argparse.SUPPRESS)
    parser.add_argument("--as-on-kernel", metavar="RELEASE", help=argparse.SUPPRESS)
    parser.add_argument(
        "--sample", type=rate, default=DEFAULT_ONE_IN, metavar="RATE",
        help="share of launches, copies and short waits to record, as 1/N or N%% (default 1/100); counts stay exact",
    )  # fmt: skip
    parser.add_argument(
        "--returns", choices=("auto", "always", "never"), default="auto",
        help="probe returns, for the times of waits: not in a process that can cancel threads (auto), always, never",
    )  # fmt: skip
    parser.add_argument("-o", "--output", metavar="FILE", help="also record to FILE")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    parser.add_argument("--json", action="store_true", help="report as JSON on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command. Returns the exit code; raises StallscopeError."""
    if args.job:
        raise ArgumentProblem("--job can't be honoured", why="it is not built yet", hint="give all pids of the job")
    if args.method == "inject":
        raise ArgumentProblem("--method inject can't be honoured", why="it is not built yet", hint="use --method bpf")
    if args.force and not args.output:
        raise ArgumentProblem("--force makes no sense", why="there is no -o FILE to overwrite", hint="leave it out")
    return Attach(args, caller()).run()


class Aggregator:
    """The unprivileged process at the other end of the socket."""

    def __init__(self, who: Caller, record_fd: int | None, as_json: bool) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        words = ["--socket-fd", str(theirs.fileno()), "--uid", str(who.drop_uid), "--gid", str(who.drop_gid)]
        fds = [theirs.fileno()]
        if record_fd is not None:
            words += ["--record-fd", str(record_fd)]
            fds.append(record_fd)
        if as_json:
            words.append("--json")
        # -I: neither the caller's directory nor his PYTHON* variables say what a root process imports.
        command = [sys.executable, "-I", "-m", "stallscope.cli.aggregator", *words]
        # A session of its own: Ctrl-C goes to capture, which ends the stream, which ends this process.
        self.process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        self.socket = ours

    def wait(self) -> int:
        """Its exit code, once it has printed the report."""
        return self.process.wait()


class Attach:
    """One run of the command."""

    def __init__(
        self, args: argparse.Namespace, who: Caller, on_attached: Callable[[], None] | None = None,
        nvml: StandIn | None = None,
    ) -> None:  # fmt: skip
        self.args = args
        self.who = who
        self._on_attached = on_attached
        self._nvml = nvml
        self._attached = self._stop = False

    def _signal(self, _number: int, _frame: object) -> None:
        self._stop = True

    def run(self) -> int:
        """Trace, report, exit code."""
        from stallscope.capture.preflight import require_attach_rights

        for pid in self.args.pids:
            _require_process(pid)
            require_attach_rights(pid)
        signal.signal(signal.SIGINT, self._signal)
        signal.signal(signal.SIGTERM, self._signal)
        _go_first()
        _allow_files()
        record_fd = self._open_output()
        aggregator = Aggregator(self.who, record_fd, self.args.json)
        if record_fd is not None:
            os.close(record_fd)
        try:
            problem = self._capture(aggregator)
        except BaseException as error:
            aggregator.socket.close()
            if not self._attached:
                aggregator.process.kill()  # nothing to report
            aggregator.wait()
            if isinstance(error, OSError):
                raise CaptureProblem(
                    "the capture ended early", why=str(error), hint="what it saw before is reported; run it again"
                ) from error
            raise
        code = aggregator.wait()
        if problem is not None:
            raise problem
        return code if code in (ExitCode.OK, ExitCode.NOTHING_CAPTURED) else ExitCode.FAILED

    def _open_output(self) -> int | None:
        if self.args.output is None:
            return None
        from stallscope.wire.recording import open_output

        return open_output(self.args.output, self.args.force, self.who.uid, self.who.gid)

    def _capture(self, aggregator: Aggregator) -> StallscopeError | None:
        from stallscope.capture.costs import Costs
        from stallscope.capture.forward import Poller
        from stallscope.capture.linkstyle import Style, best_style
        from stallscope.capture.loader import load
        from stallscope.capture.outbox import Outbox
        from stallscope.capture.parser_client import ParserClient
        from stallscope.capture.session import Session, Settings
        from stallscope.capture.tables import BULK_BYTES, VITAL_BYTES

        args = self.args
        settings = Settings(args.pids, not args.no_children, args.sample, duration_s=args.duration)
        settings.links_per_file, settings.kernel_release = args.links_per_file, args.as_on_kernel
        settings.returns = args.returns
        with contextlib.closing(ParserClient()) as parser, contextlib.closing(Poller()) as poller:
            parser.start(self.who.drop_uid, self.who.drop_gid)
            poller.start(self.who.drop_uid, self.who.drop_gid, self._nvml)
            style = best_style() if args.links == "auto" else Style(args.links)
            loaded = load(args.backend, bulk_bytes=BULK_BYTES, vital_bytes=VITAL_BYTES, style=style)
            outbox = Outbox(aggregator.socket)
            ours = {"capture": os.getpid(), "parser": parser.pid or 0, "aggregate": aggregator.process.pid}
            costs = Costs({**ours, "poller": poller.pid or 0})
            outbox.send(Kind.HELLO, hello(settings, loaded.backend))
            for note in loaded.notes:
                outbox.send(Kind.NOTE, {"at_ns": time.monotonic_ns(), "proc": None, "text": note})
            session = Session(settings, loaded, outbox, parser, costs)
            session.poller = poller
            try:
                if self._stop:
                    raise KeyboardInterrupt
                session.start()
                self._attached = True
                self._say_attached(session, settings)
                if self._on_attached is not None:
                    self._on_attached()
                session.run(lambda: self._stop)
                session.finish()
            finally:
                session.close()
            outbox.close(timeout_s=30)
            if outbox.broken:
                return CaptureProblem(
                    "the report is lost", why="the aggregator process ended before the capture did",
                    hint="run it again; if it happens again, see its message above",
                )  # fmt: skip
            return None

    def _say_attached(self, session: Any, settings: Any) -> None:
        targets = session.population.live()
        if not targets:
            print("the target ended during the attach", file=sys.stderr)
            return
        libraries = sorted({lib.library for t in targets for lib in t.linked.values()})
        hooks = sum(len(lib.resolved.points) for t in targets for lib in t.linked.values())
        pids = ", ".join(f"{t.pid} ({t.facts.name})" for t in targets[:4]) + (" …" if len(targets) > 4 else "")
        where = " and ".join(libraries) if libraries else "no library yet"
        print(f"attached to PID {pids}: {hooks} functions in {where}", file=sys.stderr)
        one_in = f"{settings.one_in:g}"
        if settings.one_in > 1:
            print(f"recording 1 in {one_in} launches, copies and short waits; counts stay exact", file=sys.stderr)
        if not libraries:
            print(
                "note: no CUDA in the target yet (looked for libcudart, libcuda, libnccl and a runtime inside the "
                "program); waiting for it",
                file=sys.stderr,
            )
        sys.stderr.flush()


def _go_first() -> None:
    """Ask for the processor before others: what is read too late is lost, and it is little work. Needs CAP_SYS_NICE."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)


def _allow_files() -> None:
    """A process with three libraries takes 13 descriptors: the usual limit of 1024 would end at 75 processes."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _require_process(pid: int) -> None:
    from stallscope.errors import TargetProblem

    try:
        os.kill(pid, 0)
    except ProcessLookupError as error:
        raise TargetProblem(
            f"cannot attach to pid {pid}", why="no such process",
            hint="check the pid with `ps`; in a container, give the pid as this pid namespace shows it",
        ) from error  # fmt: skip
    except PermissionError:
        return


def hello(settings: Any, backend: str) -> dict[str, Any]:
    """Body of the first frame."""
    mono = time.monotonic_ns()
    return {
        "version": __version__,
        "start_mono_ns": mono,
        "start_unix_ns": time.time_ns() - (time.monotonic_ns() - mono),
        "host": socket.gethostname(),
        "kernel": platform.release(),
        "backend": backend,
        "sources": ["bpf"],
        "targets": settings.pids,
        "sample_one_in": settings.one_in,
        "long_ns": settings.long_ns,
        "hooks": [[h.id, h.library, h.name, h.kind, h.time_id >= 0] for h in HOOKS],
        "limits": {"processes": 127, "threads": 4096, "communicators": 4096},
    }

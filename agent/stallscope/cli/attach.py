"""`stallscope attach PID`: trace running processes with BPF and report."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stallscope.cli.arguments import DEFAULT_ONE_IN, pid_number, rate, seconds
from stallscope.cli.attachway import Way, choose
from stallscope.cli.caller import Caller, caller
from stallscope.cli.capturing import (
    LONG_NS,
    Aggregator,
    Parts,
    allow_files,
    hello,
    open_record,
    parts_of_capture,
    to_the_end,
)
from stallscope.errors import ArgumentProblem, StallscopeError
from stallscope.wire.frames import Kind

if TYPE_CHECKING:
    from stallscope.capture.forward import StandIn

__all__ = ["add_parser", "run"]

PRIORITY = -10


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("attach", help="trace running processes and report", allow_abbrev=False)
    parser.add_argument("pids", nargs="+", type=pid_number, metavar="PID")
    parser.add_argument("--duration", type=seconds, metavar="S", help="end after S seconds (default: with the targets)")
    parser.add_argument("--no-children", action="store_true", help="do not follow fork")
    parser.add_argument("--job", action="store_true", help="also the processes of the same job on this host")
    parser.add_argument(
        "--method", choices=("auto", "bpf", "inject"), default="auto",
        help="bpf: probes; inject: a library that is put into the process by ptrace, and out of its way at the end; "
        "auto: bpf where it may be used, else inject",
    )  # fmt: skip
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
    if args.force and not args.output:
        raise ArgumentProblem("--force makes no sense", why="there is no -o FILE to overwrite", hint="leave it out")
    return Attach(args, caller()).run()


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
        self._way = Way("bpf")

    def _signal(self, _number: int, _frame: object) -> None:
        self._stop = True

    def run(self) -> int:
        """Trace, report, exit code."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._signal)
        for pid in self.args.pids:
            _require_process(pid)
        self._way = choose(self.args.method, self.args.pids)
        _go_first()
        allow_files()
        record_fd = open_record(self.args.output, self.args.force, self.who)
        aggregator = Aggregator(self.who, record_fd, self.args.json)
        if record_fd is not None:
            os.close(record_fd)
        return to_the_end(aggregator, self._capture, lambda: self._attached)

    def _capture(self, aggregator: Aggregator) -> StallscopeError | None:
        with parts_of_capture(aggregator, self.who, self._nvml) as parts:
            session = self._by_bpf(parts) if self._way.method == "bpf" else self._by_shims(parts)
            try:
                if self._stop:
                    raise KeyboardInterrupt
                if self._way.method == "bpf":
                    session.start()
                else:
                    session.start(self.args.pids, self._others())
                self._attached = True
                self._say_attached(session)
                if self._on_attached is not None:
                    self._on_attached()
                session.run(lambda: self._stop)
                session.finish()
            finally:
                session.close()
            return parts.send_rest()

    def _others(self) -> list[int]:
        """Of the job, with --job."""
        if not self.args.job:
            return []
        from stallscope.capture.jobs import job_of

        found = job_of(self.args.pids)
        print(f"--job: {len(found)} more processes of the job on this host", file=sys.stderr)
        return found

    def _by_bpf(self, parts: Parts) -> Any:
        from stallscope.capture.linkstyle import Style, best_style
        from stallscope.capture.loader import load
        from stallscope.capture.session import Session, Settings
        from stallscope.capture.tables import BULK_BYTES, VITAL_BYTES

        args = self.args
        settings = Settings(args.pids, not args.no_children, args.sample, LONG_NS, duration_s=args.duration)
        settings.links_per_file, settings.kernel_release = args.links_per_file, args.as_on_kernel
        settings.returns, settings.more = args.returns, self._others()
        style = best_style() if args.links == "auto" else Style(args.links)
        loaded = load(args.backend, bulk_bytes=BULK_BYTES, vital_bytes=VITAL_BYTES, style=style)
        parts.outbox.send(Kind.HELLO, hello(args.pids, loaded.backend, ["bpf"], args.sample, LONG_NS))
        for note in loaded.notes:
            parts.note(note)
        session = Session(settings, loaded, parts.outbox, parts.parser, parts.costs, parts.shims(one_in=args.sample))
        session.poller = parts.poller
        return session

    def _by_shims(self, parts: Parts) -> Any:
        args = self.args
        parts.outbox.send(Kind.HELLO, hello(args.pids, self._way.method, ["shim"], args.sample, LONG_NS))
        parts.note(self._way.note)
        return parts.shim_session(
            one_in=args.sample, duration_s=args.duration, follow=not args.no_children,
            inject=args.pids if self._way.method == "inject" else None,
        )  # fmt: skip

    def _say_attached(self, session: Any) -> None:
        targets = session.population.live()
        if not targets:
            print("the target ended during the attach", file=sys.stderr)
            return
        libraries, hooks = self._way.reach(targets)
        pids = ", ".join(f"{t.pid} ({t.facts.name})" for t in targets[:4]) + (" …" if len(targets) > 4 else "")
        where = " and ".join(libraries) if libraries else "no library yet"
        print(f"attached to PID {pids}: {hooks} functions in {where}, method {self._way.method}", file=sys.stderr)
        if self.args.sample > 1:
            print(
                f"recording 1 in {self.args.sample:g} launches, copies and short waits; counts stay exact",
                file=sys.stderr,
            )
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

"""What the commands that capture share: the aggregator process, the first frame, limits."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from stallscope import __version__
from stallscope.cli.caller import Caller
from stallscope.errors import CaptureProblem, ExitCode, StallscopeError
from stallscope.wire.frames import Kind
from stallscope.wire.hook_table import HOOKS

if TYPE_CHECKING:
    from stallscope.capture.costs import Costs
    from stallscope.capture.forward import Poller, StandIn
    from stallscope.capture.handover import HandOver
    from stallscope.capture.outbox import Outbox
    from stallscope.capture.parser_client import ParserClient
    from stallscope.capture.shims import Shims
    from stallscope.capture.shimsession import ShimSession

__all__ = ["LONG_NS", "Aggregator", "Parts", "allow_files", "hello", "open_record", "parts_of_capture",
           "to_the_end"]  # fmt: skip

LONG_NS = 200_000  # waits from this duration on are always recorded


class Aggregator:
    """The unprivileged process at the other end of the socket.

    Args:
        who: whom it becomes.
        record_fd: the recording; stays the caller's.
        as_json: how the report is to look.
        on_stderr: where a report for a person goes; one in JSON always goes to stdout.
        report: a file that it also goes to, in JSON; the process that it becomes has to be able to write it.
    """

    def __init__(
        self, who: Caller, record_fd: int | None, as_json: bool, *, on_stderr: bool = False, report: str | None = None
    ) -> None:  # fmt: skip
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        words = ["--socket-fd", str(theirs.fileno()), "--uid", str(who.drop_uid), "--gid", str(who.drop_gid)]
        fds = [theirs.fileno()]
        if record_fd is not None:
            words += ["--record-fd", str(record_fd)]
            fds.append(record_fd)
        words += ["--json"] if as_json else ["--on-stderr"] if on_stderr else []
        words += ["--report", report] if report else []
        # -I: neither the caller's directory nor his PYTHON* variables say what a root process imports.
        command = [sys.executable, "-I", "-m", "stallscope.cli.aggregator", *words]
        # A session of its own: Ctrl-C goes to capture, which ends the stream, which ends this process.
        # Blocked until it is ready for it: `show` before that would end it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1,))
        try:
            self.process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.socket = ours

    def show(self) -> None:
        """Have it print a report of this moment, and go on."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)

    def wait(self) -> int:
        """Its exit code, once it has printed the report."""
        return self.process.wait()

    def give_up(self, *, has_begun: bool) -> None:
        """End it; what was captured, if that has begun, is still reported."""
        self.socket.close()
        if not has_begun:
            self.process.kill()
        self.wait()


class Parts(NamedTuple):
    """What every capture is made of, besides where its records come from; `aggregate` is the aggregator's pid."""

    outbox: Outbox
    parser: ParserClient
    poller: Poller
    costs: Costs
    aggregate: int

    def note(self, text: str) -> None:
        """A remark in the report."""
        self.outbox.send(Kind.NOTE, {"at_ns": time.monotonic_ns(), "proc": None, "text": text})

    def shims(self, mode: str | None = None, *, one_in: float) -> Shims:
        """The segments of a capture; `mode` as in `run --mode`, None leaves each as it is."""
        from stallscope.capture.held import ShimSettings
        from stallscope.capture.segment import Mode
        from stallscope.capture.shimlinks import ShimLinks
        from stallscope.capture.shims import Shims
        from stallscope.capture.shimsites import ShimSites

        sites = ShimSites(self.parser, self.outbox.send, time.monotonic_ns)
        links = ShimLinks(self.parser, self.outbox.send, time.monotonic_ns)
        settings = ShimSettings(Mode[mode.upper()] if mode else None, one_in)
        return Shims(self.outbox, time.monotonic_ns, links, settings, sites)

    def shim_session(
        self, mode: str | None = None, handover: HandOver | None = None, *, one_in: float,
        duration_s: float | None = None, follow: bool = True, inject: list[int] | None = None,
    ) -> ShimSession:  # fmt: skip
        """A capture of what shims tell alone; `inject`: pids that one is to be put into."""
        from stallscope.capture.shimsession import ShimSession

        helpers = lambda: {self.aggregate, self.parser.pid or 0, self.poller.pid or 0}  # noqa: E731
        shims = self.shims(mode, one_in=one_in)
        session = ShimSession(
            self.outbox, shims, self.parser, self.costs, helpers, handover, duration_s=duration_s, follow=follow,
            inject=inject,
        )  # fmt: skip
        session.poller = self.poller
        return session

    def send_rest(self) -> CaptureProblem | None:
        """Wait until the aggregator has taken all; what to tell where it has not."""
        self.outbox.close(timeout_s=30)
        if not self.outbox.broken:
            return None
        return CaptureProblem(
            "the report is lost", why="the aggregator process ended before the capture did",
            hint="run it again; if it happens again, see its message above",
        )  # fmt: skip


@contextlib.contextmanager
def parts_of_capture(aggregator: Aggregator, who: Caller, nvml: StandIn | None = None) -> Iterator[Parts]:
    """Start parser and poller; end them."""
    from stallscope.capture.costs import Costs
    from stallscope.capture.forward import Poller
    from stallscope.capture.outbox import Outbox
    from stallscope.capture.parser_client import ParserClient

    with contextlib.closing(ParserClient()) as parser, contextlib.closing(Poller()) as poller:
        parser.start(who.drop_uid, who.drop_gid)
        poller.start(who.drop_uid, who.drop_gid, nvml)
        ours = {"capture": os.getpid(), "parser": parser.pid or 0, "aggregate": aggregator.process.pid}
        costs = Costs({**ours, "poller": poller.pid or 0})
        yield Parts(Outbox(aggregator.socket), parser, poller, costs, aggregator.process.pid)


def open_record(path: str | None, force: bool, who: Caller) -> int | None:
    """Descriptor of the recording, None where none is wanted. Raises RecordingProblem."""
    if path is None:
        return None
    from stallscope.wire.recording import open_output

    return open_output(path, force, who.uid, who.gid)


def allow_files() -> tuple[int, int]:
    """A process with three libraries takes 13 descriptors: the usual limit of 1024 would end at 75 processes.

    Returns the limits as they were.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, hard


def hello(
    targets: list[int], backend: str, sources: list[str], one_in: float, long_ns: int, start_ns: int | None = None
) -> dict[str, Any]:
    """Body of the first frame. `start_ns`: when the capture began, on CLOCK_MONOTONIC; now, if not given."""
    mono = time.monotonic_ns() if start_ns is None else start_ns
    return {
        "version": __version__,
        "start_mono_ns": mono,
        "start_unix_ns": time.time_ns() - (time.monotonic_ns() - mono),
        "host": socket.gethostname(),
        "kernel": platform.release(),
        "backend": backend,
        "sources": sources,
        "targets": targets,
        "sample_one_in": one_in,
        "long_ns": long_ns,
        "hooks": [[h.id, h.library, h.name, h.kind, h.time_id >= 0] for h in HOOKS],
        "limits": {"processes": 127, "threads": 4096, "communicators": 4096},
    }


def to_the_end(
    aggregator: Aggregator, capture: Callable[[Aggregator], StallscopeError | None], has_begun: Callable[[], bool]
) -> int:
    """Capture, then wait for the report. The exit code; raises what `capture` returns or raises."""
    try:
        problem = capture(aggregator)
    except BaseException as error:
        aggregator.give_up(has_begun=has_begun())
        if isinstance(error, OSError):
            raise CaptureProblem(
                "the capture ended early", why=str(error), hint="what it saw before is reported; run it again"
            ) from error
        raise
    code = aggregator.wait()
    for number in (signal.SIGINT, signal.SIGTERM):
        # The interpreter's end gives handled signals their default back: a late Ctrl-C would hide the exit code.
        signal.signal(number, signal.SIG_IGN)
    if problem is not None:
        raise problem
    return code if code in (ExitCode.OK, ExitCode.NOTHING_CAPTURED) else ExitCode.FAILED

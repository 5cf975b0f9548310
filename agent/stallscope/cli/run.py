"""`stallscope run -- CMD`: start a command with the shim in it, and report. No privileges."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from stallscope.cli.arguments import DEFAULT_ONE_IN, rate
from stallscope.cli.caller import Caller, caller
from stallscope.cli.capturing import Aggregator, allow_files, hello, open_record
from stallscope.cli.launch import NOT_EXECUTABLE, NOT_FOUND, OWN_FAILURE, Command, Preload
from stallscope.errors import ArgumentProblem, CaptureProblem, ExitCode, StallscopeError
from stallscope.wire.frames import Kind

__all__ = ["add_parser", "run"]

LONG_NS = 200_000
MIN_ONE_IN = 1000.0


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser = commands.add_parser(
        "run", help="start a command and trace it without privileges", allow_abbrev=False,
        usage="stallscope run [-h] [-o FILE [--force]] [--json] [--mode MODE] [--sample RATE] -- CMD...",
        epilog="The exit code is the command's; 128+N for signal N; 125: stallscope failed; 126: CMD can't be "
        "executed; 127: CMD is not there.",
    )  # fmt: skip
    parser.add_argument("-o", "--output", metavar="FILE", help="also record to FILE")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    parser.add_argument("--json", action="store_true", help="report as JSON on stdout, behind what CMD writes there")
    parser.add_argument(
        "--mode", choices=("full", "lite", "min"), default="full",
        help="full: every call is timed (about 20 ns a call); lite: launches only when they begin; min: launches are "
        "only counted, but for one in 1000; waits and NCCL are always timed",
    )  # fmt: skip
    parser.add_argument(
        "--sample", type=rate, default=DEFAULT_ONE_IN, metavar="RATE",
        help="share of launches, copies and short waits to record, as 1/N or N%% (default 1/100); counts stay exact",
    )  # fmt: skip
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="CMD", help="the command and its arguments")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command's exit code, or 125 to 127 with a message. Raises ArgumentProblem."""
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        raise ArgumentProblem("cannot run nothing", why="there is no command", hint="stallscope run -- CMD...")
    if args.force and not args.output:
        raise ArgumentProblem("--force makes no sense", why="there is no -o FILE to overwrite", hint="leave it out")
    try:
        return Run(args, words, caller()).run()
    except StallscopeError as error:
        print(f"stallscope: {error}", file=sys.stderr)
        return OWN_FAILURE


class Run:
    """One run of the command."""

    def __init__(self, args: argparse.Namespace, words: list[str], who: Caller) -> None:
        self.args, self.words, self.who = args, words, who

    def run(self) -> int:
        """Start, trace, report; the exit code."""
        with contextlib.closing(Preload(self.args.mode)) as preload:
            allow_files()
            record_fd = open_record(self.args.output, self.args.force, self.who)
            aggregator = Aggregator(self.who, record_fd, self.args.json, on_stderr=True)
            if record_fd is not None:
                os.close(record_fd)
            command = Command(self.words, preload.environment())
            try:
                problem = self._capture(aggregator, command, preload)
            except (OSError, StallscopeError) as error:
                aggregator.give_up(has_begun=command.pid is not None)
                if command.pid is None:
                    return self._not_started(error)
                problem = error if isinstance(error, StallscopeError) else _ended_early(error)
            finally:
                command.wait()  # whatever becomes of us: it goes on, and gets its signals
                command.unblock()
            return self._code(command, aggregator.wait(), problem)

    def _code(self, command: Command, reported: int, problem: StallscopeError | None) -> int:
        """The command's; ours only when it can't be mistaken for a failure of the command."""
        if problem is not None:
            print(f"stallscope: {problem}", file=sys.stderr)
        is_good = problem is None and reported in (ExitCode.OK, ExitCode.NOTHING_CAPTURED)
        return command.exit_code() or (0 if is_good else OWN_FAILURE)

    def _not_started(self, error: OSError | StallscopeError) -> int:
        if isinstance(error, StallscopeError):
            raise error
        name = self.words[0]
        is_there = not isinstance(error, FileNotFoundError) or os.path.lexists(name)
        problem = StallscopeError(
            f"cannot run {name}", why=os.strerror(error.errno or 0),
            hint="check that it is a program, and may be executed" if is_there else "check its name and PATH",
        )  # fmt: skip
        print(f"stallscope: {problem}", file=sys.stderr)
        return NOT_EXECUTABLE if is_there else NOT_FOUND

    def _capture(self, aggregator: Aggregator, command: Command, preload: Preload) -> StallscopeError | None:
        from stallscope.capture.exits import become_subreaper
        from stallscope.capture.outbox import Outbox

        become_subreaper()
        with self._helpers() as (parser, poller):
            outbox = Outbox(aggregator.socket)
            start_ns = time.monotonic_ns()
            one_in = max(self.args.sample, MIN_ONE_IN) if self.args.mode == "min" else self.args.sample
            session = self._session(outbox, parser, poller, aggregator, preload, one_in)
            try:
                pid = command.start()
                outbox.send(Kind.HELLO, hello([pid], "shim", ["shim"], one_in, LONG_NS, start_ns))
                for note in preload.notes:
                    outbox.send(Kind.NOTE, {"at_ns": time.monotonic_ns(), "proc": None, "text": note})
                session.start_command(pid)
                session.run(lambda: self._step(session, command))
                session.finish()
                preload.keep = bool(session.population.live())
            finally:
                session.close()
            outbox.close(timeout_s=30)
            if outbox.broken:
                return CaptureProblem(
                    "the report is lost", why="the aggregator process ended before the command did",
                    hint="run it again; if it happens again, see its message above",
                )  # fmt: skip
            return None

    @contextlib.contextmanager
    def _helpers(self) -> Iterator[tuple[Any, Any]]:
        from stallscope.capture.forward import Poller
        from stallscope.capture.parser_client import ParserClient

        with contextlib.closing(ParserClient()) as parser, contextlib.closing(Poller()) as poller:
            parser.start(self.who.drop_uid, self.who.drop_gid)
            poller.start(self.who.drop_uid, self.who.drop_gid)
            yield parser, poller

    def _session(
        self, outbox: Any, parser: Any, poller: Any, aggregator: Aggregator, preload: Preload, one_in: float
    ) -> Any:
        from stallscope.capture.costs import Costs
        from stallscope.capture.segment import Mode
        from stallscope.capture.shimlinks import ShimLinks
        from stallscope.capture.shims import Shims, ShimSettings
        from stallscope.capture.shimsession import ShimSession

        ours = {"capture": os.getpid(), "parser": parser.pid or 0, "aggregate": aggregator.process.pid}
        costs = Costs({**ours, "poller": poller.pid or 0})
        settings = ShimSettings(Mode[self.args.mode.upper()], one_in)
        shims = Shims(outbox, time.monotonic_ns, ShimLinks(parser, outbox.send, time.monotonic_ns), settings)
        helpers = lambda: {aggregator.process.pid, parser.pid or 0, poller.pid or 0}  # noqa: E731
        session = ShimSession(outbox, shims, costs, helpers, preload.handover)
        session.poller = poller
        return session

    def _step(self, session: Any, command: Command) -> bool:
        """Pass signals on; take the command's end. Never asks to stop: the command does."""
        command.forward_signals()
        status = command.poll()
        if status is not None:
            session.population.command_ended(status)
        return False


def _ended_early(error: OSError) -> CaptureProblem:
    return CaptureProblem(
        "the capture ended early", why=str(error), hint="what it saw before is reported; the command went on without it"
    )

"""`stallscope run -- CMD`: start a command with the shim in it, and report. No privileges."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from stallscope.cli.arguments import DEFAULT_ONE_IN, rate
from stallscope.cli.caller import Caller, caller
from stallscope.cli.capturing import LONG_NS, Aggregator, allow_files, hello, open_record, parts_of_capture
from stallscope.cli.launch import NOT_EXECUTABLE, NOT_FOUND, OWN_FAILURE, Command, Preload
from stallscope.errors import ArgumentProblem, CaptureProblem, ExitCode, StallscopeError
from stallscope.wire.frames import Kind

if TYPE_CHECKING:
    from stallscope.capture.forward import StandIn
    from stallscope.capture.shimsession import ShimSession

__all__ = ["add_parser", "run"]

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

    def __init__(self, args: argparse.Namespace, words: list[str], who: Caller, nvml: StandIn | None = None) -> None:
        self.args, self.words, self.who, self._nvml = args, words, who, nvml

    def run(self) -> int:
        """Start, trace, report; the exit code."""
        with contextlib.closing(Preload(self.args.mode)) as preload:
            limits = allow_files()
            record_fd = open_record(self.args.output, self.args.force, self.who)
            aggregator = Aggregator(self.who, record_fd, self.args.json, on_stderr=True)
            if record_fd is not None:
                os.close(record_fd)
            command = Command(self.words, preload.environment(), limits)
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

        become_subreaper()
        one_in = max(self.args.sample, MIN_ONE_IN) if self.args.mode == "min" else self.args.sample
        with parts_of_capture(aggregator, self.who, self._nvml) as parts:
            session = parts.shim_session(self.args.mode, preload.handover, one_in=one_in)
            try:
                start_ns = time.monotonic_ns()
                pid = command.start()
                parts.outbox.send(Kind.HELLO, hello([pid], "shim", ["shim"], one_in, LONG_NS, start_ns))
                for note in preload.notes:
                    parts.note(note)
                session.start_command(pid)
                session.run(lambda: self._step(session, command))
                session.finish()
                preload.keep = bool(session.population.live())
            finally:
                session.close()
            return parts.send_rest()

    def _step(self, session: ShimSession, command: Command) -> bool:
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

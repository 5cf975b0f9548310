"""The command line: one place that prints errors and chooses the exit code."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from stallscope import __version__
from stallscope.errors import ArgumentProblem, ExitCode, StallscopeError
from stallscope.output.stdout import put

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

__all__ = ["Parser", "entry", "main"]

COMMANDS = ("attach", "run", "daemon", "sidecar", "ctl", "report", "export", "doctor", "demo")
RESERVED = ("top", "hub")
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """Raises what is wrong with the arguments as an error of ours; `commands` are the parsers of the subcommands."""

    commands: argparse._SubParsersAction[Parser]

    def error(self, message: str) -> NoReturn:
        """Show the usage of this very command, then raise ArgumentProblem."""
        with contextlib.suppress(OSError):
            self.print_usage(sys.stderr)
        raise ArgumentProblem(f"cannot run `{self.prog}`", why=message, hint=f"{self.prog} --help")

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        # argparse itself swallows a failed write, or leaves it to the interpreter's last flush.
        on_stdout = file is sys.stdout
        if on_stdout:
            put(message, sys.stdout, "cannot print the help", "send it somewhere with room")
        else:
            super()._print_message(message, file)


def _parser(only: str | None) -> Parser:
    parser = Parser(
        prog="stallscope", description="Where a CUDA job loses time, seen from below Python.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"stallscope {__version__}")
    parser.commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        # Importing all of them would cost every command the start-up time and memory of the largest.
        if only in (None, name):
            importlib.import_module(f"stallscope.cli.{name}").add_parser(parser.commands)
    return parser


def _arguments(argv: list[str]) -> argparse.Namespace:
    """What the words mean. Raises ArgumentProblem."""
    command = next((word for word in argv if not word.startswith("-")), None)
    if command in RESERVED:
        raise ArgumentProblem(
            f"cannot run `stallscope {command}`", why="it is not built yet",
            hint=f"what there is: {', '.join(COMMANDS)} (stallscope --help)",
        )  # fmt: skip
    parser = _parser(command if command in COMMANDS else None)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        # argparse itself would blame the whole program and show its usage.
        parser.commands.choices[args.command].error(f"unknown: {' '.join(unknown)}")
    return args


def main(argv: list[str]) -> int:
    """Run one command; its exit code. Errors go to stderr in four parts."""
    try:
        _open_streams()
        args = _arguments(argv)
        code: int = args.run(args)
        return code
    except StallscopeError as error:
        print(f"stallscope: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return ExitCode.OK
    except KeyboardInterrupt:
        print("stallscope: interrupted", file=sys.stderr)
        return INTERRUPTED


def _open_streams() -> None:
    """Nothing else may get the numbers 0 to 2: what is meant for stdout would go into a socket or a recording.

    Raises:
        StallscopeError: stdout is closed.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(fd, True)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - for as long as the process lives
    if sys.stdout is None:
        raise StallscopeError(
            "cannot print anything",
            why="stdout is closed",
            hint="leave it open; >/dev/null is for output you don't want",
        )


def entry() -> None:
    """For the `stallscope` script."""
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # before a command could take care of it
        sys.exit(130)


if __name__ == "__main__":
    entry()

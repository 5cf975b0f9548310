"""The command line: one place that prints errors and chooses the exit code."""

from __future__ import annotations

import argparse
import importlib
import sys

from stallscope import __version__
from stallscope.errors import ExitCode, StallscopeError

__all__ = ["entry", "main"]

COMMANDS = ("attach", "report", "doctor", "demo")
RESERVED = {
    "run": "SHIM",
    "daemon": "DEPLOY",
    "sidecar": "DEPLOY",
    "ctl": "DEPLOY",
    "export": "CALLSITES",
    "top": "a later release",
    "hub": "a later release",
}


def _parser(only: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stallscope", description="Where a CUDA job loses time, seen from below Python.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"stallscope {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        # Importing all of them would cost every command the start-up time and memory of the largest.
        if only in (None, name):
            importlib.import_module(f"stallscope.cli.{name}").add_parser(commands)
    return parser


def main(argv: list[str]) -> int:
    """Run one command; its exit code. Errors go to stderr in four parts."""
    command = next((word for word in argv if not word.startswith("-")), None)
    if command in RESERVED:
        print(f"stallscope: `{command}` is not built yet (comes with {RESERVED[command]})", file=sys.stderr)
        return ExitCode.BAD_ARGUMENTS
    args = _parser(command if command in COMMANDS else None).parse_args(argv)
    try:
        code: int = args.run(args)
    except StallscopeError as error:
        print(f"stallscope: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return ExitCode.OK
    except KeyboardInterrupt:
        print("stallscope: interrupted", file=sys.stderr)
        return 130
    return code


def entry() -> None:
    """For the `stallscope` script."""
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # before a command could take care of it
        sys.exit(130)


if __name__ == "__main__":
    entry()

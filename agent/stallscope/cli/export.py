"""`stallscope export FILE --format FORMAT`: the waits of a recording for other programs."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from stallscope.cli.caller import caller
from stallscope.cli.report import replay
from stallscope.diagnose.waitstacks import wait_stacks
from stallscope.errors import ExitCode
from stallscope.output.flame import folded, speedscope
from stallscope.output.stdout import OutputProblem, put
from stallscope.wire.recording import open_output

__all__ = ["add_parser", "run"]

FORMATS = {"folded": folded, "speedscope": speedscope}
HINT = "free space, or name another file"


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("export", help="the waits of a recording as a flame graph", allow_abbrev=False)
    parser.add_argument("file", metavar="FILE", help="written by `attach -o FILE`")
    parser.add_argument("--format", choices=tuple(FORMATS), required=True, help="weights in nanoseconds")
    parser.add_argument("-o", "--output", metavar="OUT", help="default: stdout")
    parser.add_argument("--force", action="store_true", help="overwrite OUT")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command; an exit code. Raises RecordingProblem, OutputProblem."""
    state = replay(args.file).state
    if state.ending is not None or state.blind or any(state.lost_by.values()):
        sys.stderr.write(
            "stallscope: the weights are lower bounds: not everything was seen (see `stallscope report`)\n"
        )
    text = FORMATS[args.format](wait_stacks(state))
    if args.output is None:
        put(text, sys.stdout, "cannot print the stacks", HINT)
    else:
        _write(args.output, text, force=args.force)
    return ExitCode.OK


def _write(path: str, text: str, *, force: bool) -> None:
    who = caller()
    fd = open_output(path, force, who.uid, who.gid)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise OutputProblem(f"cannot write {path}", why=error.strerror or str(error), hint=HINT) from error

"""`stallscope report FILE`: the report of a recording, to the byte as it was printed live."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from stallscope.aggregate.state import State
from stallscope.output.finish import finish
from stallscope.wire.recording import read_recording

__all__ = ["add_parser", "replay", "run"]


def add_parser(subparsers: Any) -> None:
    """Add `report` to the commands."""
    parser = subparsers.add_parser("report", help="print the report of a recording", allow_abbrev=False)
    parser.add_argument("file", metavar="FILE", help="written by `attach -o FILE`")
    parser.add_argument("--json", action="store_true", help="schema stallscope.report/1")
    parser.set_defaults(run=run)


def replay(path: str) -> State:
    """The state that a recording's frames add up to. Raises RecordingProblem."""
    state, recording = State(), read_recording(path)
    for frame in recording:
        state.apply(frame)
    state.finish(recording.ending)
    return state


def run(args: argparse.Namespace) -> int:
    """Print the report; what is whole of a damaged recording, with a word on where it ends. Raises RecordingProblem."""
    state = replay(args.file)
    if state.ending:
        sys.stderr.write(
            f"{args.file} is not whole: {state.ending}\n"
            "  next: the report holds what comes before; its counts are lower bounds\n"
        )
    return finish(state, as_json=args.json, out=sys.stdout, err=sys.stderr)

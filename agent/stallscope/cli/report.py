"""`stallscope report FILE`: the report of a recording, to the byte as it was printed live."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from stallscope.diagnose.follow import Follower
from stallscope.errors import RecordingProblem
from stallscope.output.finish import finish
from stallscope.wire.recording import Ending, read_recording

__all__ = ["add_parser", "replay", "run"]


def add_parser(subparsers: Any) -> None:
    """Add `report` to the commands."""
    parser = subparsers.add_parser("report", help="print the report of a recording", allow_abbrev=False)
    parser.add_argument("file", metavar="FILE", help="written by `attach -o FILE`")
    parser.add_argument("--json", action="store_true", help="schema stallscope.report/1")
    parser.set_defaults(run=run)


def replay(path: str) -> Follower:
    """What a recording's frames add up to. Raises RecordingProblem, also where no frame is whole."""
    follower, recording = Follower(), read_recording(path)
    for frame in recording:
        follower.apply(frame)
    follower.finish(recording.ending)
    if follower.state.capture is None and recording.ending:
        raise RecordingProblem(
            f"cannot report {path}", why=f"there is no whole frame in it: it {_cut_off(recording.ending)}",
            hint="record again: stallscope attach PID -o FILE",
        )  # fmt: skip
    return follower


def _cut_off(ending: Ending) -> str:
    return str(ending) if ending.bad else f"is cut off after {ending.offset + ending.pending} bytes"


def run(args: argparse.Namespace) -> int:
    """Print the report; what is whole of a damaged recording, with a word on where it ends.

    Raises RecordingProblem, OutputProblem.
    """
    follower = replay(args.file)
    ending = follower.state.ending
    if ending:
        sys.stderr.write(
            f"stallscope: {args.file} is not whole: {ending}\n"
            "  next: the report holds what comes before; its counts are lower bounds\n"
        )
    return finish(follower.state, follower.watch, as_json=args.json, out=sys.stdout, err=sys.stderr)

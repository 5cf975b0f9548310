"""The last act of a capture, live or replayed: the same bytes for the same frames."""

from __future__ import annotations

import io
from typing import TextIO

from stallscope.aggregate.state import State
from stallscope.errors import ExitCode
from stallscope.output.empty import why_empty
from stallscope.output.report import build_report, report_json

__all__ = ["finish", "warm_up"]


def warm_up(*, as_json: bool) -> None:
    """Import all that `finish` will need: afterwards this process may no longer be able to read its own modules."""
    finish(State(), as_json=as_json, out=io.StringIO(), err=io.StringIO())


def finish(state: State, *, as_json: bool, out: TextIO, err: TextIO) -> int:
    """Print the report on `out` and, when there is nothing in it, the reason on `err`; the exit code."""
    if as_json:
        out.write(report_json(state))
    else:
        # rich costs 10 MB: only who prints for a person pays for it.
        from stallscope.output.terminal import print_report

        print_report(build_report(state), out)
    out.flush()
    empty = why_empty(state)
    if empty is None:
        return ExitCode.OK
    err.write(f"{empty}\n")
    return empty.exit_code

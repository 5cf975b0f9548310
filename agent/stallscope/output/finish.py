"""The last act of a capture, live or replayed: the same bytes for the same frames."""

from __future__ import annotations

import io
from typing import TextIO

from stallscope.aggregate.state import State
from stallscope.diagnose.incident import Findings, Found
from stallscope.errors import ExitCode
from stallscope.output.announce import Announcer
from stallscope.output.empty import why_empty
from stallscope.output.rehearsal import rehearse, rehearse_steps, rehearsed_findings
from stallscope.output.report import build_report, report_json
from stallscope.output.stdout import put

__all__ = ["finish", "warm_up"]


def warm_up(*, as_json: bool) -> None:
    """Run all that a capture can need, on one made up: afterwards this process may be unable to read its modules.

    numpy and rich import parts of themselves at the first call of a function, so importing ours is not enough.
    """
    rehearse_steps()
    Announcer(io.StringIO()).look(rehearsed_findings())
    for state, findings in ((rehearse(), rehearsed_findings()), (State(), Found())):
        why_empty(state)
        if as_json:
            report_json(state, findings)
            continue
        from stallscope.output.terminal import PLAIN_WIDTH, render

        for tty in (False, True):
            render(build_report(state, findings), PLAIN_WIDTH, tty=tty)


def finish(state: State, findings: Findings, *, as_json: bool, out: TextIO | None, err: TextIO) -> int:
    """Print the report on `out` and, when there is nothing in it, the reason on `err`; the exit code.

    Raises:
        OutputProblem: `out` is closed, or takes no more.
        BrokenPipeError: nobody reads `out` any more.
    """
    put(_text(state, findings, as_json, out), out, "cannot print the report", _HINT)
    if state.faults:
        err.write(f"stallscope: {state.faults.notes()[0]}\n{state.faults.first}")
        err.write("  next: send this with the recording (attach -o FILE); the other parts of the report stand\n")
        return ExitCode.FAILED
    empty = None if findings.incidents else why_empty(state)  # attached into a block, no call is made any more
    if empty is None:
        return ExitCode.OK
    err.write(f"stallscope: {empty}\n")
    return empty.exit_code


_HINT = "send it somewhere with room; one recorded with -o FILE is printed again by `stallscope report FILE`"


def _text(state: State, findings: Findings, as_json: bool, out: TextIO | None) -> str:
    if as_json or out is None:
        return report_json(state, findings)
    # rich costs 10 MB: only who prints for a person pays for it.
    from stallscope.output.terminal import report_text

    return report_text(build_report(state, findings), out)

"""`stallscope doctor [PID]`: what works here, what is lost without the rest, how to get it."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stallscope.capture.libmatch import match
from stallscope.capture.parser_client import ParserClient, ParserFailed
from stallscope.capture.plan import ENTRY_NS, PAIR_NS, WAYS, Plan, plan
from stallscope.capture.preflight import CAPABILITIES, NEEDED, Check, preflight, target_checks, unusable
from stallscope.capture.procfs import clean, executable_mappings
from stallscope.capture.rights import Refusal, refusal
from stallscope.capture.shimcheck import inject_check, shim_check
from stallscope.cli.arguments import pid_number
from stallscope.cli.caller import caller
from stallscope.errors import ExitCode
from stallscope.output.stdout import printable, put

__all__ = ["add_parser", "run"]

WIDTH = 80
COLOURS = {"ok": "green", "not needed": "dim", "unknown": "yellow"}


class Verdict(NamedTuple):
    """Whether attach would work; `why` and `hint` where it would not."""

    code: ExitCode
    attach: str
    why: str = ""
    hint: str = ""


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser = commands.add_parser("doctor", help="what works on this machine, what is missing, how to get it")
    parser.add_argument("pid", nargs="?", type=pid_number, metavar="PID", help="also look at this process")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.set_defaults(run=run)


def verdict(checks: list[Check], about_target: list[Check]) -> Verdict:
    """From the checks, and one more look at the cause where rights are missing."""
    refused = refusal()
    if refused:
        return Verdict(ExitCode.NOT_PERMITTED, "not permitted", *refused)
    hidden = [c for c in about_target if c.name.endswith(("/maps", "/root")) and c.state != "ok"]
    if hidden:
        cause = Refusal(f"{hidden[0].name}: {hidden[0].detail}", hidden[0].how_to_get_it)
        return Verdict(ExitCode.NOT_PERMITTED, "not permitted", *cause)
    lacking = unusable(checks)
    if lacking:
        why = "; ".join(f"{c.name}: {c.detail}" for c in lacking)
        return Verdict(ExitCode.FAILED, "impossible", why, lacking[0].how_to_get_it)
    return Verdict(ExitCode.OK, "possible")


def libraries_of(pid: int) -> list[tuple[str, str]]:
    """(library, path) of what is mapped and named like a CUDA library; empty when its maps can't be read."""
    try:
        paths = sorted({mapping.path for mapping in executable_mappings(pid)})
    except OSError:
        return []
    return [(library, clean(path)) for path in paths if (library := match(path))]


def run(args: argparse.Namespace) -> int:
    """Print the checks. Exit 0 when attach would work, 3 when it is not permitted, 1 when it can't work here.

    Raises:
        TargetProblem: no such process, or one that can't be traced.
        OutputProblem: stdout takes no more.
    """
    about_target = [*target_checks(args.pid), inject_check(args.pid), shim_check(args.pid)] if args.pid else []
    libraries = libraries_of(args.pid) if args.pid else []
    checks = preflight()
    result = verdict(checks, about_target)
    planned = _plan(args.pid) if args.pid else None
    text = _json_text if args.json else _page
    put(text(checks, about_target, libraries, result, planned), sys.stdout, *_PRINTING)
    return result.code


_PRINTING = ("cannot print what the checks found", "send it somewhere with room")


def _plan(pid: int) -> Plan:
    who = caller()
    with contextlib.closing(ParserClient()) as parser:
        try:
            parser.start(who.drop_uid, who.drop_gid)
        except ParserFailed as error:
            return Plan(pid, [], [f"everything: {error}"], [])
        return plan(pid, parser)


def _json_text(
    checks: list[Check], about_target: list[Check], libraries: list[tuple[str, str]], result: Verdict,
    planned: Plan | None,
) -> str:  # fmt: skip
    answer: dict[str, Any] = {
        "attach": result.attach,
        "why": result.why or None,
        "hint": result.hint or None,
        "checks": [check._asdict() for check in checks],
        "target": None,
    }
    if planned:
        found = [{"library": library, "path": path} for library, path in libraries]
        answer["target"] = {
            "pid": planned.pid, "checks": [check._asdict() for check in about_target], "libraries": found,
            "would_probe": [file._asdict() for file in planned.files], "would_stay_unseen": planned.unseen,
            "remarks": planned.remarks,
            "cost_per_call_ns": {"entry": ENTRY_NS, "entry_and_return": PAIR_NS, "source": "estimated"},
        }  # fmt: skip
    return json.dumps(answer, indent=2) + "\n"


def _page(
    checks: list[Check], about_target: list[Check], libraries: list[tuple[str, str]], result: Verdict,
    planned: Plan | None,
) -> str:  # fmt: skip
    tty = sys.stdout.isatty()
    page = Console(
        file=io.StringIO(), width=min(WIDTH, _columns()), force_terminal=tty, highlight=False, markup=False,
        emoji=False, color_system="auto" if tty else None,
    )  # fmt: skip
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for check in [*checks, *about_target]:
        table.add_row(Text(check.state, _colour(check)), _told(check))
    page.print(table)
    for library, path in libraries:
        page.print(Text(f"pid {planned.pid} maps {library}: {path}" if planned else path))
    if planned and not libraries:
        page.print(
            Text(f"pid {planned.pid} maps no library named like CUDA's; a program may also hold the runtime itself")
        )
    for line in _planned_lines(planned) if planned else ():
        page.print(Text(line))
    page.print(_conclusion(result))
    text: str = page.file.getvalue()  # type: ignore[attr-defined]
    return printable(text, sys.stdout)


def _colour(check: Check) -> str:
    """Red is for what makes attach impossible or refused; what only limits it is yellow."""
    if check.state == "missing":
        return "red" if check.name in NEEDED or check.name in CAPABILITIES else "yellow"
    return COLOURS[check.state]


def _planned_lines(planned: Plan) -> Iterator[str]:
    for file in planned.files:
        known = f"build id {file.build_id}" if file.build_id else "no build id"
        yield f"would probe {file.library} in {file.path} ({known})"
        yield f"  {file.functions} functions, {file.timed} of them timed; by a {WAYS[file.way]}"
    if planned.files:
        entry, pair = ENTRY_NS / 1000, PAIR_NS / 1000
        yield f"cost: about {entry:.1f} us a launch, {pair:.1f} us a timed call (estimated: from our bench, not here)"
    for sentence in planned.unseen:
        yield f"would stay unseen: {sentence}"
    for sentence in planned.remarks:
        yield f"note: {sentence}"


def _columns() -> int:
    try:
        return max(40, os.get_terminal_size(sys.stdout.fileno()).columns)
    except OSError:
        return WIDTH


def _told(check: Check) -> Text:
    text = Text.assemble((check.name, "bold"), f": {check.detail}")
    if check.what_you_lose:
        text.append(f"\nyou lose: {check.what_you_lose}")
    if check.how_to_get_it:
        text.append(f"\nget it: {check.how_to_get_it}")
    return text


def _conclusion(result: Verdict) -> Text:
    if result.code == ExitCode.OK:
        return Text("stallscope attach works here", "bold green")
    return Text(f"attach is {result.attach}: {result.why}\n  next: {result.hint}", "bold red")

"""`stallscope ctl WORDS…`: what a running daemon tells, and the few things that it can be told."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from stallscope.control.client import ask
from stallscope.control.daemon_config import Places, read_config
from stallscope.errors import ArgumentProblem, ExitCode, StallscopeError
from stallscope.output.stdout import put
from stallscope.output.words import clean, count, duration

__all__ = ["add_parser", "run"]

HELP = """what to ask or to tell:
  status           processes, links, losses, own cost
  report           the report as it is now, as JSON
  incidents        the incidents of now, as JSON
  sample RATE      record that share of launches, copies and short waits from now on
  reload           read the configuration again, as SIGHUP does
  stop             end the daemon"""
OF_AGGREGATE = ("report", "incidents")


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "ctl", help="ask or tell a running daemon", allow_abbrev=False, epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("words", nargs="+", metavar="WORDS")
    parser.add_argument("--config", metavar="FILE", help="the daemon's configuration, where it names other sockets")
    parser.add_argument("--json", action="store_true", help="status as JSON on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask, print. Returns the exit code; raises StallscopeError."""
    places = read_config(args.config).places
    command, rest = args.words[0], args.words[1:]
    if command == "status" and not rest:
        text = _status(places, as_json=args.json)
    elif command in OF_AGGREGATE and not rest:
        text = ask(places.aggregate, [command])
    elif (command, len(rest)) in (("sample", 1), ("reload", 0), ("stop", 0)):
        text = ask(places.capture, [command, *rest])
    else:
        why = f"{' '.join(args.words)!r:.80} means nothing"
        raise ArgumentProblem("cannot run `stallscope ctl`", why=why, hint="stallscope ctl --help")
    put(text, sys.stdout, "cannot print the answer", "send it somewhere with room")
    return ExitCode.OK


def _status(places: Places, *, as_json: bool) -> str:
    found = json.loads(ask(places.capture, ["status"]))
    found["aggregate"] = _aggregate(places.aggregate)
    return json.dumps(found, indent=1) + "\n" if as_json else _lines(found)


def _aggregate(path: Path) -> dict[str, Any] | None:
    """What it says of itself; None while there is none: capture says so, too."""
    try:
        found: dict[str, Any] = json.loads(ask(path, ["status"]))
    except StallscopeError:
        return None
    return found


def _lines(found: dict[str, Any]) -> str:
    processes, cost, aggregate = found["processes"], found["cost"], found["aggregate"]
    lines = [
        f"up {duration(found['uptime_ns'])}, {count(len(processes))} processes traced, {count(found['ended'])} ended, "
        f"{count(found['links'])} links ({found['backend']}), 1 in {found['sample_one_in']:g} recorded"
    ]
    lines += [_process(row) for row in processes]
    lines += [f"kept out: {count(n)} ({clean(why)})" for why, n in sorted(found["denied"].items())]
    if found["unreadable"]:
        lines.append(f"can't be looked into: {count(found['unreadable'])} processes (stallscope doctor PID says why)")
    if found["missed"]:
        lines.append(f"ended before they could be looked at: {count(found['missed'])} (gaps in the report)")
    lost = ", ".join(f"{count(n)} {place}" for place, n in sorted(found["lost_by"].items()))
    lines.append(f"lost: {lost or 'nothing'}")
    lines.append(f"cost: {duration(cost['cpu_ns'])} of processor time, {cost['rss_bytes'] / 1e6:.0f} MB")
    if aggregate is None:
        lines.append("aggregator: none now; capture goes on and will tell it what it needs")
    else:
        lines.append(f"aggregator: {aggregate['incidents']} incidents in this stream, {aggregate['running']} running")
    return "\n".join(lines) + "\n"


def _process(row: dict[str, Any]) -> str:
    container = f", container {row['container_id'][:12]}" if row["container_id"] else ""
    libraries = " ".join(row["libraries"]) or "no library yet"
    return f"  pid {row['pid']} {clean(row['name'])} (user {row['uid']}{container}): {libraries} by {row['by']}"

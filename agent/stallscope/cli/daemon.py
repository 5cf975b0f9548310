"""`stallscope daemon`: every CUDA process of the node, for as long as it runs; incidents to journal, webhook, command.

By itself it starts parser, poller and aggregator, which give up all rights. As systemd units (deploy/systemd) capture,
parser and aggregator are started apart, each by its role.
"""

from __future__ import annotations

import argparse
import os
import pwd
import signal
import sys
from typing import TYPE_CHECKING, Any

from stallscope.cli.caller import Caller, caller
from stallscope.control.daemon_config import Config, read_config
from stallscope.control.server import listening
from stallscope.errors import ArgumentProblem, CaptureProblem, ExitCode

if TYPE_CHECKING:
    pass

__all__ = ["add_parser", "run"]

ROLES = ("all", "capture", "aggregate", "parser")


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("daemon", help="trace every CUDA process of this node", allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="settings (docs/daemon.md); read again on SIGHUP")
    parser.add_argument(
        "--role", choices=ROLES, default="all",
        help="what this process is where the parts are units of their own (default: all of it)",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="only say whether the configuration is right")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command. Returns the exit code; raises StallscopeError."""
    config = read_config(args.config)
    if args.check:
        from stallscope.cli.node import admission_of

        admission_of(config)
        print(f"{args.config or 'the default configuration'}: right")
        return ExitCode.OK
    if args.role == "aggregate":
        return _aggregate(config)
    if args.role == "parser":
        return _parse(config)
    from stallscope.cli.node import Node

    return Node(config, caller(), with_parts=args.role == "all").run()


def _capture_users(config: Config) -> frozenset[int]:
    """Whom parser and aggregator listen to: root, and the user of capture's unit. Raises ArgumentProblem."""
    name = config.capture["user"]
    try:
        return frozenset((0, int(name) if name.isdigit() else pwd.getpwnam(name).pw_uid))
    except KeyError as error:
        raise ArgumentProblem(
            "cannot tell who may send a stream", why=f"there is no user {name!r}",
            hint="set [sockets] capture_user to the user of stallscope-capture.service",
        ) from error  # fmt: skip


def _own_user() -> Caller:
    """Parser and aggregator have no business as root. Raises CaptureProblem."""
    who = caller()
    if who.drop_uid != who.uid or os.geteuid() == 0:
        raise CaptureProblem(
            "cannot start this part of the daemon", why="it must not run as root",
            hint="start it by its unit in deploy/systemd, or as a user of its own",
        )  # fmt: skip
    return who


def _aggregate(config: Config) -> int:
    """The aggregator as a unit of its own."""
    from stallscope.cli.node_aggregator import MEMORY_LIMIT_BYTES, NodeAggregator, prepared, serve_node
    from stallscope.wire.privdrop import drop_privileges

    who, users = _own_user(), _capture_users(config)
    with listening(config.places.frames) as frames, listening(config.places.aggregate) as ctl:
        parts = prepared(config)
        drop_privileges(who.uid, who.gid, memory=MEMORY_LIMIT_BYTES)
        node = NodeAggregator(config, *parts, listener=frames, capture_users=users)

        def stop(_number: int, _frame: object) -> None:
            node.stopping = True

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        print("ready for streams", file=sys.stderr, flush=True)
        return serve_node(node, ctl.dup(), who.uid)


def _parse(config: Config) -> int:
    """The parser as a unit of its own."""
    _own_user()
    users = sorted(_capture_users(config))
    with listening(config.places.parser) as listener:
        os.set_inheritable(listener.fileno(), True)
        words = [str(listener.fileno()), *map(str, users)]
        # Another image: what parses a target's bytes holds nothing of the command line's modules.
        os.execv(sys.executable, [sys.executable, "-B", "-I", "-m", "stallscope.parser.unit", *words])  # noqa: S606

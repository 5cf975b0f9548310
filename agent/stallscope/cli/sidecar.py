"""`stallscope sidecar`: read what shims leave in a folder, without privileges, and say who waits for whom."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stallscope.cli.arguments import rate, seconds
from stallscope.cli.caller import Caller, caller
from stallscope.cli.capturing import (
    LONG_NS,
    Aggregator,
    Parts,
    allow_files,
    hello,
    open_record,
    parts_of_capture,
    to_the_end,
)
from stallscope.cli.sidecar_config import MODES, SidecarConfig, settled
from stallscope.errors import ArgumentProblem, CaptureProblem, ExitCode, PermissionProblem, StallscopeError
from stallscope.paths import SHIM
from stallscope.wire.frames import Kind

if TYPE_CHECKING:
    from stallscope.capture.sidecarsession import SidecarSession

__all__ = ["add_parser", "run"]


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser = commands.add_parser(
        "sidecar", help="read the shims of other containers through a shared folder, without privileges",
        allow_abbrev=False, epilog="SIGUSR1: a report of this moment; SIGTERM, SIGINT: the report, and the end.",
    )  # fmt: skip
    parser.add_argument("--config", metavar="FILE", help="TOML, with these options as keys of [sidecar]")
    parser.add_argument("--install", metavar="DIR", help="copy the shim to DIR, say what a trainer needs, and end")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="the shared folder (default /stallscope/segments)")
    parser.add_argument(
        "--uid", type=_uid, action="append", dest="uids", metavar="UID",
        help="also read trainers of this user; may be given several times (default: our own user's)",
    )  # fmt: skip
    parser.add_argument("--mode", choices=MODES, help="as of `run`; keep: as the trainers were told (default)")
    parser.add_argument("--sample", type=rate, metavar="RATE", help="as of `run` (default 1/100)")
    parser.add_argument(
        "--end-after", type=seconds, metavar="S", help="end when no trainer was there for S seconds, once one was"
    )
    parser.add_argument("--report", metavar="FILE", help="also write the report to FILE, as JSON")
    parser.add_argument("-o", "--output", metavar="FILE", help="also record to FILE")
    parser.add_argument("--force", action="store_const", const=True, help="overwrite the recording")
    parser.add_argument("--json", action="store_const", const=True, help="report as JSON on stdout")
    parser.set_defaults(run=run)


def _uid(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a user id (a number)")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """The command. Returns the exit code; raises StallscopeError."""
    config = settled(args)
    if args.install:
        return _install(Path(args.install), config)
    if config.force and not config.output:
        raise ArgumentProblem("--force makes no sense", why="there is no -o FILE to overwrite", hint="leave it out")
    if not config.dir.is_dir():
        raise ArgumentProblem(
            f"cannot watch {config.dir}", why="it is no folder here",
            hint="mount the volume that the trainers make their segments in, and name it with --dir",
        )  # fmt: skip
    return Sidecar(config, _who(config)).run()


def _install(folder: Path, config: SidecarConfig) -> int:
    """Put the library where a trainer can load it; a running one keeps the file that it has."""
    target = folder / SHIM.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=".stallscope-", dir=folder)
        os.close(fd)
        shutil.copyfile(SHIM, name)
        os.chmod(name, 0o755)  # noqa: S103 - trainers of any user load it
        os.replace(name, target)
    except OSError as error:
        raise CaptureProblem(
            f"cannot install the shim in {folder}", why=f"{error.strerror} ({error.filename})",
            hint="the folder has to be writable for this step; for the trainer it need not be",
        ) from error  # fmt: skip
    print(f"LD_PRELOAD={target}\nSTALLSCOPE_SHIM=dir:{config.dir}")
    return ExitCode.OK


def _who(config: SidecarConfig) -> Caller:
    """Whom the parts without rights become: nobody, if we are root and may change users."""
    from stallscope.capture.rights import capability_held

    who = caller()
    if os.geteuid() != 0:
        return who
    if not all(map(capability_held, ("CAP_SETUID", "CAP_SETGID"))):
        raise PermissionProblem(
            "cannot run as root without CAP_SETUID and CAP_SETGID",
            why="what reads the trainers' data must not be root, and nobody can be become",
            hint="give the container a user (runAsUser: 65532); nothing here needs root",
        )
    if config.report:
        raise ArgumentProblem(
            f"cannot write the report to {config.report}", why="what reports is nobody's where the sidecar is root",
            hint="give the container a user (runAsUser: 65532), or take the report from stdout",
        )  # fmt: skip
    return who


class Sidecar:
    """One run of the command."""

    def __init__(self, config: SidecarConfig, who: Caller) -> None:
        self.config, self.who = config, who
        self._stop = self._show = self._begun = False

    def _signal(self, number: int, _frame: object) -> None:
        self._stop |= number != signal.SIGUSR1
        self._show |= number == signal.SIGUSR1

    def run(self) -> int:
        """Watch, report, exit code."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._signal)
        allow_files()
        record_fd = open_record(self.config.output, self.config.force, self.who)
        aggregator = Aggregator(self.who, record_fd, self.config.json, report=self.config.report)
        if record_fd is not None:
            os.close(record_fd)
        return to_the_end(aggregator, self._capture, lambda: self._begun)

    def _capture(self, aggregator: Aggregator) -> StallscopeError | None:
        with parts_of_capture(aggregator, self.who) as parts:
            parts.outbox.send(Kind.HELLO, hello([], "shim", ["shim"], self.config.sample, LONG_NS))
            session = self._session(parts)
            try:
                session.watch()
                self._begun = True
                whose = ", ".join(map(str, sorted(self.config.readable)))
                print(f"watching {self.config.dir} for segments of uid {whose}", file=sys.stderr, flush=True)
                session.run(lambda: self._step(session, aggregator))
                session.finish()
            finally:
                session.close()
            return parts.send_rest()

    def _session(self, parts: Parts) -> SidecarSession:
        from stallscope.capture.folder import Folder
        from stallscope.capture.sidecarsession import SidecarSession

        def tell(text: str) -> None:
            parts.note(text)
            print(f"stallscope: {text}", file=sys.stderr, flush=True)

        config = self.config
        end_after_ns = None if config.end_after is None else int(config.end_after * 1e9)
        shims = parts.shims(None if config.mode == "keep" else config.mode, one_in=config.sample)
        folder = Folder(config.dir, config.readable, tell)
        helpers = lambda: {parts.aggregate, parts.parser.pid or 0, parts.poller.pid or 0}  # noqa: E731
        session = SidecarSession(folder, end_after_ns, parts.outbox, shims, parts.parser, parts.costs, helpers)
        session.poller = parts.poller
        return session

    def _step(self, session: SidecarSession, aggregator: Aggregator) -> bool:
        """Have a report shown that was asked for; whether to end."""
        if self._show and not self._stop:
            self._show = False
            session.bring_up_to_date()
            aggregator.show()
        return self._stop

"""The aggregating process: frames from a socket into a recording and a report, without any privilege.

`attach`, `run` and `sidecar` start it as ``python -m stallscope.cli.aggregator --socket-fd N [--record-fd M]
[--json|--on-stderr] [--report FILE] --uid U --gid G``.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import NamedTuple, TextIO

from stallscope.diagnose.follow import Follower
from stallscope.errors import ExitCode
from stallscope.output.announce import Announcer
from stallscope.output.finish import finish, warm_up
from stallscope.output.report import report_json
from stallscope.output.stdout import OutputProblem
from stallscope.wire.frames import FILE_HEADER_BYTES, BadFrame, Decoder, Kind
from stallscope.wire.privdrop import PrivilegeDropError, drop_privileges
from stallscope.wire.recording import Ending, Recorder

__all__ = ["main", "receive"]

CHUNK_BYTES = 1 << 18
MEMORY_LIMIT_BYTES = 2 << 30


def receive(
    sock: socket.socket, follower: Follower, recorder: Recorder | None, announcer: Announcer,
    between: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Take frames until the farewell, the end of the stream, or bytes that are no frame; tell incidents at once.

    `between` is called when some have been taken, at least with every tick.
    """
    # Offsets as in the recording, so that live and replayed reports name the same byte.
    decoder = Decoder(offset=FILE_HEADER_BYTES)
    try:
        while data := _next(sock):
            if recorder:
                recorder.write(data)
            for frame in decoder.feed(data):
                if follower.apply(frame):
                    announcer.look(follower.watch)
                if frame.kind == Kind.BYE:
                    follower.finish(None)
                    return
            between()
    except BadFrame as error:
        follower.finish(Ending(error.offset, 0, error.why))
        return
    follower.finish(Ending(decoder.offset, decoder.pending))


def _next(sock: socket.socket) -> bytes:
    """The next bytes; none when the capture closed the socket or was killed."""
    try:
        return sock.recv(CHUNK_BYTES)
    except OSError:
        return b""


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="stallscope.cli.aggregator", description="internal: for attach and run")
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--record-fd", type=int)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--on-stderr", action="store_true", help="the report for a person goes there")
    parser.add_argument("--report", metavar="FILE", help="it also goes there, as JSON")
    parser.add_argument("--uid", type=int)
    parser.add_argument("--gid", type=int)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run until the capture ends; the exit code of `attach`."""
    args = _arguments(argv)
    # Ctrl-C goes to the whole foreground group; the capture decides when it is over and says so by a frame.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    warm_up(as_json=args.json)
    if args.report:
        warm_up(as_json=True)
    recording = _path_of(args.record_fd)
    if args.uid is not None:
        try:
            drop_privileges(args.uid, args.gid, memory=MEMORY_LIMIT_BYTES)
        except PrivilegeDropError as error:
            sys.stderr.write(
                f"stallscope: cannot start the aggregator: {error}\n  next: run it with sudo, or as root\n"
            )
            return ExitCode.FAILED
    recorder = Recorder(args.record_fd) if args.record_fd is not None else None
    follower = Follower()
    shown = Shown(args.json, sys.stderr if args.on_stderr else sys.stdout, args.report)
    with socket.socket(fileno=args.socket_fd) as sock:
        receive(sock, follower, recorder, Announcer(sys.stderr), _snapshots(follower, shown))
    return _close(follower, recorder, recording, shown)


class Shown(NamedTuple):
    """Where the report goes; `file`: also there, as JSON."""

    as_json: bool
    out: TextIO
    file: str | None


def _snapshots(follower: Follower, shown: Shown) -> Callable[[], None]:
    """Prints a report of that moment after a SIGUSR1, in a copy of this process: a report ends what is told."""
    asked: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _frame: asked.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1,))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the copies

    def show() -> None:
        if not asked:
            return
        asked.clear()
        if os.fork() == 0:
            code = 1
            try:
                follower.finish(None)
                code = _print(follower, shown)
            finally:
                os._exit(code)

    return show


def _path_of(record_fd: int | None) -> str:
    """The recording's name for messages; /proc/self can't be read once the privileges are gone."""
    if record_fd is None:
        return ""
    try:
        return os.readlink(f"/proc/self/fd/{record_fd}")
    except OSError:
        return f"descriptor {record_fd}"


def _close(follower: Follower, recorder: Recorder | None, recording: str, shown: Shown) -> int:
    """Print what is to be printed. A recording that is not whole is a failure even where the report is."""
    code: int = ExitCode.OK
    if recorder:
        recorder.close()
        if recorder.problem:
            code = ExitCode.FAILED
            sys.stderr.write(
                f"stallscope: the recording {recording} is incomplete: {recorder.problem}\n"
                "  next: the report is whole; free space and record again if you need the file\n"
            )
    return _print(follower, shown) or code


def _print(follower: Follower, shown: Shown) -> int:
    """The report to all places; the exit code."""
    code: int = _write_file(follower, shown.file) if shown.file else ExitCode.OK
    try:
        return finish(follower.state, follower.watch, as_json=shown.as_json, out=shown.out, err=sys.stderr) or code
    except OutputProblem as error:
        sys.stderr.write(f"stallscope: {error}\n")
    except BrokenPipeError:
        pass  # `| head`: nobody reads any more
    return ExitCode.FAILED


def _write_file(follower: Follower, path: str) -> int:
    """Whole or not at all: somebody may be reading the one before."""
    try:
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            file.write(report_json(follower.state, follower.watch))
        os.replace(f"{path}.new", path)
    except OSError as error:
        sys.stderr.write(f"stallscope: cannot write the report to {path}: {error.strerror}\n")
        sys.stderr.write("  next: name a file that the user of the sidecar may write\n")
        return ExitCode.FAILED
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())

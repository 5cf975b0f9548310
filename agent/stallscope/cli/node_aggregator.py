"""The aggregating process of a daemon: streams from capture, one after the other, into reports, metrics and messages.

`stallscope daemon` starts it as ``python -m stallscope.cli.node_aggregator --frames-fd N --ctl-fd M --uid U --gid G
[--owner UID] [--config FILE]``; as a unit of its own it is `stallscope daemon --role aggregate`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from stallscope.control.daemon_config import Config, read_config
from stallscope.control.server import ControlServer, peer_of
from stallscope.diagnose.follow import Follower
from stallscope.errors import ArgumentProblem, ExitCode, StallscopeError
from stallscope.output.finish import warm_up
from stallscope.output.notify import Notifier, Receiver, command_of, message, webhook_of
from stallscope.output.notify import warm_up as warm_up_notify
from stallscope.output.prometheus import Metrics, serve
from stallscope.output.report import report_json
from stallscope.output.tapes import Tapes
from stallscope.wire.frames import FILE_HEADER_BYTES, BadFrame, Decoder, Frame, Kind
from stallscope.wire.privdrop import PrivilegeDropError, drop_privileges
from stallscope.wire.recording import Ending

__all__ = ["NodeAggregator", "main", "prepared"]

CHUNK_BYTES = 1 << 18
MEMORY_LIMIT_BYTES = 2 << 30
TURN_S, METRICS_EVERY_S = 0.25, 2.0
LAST_WORDS_S = 0.2
# Of the 256 incidents that a stream may have.
MANY_INCIDENTS, MOST_INCIDENTS, AGAIN_S = 192, 250, 300.0
WORDS = "report, incidents, status"


class NodeAggregator:
    """`run` until `stop`, or until the only stream that there will be has ended.

    Args:
        frames: a connected stream; or a listener for streams, one at a time, of `capture_users`.
        ctl: the server of `stallscope ctl`, or None.
    """

    def __init__(
        self, config: Config, notifier: Notifier, metrics: Metrics, tapes: Tapes | None, *,
        stream: socket.socket | None = None, listener: socket.socket | None = None,
        capture_users: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self._config, self._notifier, self._metrics, self._tapes = config, notifier, metrics, tapes
        self._stream, self._listener, self._users = stream, listener, capture_users
        self.ctl: ControlServer | None = None
        self.follower = Follower()
        self.streams = 0
        self._decoder, self._raw = Decoder(offset=FILE_HEADER_BYTES), bytearray()
        self._next_metrics_s = 0.0
        self._told_problem: str | None = None
        self._begun_s = 0.0
        self._is_over = True
        self.stopping = False

    def run(self) -> None:
        """Take what comes."""
        while not self.stopping and (self._stream is not None or self._listener is not None):
            read, write = self.ctl.waits_for() if self.ctl else ([], [])
            read += [sock for sock in (self._stream, self._listener) if sock is not None]
            ready, _, _ = select.select(read, write, [], TURN_S)
            if self._listener in ready:
                self._accept()
            if self._stream in ready:
                self._receive()
            if self.ctl:
                self.ctl.poll()
            self._measure()
        self._close_stream()

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            pid, uid = peer_of(sock)
            if uid not in self._users:
                self._notifier.say(f"a stream of process {pid} is refused: it is of user {uid}")
                sock.close()
                return
            self._close_stream()
            sock.setblocking(True)
            self._stream = sock
            self._decoder, self._raw = Decoder(offset=FILE_HEADER_BYTES), bytearray()

    def _receive(self) -> None:
        assert self._stream is not None
        try:
            data = self._stream.recv(CHUNK_BYTES)
        except OSError:
            data = b""
        if not data:
            self._close_stream()
            return
        self._raw += data
        begin = self._decoder.offset
        try:
            for frame in self._decoder.feed(data):
                size = self._decoder.offset - begin
                begin = self._decoder.offset
                self._take(frame, bytes(self._raw[:size]))
                del self._raw[:size]
                if self._stream is None:
                    return
        except BadFrame as error:
            self.follower.finish(Ending(error.offset, 0, error.why))
            self._notifier.say(f"the stream of capture makes no sense and is closed: {error.why}")
            self._close_stream()

    def _take(self, frame: Frame, raw: bytes) -> None:
        if frame.kind == Kind.HELLO:
            self._begin()
        is_looked = self.follower.apply(frame)
        if self._tapes is not None:
            if frame.kind == Kind.HELLO and self.follower.state.capture is not None:
                self._tapes.begin(self.follower.state.capture.start_unix_ns)
            self._tapes.write(raw)
            self._tell_tapes(self._tapes.problem)
        if is_looked:
            self._notifier.look(self.follower.state, self.follower.watch.incidents)
            self._ask_for_another_if_full()
        if self.follower.state.dropped is not None:
            self._hang_up(f"the stream of capture is not listened to any more: {self.follower.state.dropped}")
        if frame.kind == Kind.BYE:
            self.follower.finish(None)

    def _ask_for_another_if_full(self) -> None:
        """Where a table turns something away, something of ours failed, or there are many incidents: capture tells
        whoever asks anew, and what has ended is forgotten. Not while a block lasts, and not again and again."""
        state, watch = self.follower.state, self.follower.watch
        is_full = len(watch.incidents) >= MANY_INCIDENTS or bool(state.overflow.turned_away)
        if not (is_full or state.faults) or time.monotonic() - self._begun_s < AGAIN_S:
            return
        if state.faults:
            sys.stderr.write(f"{state.faults.first}\n")
            self._hang_up(f"the aggregator begins anew: {state.faults.notes()[0]}")
        elif len(watch.incidents) >= MOST_INCIDENTS or all(one.end_ns is not None for one in watch.incidents):
            self._hang_up("the aggregator begins anew: its tables are full")

    def _hang_up(self, why: str) -> None:
        self._notifier.say(why)
        self._close_stream()

    def _tell_tapes(self, problem: str | None) -> None:
        if problem != self._told_problem:
            self._told_problem = problem
            self._notifier.say(f"the recording is not whole: {problem}")

    def _begin(self) -> None:
        """Another stream: what the one before told is summed up, and forgotten."""
        if self.follower.state.capture is not None:
            self._end()
            self._metrics.ledger.close(self.follower.state, self.follower.watch)
            self._notifier.forget()
            self.follower = Follower()
        self._begun_s, self._is_over = time.monotonic(), False
        self.streams += 1

    def _end(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        state = self.follower.state
        if not state.complete:
            self.follower.finish(Ending(self._decoder.offset, 0))
        self._notifier.look(state, self.follower.watch.incidents)

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
            self._end()
            if self._tapes is not None:
                self._tapes.close()

    def _measure(self) -> None:
        now = time.monotonic()
        if now >= self._next_metrics_s:
            self._next_metrics_s = now + METRICS_EVERY_S
            self._metrics.update(self.follower.state, self.follower.watch, self._notifier.receivers)

    def answer(self, words: list[str]) -> str:
        """To `stallscope ctl`. Raises StallscopeError."""
        state, watch = self.follower.state, self.follower.watch
        if state.capture is None and words != ["status"]:
            raise StallscopeError(
                "cannot report yet", why="capture has not told anything", hint="ask again in a second"
            )
        if words == ["report"]:
            return report_json(state, watch)
        if words == ["incidents"]:
            rows = [message(state, one, "closed" if one.end_ns is not None else "opened") for one in watch.incidents]
            return json.dumps(rows, indent=1) + "\n"
        if words == ["status"]:
            return json.dumps(self._status()) + "\n"
        raise ArgumentProblem(
            "cannot do that", why=f"the aggregator does not know {words!r:.80}", hint=f"one of {WORDS}"
        )

    def _status(self) -> dict[str, Any]:
        watch, receivers = self.follower.watch, self._notifier.receivers
        return {
            "pid": os.getpid(),
            "streams": self.streams,
            "incidents": len(watch.incidents),
            "running": sum(one.end_ns is None for one in watch.incidents),
            "hooks": {receiver.name: dict(receiver.counts) for receiver in receivers},
            "recording": None if self._tapes is None else self._tapes.problem or "ok",
        }


def prepared(config: Config) -> tuple[Notifier, Metrics, Tapes | None]:
    """Everything that needs rights, or modules that can't be read later. What is missing is told on stderr."""
    warm_up(as_json=True)
    warm_up_notify()
    notifier = Notifier(sys.stderr if config.incidents["journal"] else None, _receivers(config))
    metrics, port = Metrics(), config.metrics["port"]
    if port:
        try:
            serve(metrics, config.metrics["address"], port)
        except OSError as error:
            where = f"{config.metrics['address']}:{port}"
            sys.stderr.write(f"stallscope: no /metrics on {where}: {error.strerror}\n  next: set [metrics] port\n")
    folder = config.record["folder"]
    tapes = None if folder is None else Tapes(Path(folder), config.record["files"])
    return notifier, metrics, tapes


def _receivers(config: Config) -> list[Receiver]:
    given, found = config.incidents, []
    if given["webhook"] is not None:
        found.append(Receiver("webhook", webhook_of(given["webhook"], given["webhook_timeout_s"]), given["queue"]))
    if given["command"]:
        found.append(Receiver("command", command_of(given["command"], given["command_timeout_s"]), given["queue"]))
    return found


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="stallscope.cli.node_aggregator", description="internal: for daemon")
    parser.add_argument("--frames-fd", type=int, required=True)
    parser.add_argument("--ctl-fd", type=int, required=True)
    for name in ("--uid", "--gid", "--owner"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--config")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run until the capture's stream ends."""
    args = _arguments(argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # capture ends the stream
    try:
        config = read_config(args.config)
        notifier, metrics, tapes = prepared(config)
        drop_privileges(args.uid, args.gid, memory=MEMORY_LIMIT_BYTES)
    except (StallscopeError, PrivilegeDropError) as error:
        sys.stderr.write(f"stallscope: cannot start the aggregator: {error}\n")
        return ExitCode.FAILED
    stream = socket.socket(fileno=args.frames_fd)
    node = NodeAggregator(config, notifier, metrics, tapes, stream=stream)
    return serve_node(node, socket.socket(fileno=args.ctl_fd), args.owner)


def serve_node(node: NodeAggregator, ctl: socket.socket, owner: int) -> int:
    """Run with a control socket; what waits for a hook then has a moment to go out."""
    ctl.setblocking(False)
    node.ctl = ControlServer(ctl, {owner}, node.answer)
    try:
        node.run()
    finally:
        node.ctl.close()
        for receiver in node._notifier.receivers:
            receiver.close(LAST_WORDS_S)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())

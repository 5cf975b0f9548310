"""The capturing process of `stallscope daemon`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, BinaryIO

from stallscope.cli.caller import Caller
from stallscope.cli.capturing import LONG_NS, allow_files, hello
from stallscope.control.daemon_config import Config, read_config
from stallscope.control.server import ControlServer, listening, peer_of
from stallscope.errors import ArgumentProblem, CaptureProblem, ExitCode, PermissionProblem, StallscopeError
from stallscope.wire.frames import Kind

if TYPE_CHECKING:
    from stallscope.capture.admission import Admission
    from stallscope.capture.costs import Costs
    from stallscope.capture.node import NodeSession
    from stallscope.capture.parser_client import ParserClient

__all__ = ["Node", "admission_of"]

PRIORITY = -10
LAST_FRAMES_S, LAST_REPORT_S = 0.3, 0.4
PARSER_S = 15.0
WORDS = "status, sample RATE, reload, stop"


def admission_of(config: Config) -> Admission:
    """The rules. Raises ArgumentProblem for a user that there is not."""
    from stallscope.capture.admission import Admission, Rule

    try:
        return Admission([Rule.of(row) for row in config.allow], [Rule.of(row) for row in config.deny])
    except KeyError as error:
        raise ArgumentProblem(
            "cannot use the configuration", why=f"{config.path}: {error.args[0]}",
            hint="name a user of this host, or give the number",
        ) from error  # fmt: skip


def _as_file(text: str) -> BinaryIO:
    """The settings that count: what is in the configuration's own file by now may be wrong, or not told to us yet."""
    file = open(os.memfd_create("stallscope-settings"), "wb", buffering=0)  # noqa: SIM115 - the caller's
    file.write(text.encode())
    return file


class Spawned:
    """The aggregator as a child, started again whenever it is gone."""

    def __init__(self, config: Config, who: Caller, ctl: socket.socket) -> None:
        self.config, self._who, self._ctl = config, who, ctl
        self._process: subprocess.Popen[bytes] | None = None
        self.costs: Costs | None = None

    def connect(self) -> socket.socket | None:
        """A fresh one; None where it can't be started now."""
        self.end(0)
        ours, theirs = socket.socketpair()
        words = ["--frames-fd", str(theirs.fileno()), "--ctl-fd", str(self._ctl.fileno())]
        words += ["--uid", str(self._who.drop_uid), "--gid", str(self._who.drop_gid), "--owner", str(self._who.uid)]
        with theirs, _as_file(self.config.text) as settings:
            words += ["--config", f"/proc/self/fd/{settings.fileno()}"]
            command = [sys.executable, "-I", "-m", "stallscope.cli.node_aggregator", *words]
            kept = [theirs.fileno(), self._ctl.fileno(), settings.fileno()]
            try:
                self._process = subprocess.Popen(
                    command, pass_fds=kept, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
                )  # fmt: skip
            except OSError as error:
                ours.close()
                _say(f"stallscope: cannot start the aggregator: {error.strerror}")
                return None
        if self.costs is not None:
            self.costs.set("aggregate", self._process.pid)
        return ours

    def end(self, timeout_s: float) -> None:
        """Give it so long to end by itself."""
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self._process.kill()
        self._process.wait()
        self._process = None


class Connected:
    """The aggregator as a unit of its own."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.costs: Costs | None = None

    def connect(self) -> socket.socket | None:
        """The one that listens now."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(1)
            sock.connect(str(self.config.places.frames))
        except OSError:
            sock.close()
            return None
        if self.costs is not None:
            self.costs.set("aggregate", peer_of(sock)[0])
        return sock

    def end(self, timeout_s: float) -> None:
        """It stays."""


class Node:
    """One run of the command.

    Args:
        with_parts: whether parser and aggregator are its children; else they are units of their own.
    """

    def __init__(self, config: Config, who: Caller, *, with_parts: bool) -> None:
        self._config, self._who, self._with_parts = config, who, with_parts
        self._stop = self._reload = False
        self._session: NodeSession | None = None
        self._server: ControlServer | None = None
        self._backend = "unknown"

    def _signal(self, number: int, _frame: object) -> None:
        self._stop = self._stop or number != signal.SIGHUP
        self._reload = self._reload or number == signal.SIGHUP

    def run(self) -> int:
        """Until a signal or `ctl stop`."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._signal)
        self._missing = _require_rights()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
        allow_files()
        with contextlib.ExitStack() as stack:
            own = stack.enter_context(listening(self._config.places.capture))
            self._server = ControlServer(own, {self._who.uid}, self._answer)
            stack.callback(self._server.close)
            self._reader = self._make_reader(stack)
            self._capture(stack)
        return ExitCode.OK

    def _make_reader(self, stack: contextlib.ExitStack) -> Spawned | Connected:
        if not self._with_parts:
            return Connected(self._config)
        ctl = stack.enter_context(listening(self._config.places.aggregate))
        self._make_folder(self._config)
        return Spawned(self._config, self._who, ctl)

    def _make_folder(self, config: Config) -> None:
        """Of the recordings: the aggregator's. Raises CaptureProblem."""
        folder = config.record["folder"]
        if folder is None:
            return
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            if os.geteuid() == 0 and os.stat(folder).st_uid == 0:
                os.chown(folder, self._who.drop_uid, self._who.drop_gid)
        except OSError as error:
            raise CaptureProblem(
                f"cannot record to {folder}", why=os.strerror(error.errno or 0),
                hint="name another [record] folder, or leave it out",
            ) from error  # fmt: skip

    def _capture(self, stack: contextlib.ExitStack) -> None:
        from stallscope.capture.costs import Costs
        from stallscope.capture.forward import Poller
        from stallscope.capture.parser_client import ParserClient
        from stallscope.capture.parser_unit import ParserUnit

        parser = ParserClient() if self._with_parts else ParserUnit(self._config.places.parser)
        stack.callback(parser.close)
        self._start(parser)
        poller = stack.enter_context(contextlib.closing(Poller()))
        poller.start(self._who.drop_uid, self._who.drop_gid)
        costs = Costs({"capture": os.getpid(), "parser": parser.pid or 0, "poller": poller.pid or 0})
        self._reader.costs = costs
        stack.callback(lambda: self._reader.end(LAST_REPORT_S))
        session = self._session = self._make_session(parser, costs)
        session.poller = poller
        try:
            session.start()
            self._say_started(session)
            session.run(self._turn)
            session.finish()
        finally:
            session.close()
            session.outbox.close(LAST_FRAMES_S)

    def _start(self, parser: ParserClient) -> None:
        """Units are started side by side: it may take a moment until it listens. Raises CaptureProblem."""
        from stallscope.capture.parser_client import ParserFailed

        end = time.monotonic() + (0 if self._with_parts else PARSER_S)
        while not self._stop:
            try:
                parser.start(self._who.drop_uid, self._who.drop_gid)
                return
            except ParserFailed as problem:
                if time.monotonic() > end:
                    hint = "systemctl status stallscope-parser" if not self._with_parts else "stallscope doctor"
                    raise CaptureProblem("cannot watch this node", why=str(problem), hint=hint) from problem

    def _make_session(self, parser: Any, costs: Costs) -> NodeSession:
        from stallscope.capture.held import ShimSettings
        from stallscope.capture.linkstyle import best_style
        from stallscope.capture.loader import load
        from stallscope.capture.node import NodeSession
        from stallscope.capture.retained import NodeOutbox, Retained
        from stallscope.capture.session import Settings
        from stallscope.capture.shimlinks import ShimLinks
        from stallscope.capture.shims import Shims
        from stallscope.capture.shimsites import ShimSites
        from stallscope.capture.tables import BULK_BYTES, VITAL_BYTES

        given = self._config.capture
        loaded = load(given["backend"], bulk_bytes=BULK_BYTES, vital_bytes=VITAL_BYTES, style=best_style())
        self._backend = loaded.backend
        outbox = NodeOutbox(Retained(), self._first_reader())
        outbox.send(Kind.HELLO, self.hello())
        for note in (*loaded.notes, *self._missing):
            outbox.send(Kind.NOTE, {"at_ns": time.monotonic_ns(), "proc": None, "text": note})
        shims = Shims(
            outbox, time.monotonic_ns, ShimLinks(parser, outbox.send, time.monotonic_ns),
            ShimSettings(None, given["sample"]), ShimSites(parser, outbox.send, time.monotonic_ns),
        )  # fmt: skip
        record = self._config.record
        settings = Settings([], True, given["sample"], LONG_NS, returns=given["returns"])
        return NodeSession(
            settings, loaded, outbox, parser, costs, shims,
            admission=admission_of(self._config), reader=self, most_ended=given["processes"],
            most_bytes=None if record["folder"] is None else record["file_mb"] << 20,
        )  # fmt: skip

    def _first_reader(self) -> socket.socket:
        """Where there is none yet: a socket that is closed at the other end, so that one is looked for."""
        found = self._reader.connect()
        if found is not None:
            return found
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours

    def connect(self) -> socket.socket | None:
        """For the session: another aggregator."""
        return self._reader.connect()

    def hello(self) -> dict[str, Any]:
        """For the session: the first frame of a stream."""
        one_in = self._session.settings.one_in if self._session else self._config.capture["sample"]
        return hello([], self._backend, ["bpf"], one_in, LONG_NS)

    def _say_started(self, session: NodeSession) -> None:
        count = len(session.population.live())
        _say(f"watching this node: {count} processes use CUDA now")
        for note in self._missing:
            _say(f"note: {note}")

    def _turn(self) -> bool:
        """Between two looks: what people want. Whether it is over."""
        if self._server is not None:
            self._server.poll()
        if self._reload:
            self._reload = False
            try:
                _say(self._read_again())
            except StallscopeError as error:
                _say(f"stallscope: the old configuration stays: {error}")
        return self._stop

    def _read_again(self) -> str:
        """The configuration, and what came of it. Raises StallscopeError; nothing is changed then."""
        old, new = self._config, read_config(self._config.path)
        admission = admission_of(new)
        fixed = [key for key in ("backend", "returns", "processes") if new.capture[key] != old.capture[key]]
        fixed += ["sockets"] if new.places != old.places else []
        assert self._session is not None
        is_other = any(getattr(new, name) != getattr(old, name) for name in ("incidents", "metrics", "record"))
        if is_other and self._with_parts:
            self._make_folder(new)
        # The sockets are where they are until a restart.
        self._config = self._reader.config = dataclasses.replace(new, places=old.places)
        if new.capture["sample"] != old.capture["sample"]:
            self._session.sample(new.capture["sample"])
        gone, came = self._session.reload(admission)
        if is_other and self._with_parts:
            self._session.outbox.hang_up()
        waits = f"; {', '.join(fixed)} will count after a restart" if fixed else ""
        apart = "; restart stallscope-aggregate for its part" if is_other and not self._with_parts else ""
        return f"configuration read again: {gone} processes let go, {came} more traced{waits}{apart}"

    def _answer(self, words: list[str]) -> str:
        """To `stallscope ctl`. Raises StallscopeError."""
        session = self._session
        if session is None:
            raise CaptureProblem("cannot do that yet", why="the daemon is starting", hint="ask again in a second")
        if words == ["status"]:
            return json.dumps(session.status()) + "\n"
        if words == ["stop"]:
            self._stop = True
            return "stopping\n"
        if words == ["reload"]:
            return self._read_again() + "\n"
        if len(words) == 2 and words[0] == "sample":
            return self._sample(session, words[1])
        raise ArgumentProblem("cannot do that", why=f"the daemon does not know {words!r:.80}", hint=f"one of {WORDS}")

    def _sample(self, session: NodeSession, text: str) -> str:
        import argparse

        from stallscope.cli.arguments import rate

        try:
            one_in = rate(text)
        except argparse.ArgumentTypeError as error:
            raise ArgumentProblem("cannot set the sample rate", why=str(error), hint="as in: sample 1/100") from error
        session.sample(one_in)
        return f"1 in {one_in:g} launches, copies and short waits is recorded from now on; counts stay exact\n"


def _say(text: str) -> None:
    """On stderr, which may be a terminal that is gone: a SIGHUP comes then, too."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _require_rights() -> list[str]:
    """What is lost for want of a capability. Raises PermissionProblem where nothing at all would work."""
    from stallscope.capture.preflight import CAPABILITIES
    from stallscope.capture.rights import capability_held, refusal

    found = refusal()
    if found:
        raise PermissionProblem("cannot watch this node", why=found.why, hint=found.hint)
    return [f"{name} is missing: {lost}" for name, lost in CAPABILITIES.items() if not capability_held(name)]

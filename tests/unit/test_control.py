"""The configuration file and the control socket: what is wrong is told by its line, and who asks by the kernel."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stallscope.cli.caller import caller
from stallscope.cli.node import Spawned
from stallscope.control import server as module
from stallscope.control.client import ask
from stallscope.control.daemon_config import read_config
from stallscope.control.server import ControlServer, listen
from stallscope.errors import ArgumentProblem, CaptureProblem, ExitCode, PermissionProblem, StallscopeError


@pytest.mark.parametrize(
    ("text", "line", "why", "hint"),
    [
        ("[captur]\n", 1, "there is no section [captur]", "did you mean capture?"),
        ("\n[capture]\n\nsampel = '1'\n", 4, "[capture] has no key 'sampel'", "did you mean sample?"),
        ("[capture]\nsample = 3\n", 2, "[capture] sample is 3", "give a rate above 0"),
        ("[capture]\nsample = '2/1'\n", 2, "[capture] sample is '2/1'", "give a rate above 0"),
        ("[capture\n", 1, "no TOML", "toml.io"),
        ("[[allow]]\nuser = 'a'\n[[allow]]\nusr = 'b'\n", 4, "[[allow]] has no key 'usr'", "did you mean user?"),
        ("[allow]\nuser = 'a'\n", 1, "[allow] is one of several", "[[allow]]"),
        ("[incidents]\nwebhook = 'file:///etc/passwd'\n", 2, "webhook is 'file:", "http://"),
        ("[incidents]\nwebhook = 'http://[::1/'\n", 2, "webhook is 'http://[::1/'", "http://"),
        ("[incidents]\nwebhook = 'http://host:99999/'\n", 2, "webhook is 'http://host:99999/'", "http://"),
        ("[incidents]\nwebhook = 'http://host:port/'\n", 2, "webhook is 'http://host:port/'", "http://"),
        ("[[deny]]\ncontainer = 'my-trainer'\n", 2, "container is 'my-trainer'", "hexadecimal"),
        ("[incidents]\ncommand = ['logger']\n", 2, "command is ['logger']", "whole path"),
        ("[incidents]\ncommand = 'rm -rf'\n", 2, "command is 'rm -rf'", "a list of texts"),
        ("[metrics]\naddress = '0.0.0.0'\n", 2, "address is '0.0.0.0'", "loopback"),
        ("[metrics]\nport = true\n", 2, "port is True", "a whole number"),
        ("[record]\nfolder = 'here'\n", 2, "folder is 'here'", "whole path"),
    ],
)
def test_a_mistake_is_told_by_its_line(tmp_path: Path, text: str, line: int, why: str, hint: str) -> None:
    """What, on which object, why, what next."""
    path = tmp_path / "daemon.toml"
    path.write_text(text)
    with pytest.raises(ArgumentProblem) as caught:
        read_config(str(path))
    assert f"{path}, line {line}: " in caught.value.why
    assert why in caught.value.why and hint in caught.value.hint
    assert caught.value.exit_code == ExitCode.BAD_ARGUMENTS


def test_a_file_that_is_none(tmp_path: Path) -> None:
    """Not there, too long, not UTF-8."""
    with pytest.raises(ArgumentProblem, match="No such file"):
        read_config(str(tmp_path / "none"))
    path = tmp_path / "daemon.toml"
    path.write_bytes(b"#" * (1 << 19))
    with pytest.raises(ArgumentProblem, match="more than"):
        read_config(str(path))
    for text in (b"a = " + b"[" * 5000, b"a = " + b"1" * 5000):
        path.write_bytes(text)
        with pytest.raises(ArgumentProblem, match="no TOML"):
            read_config(str(path))
    path.write_bytes(b"\n# \xff\n")
    with pytest.raises(ArgumentProblem, match="line 2 is not UTF-8"):
        read_config(str(path))


def test_the_example_says_the_defaults() -> None:
    """deploy/systemd/daemon.toml shows every key with what it is without a file."""
    example = read_config(str(Path(__file__).parents[2] / "deploy" / "systemd" / "daemon.toml"))
    plain = read_config(None)
    assert (example.capture, example.incidents) == (plain.capture, plain.incidents)
    assert (example.metrics, example.record, example.places) == (plain.metrics, plain.record, plain.places)
    assert plain.capture["sample"] == 100.0 and plain.allow == plain.deny == ()


def test_the_aggregator_gets_the_settings_that_count(tmp_path: Path) -> None:
    """Not what is in the file by then: with a mistake in it the old ones stay, for an aggregator that starts again, too."""
    file, ours = tmp_path / "daemon.toml", caller()
    file.write_text("[metrics]\nport = 0\n")
    config = read_config(str(file))
    file.write_text("[captur]\n")
    with listen(Path(tempfile.mkdtemp(dir=tmp_path), "s")) as ctl:
        spawned = Spawned(config, ours, ctl)
        stream = spawned.connect()
        try:
            assert stream is not None
            asked = json.loads(ask(Path(ctl.getsockname()), ["status"]))
            assert asked["streams"] == 0 and asked["recording"] is None
        finally:
            if stream is not None:
                stream.close()
            spawned.end(10)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Of a socket; its name must be short."""
    yield tmp_path / "s" / "ctl.sock"


class Served:
    """A server that is polled by a thread."""

    def __init__(self, path: Path, owners: set[int]) -> None:
        self.listener = listen(path)
        self.asked: list[list[str]] = []
        self.server = ControlServer(self.listener, owners, self._answer)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()

    def _answer(self, words: list[str]) -> str:
        self.asked.append(words)
        if words == ["wrong"]:
            raise ArgumentProblem("cannot do that", why="it is wrong", hint="do it right")
        return "x" * 3_000_000 if words == ["much"] else f"{words}\n"

    def _poll(self) -> None:
        while not self._over.wait(0.001):
            self.server.poll()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.server.close()
        self.listener.close()


def test_words_and_answers(path: Path) -> None:
    """Also an answer that is larger than a socket's buffer, and an error in its four parts."""
    with Served(path, {os.getuid()}) as served:
        assert ask(path, ["status", "é\n"]) == "['status', 'é\\n']\n"
        assert len(ask(path, ["much"])) == 3_000_000
        with pytest.raises(ArgumentProblem) as caught:
            ask(path, ["wrong"])
        assert str(caught.value) == "cannot do that: it is wrong\n  next: do it right"
        assert len(served.asked) == 3


def test_others_may_not_ask(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root and the owner only, as the kernel tells; the words are not looked at."""
    monkeypatch.setattr(module, "peer_of", lambda sock: (1, 4711))
    with Served(path, {1234}) as served:
        with pytest.raises(PermissionProblem) as caught:
            ask(path, ["stop"])
        assert "the users 0, 1234 only, and this is 4711" in caught.value.why
        assert served.asked == [] and served.server.refused == 1


@pytest.mark.parametrize("request_", [b"\n", b"[]\n", b'{"words": [1]}\n', b"{" * 20_000, b'{"words": "status"}\n'])
def test_nonsense_is_refused(path: Path, request_: bytes) -> None:
    """Whatever comes, the answer is an error and the server lives."""
    with Served(path, {os.getuid()}) as served:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(str(path))
            sock.sendall(request_)
            answer = json.loads(sock.recv(65536).split(b"\n")[0])
        assert answer["ok"] is False and "cannot read the request" in answer["what"]
        assert ask(path, ["status"]) and len(served.asked) == 1


def test_silent_ones_do_not_keep_others_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight connections that say nothing are closed after their time; the ninth is served then."""
    monkeypatch.setattr(module, "REQUEST_NS", 300_000_000)
    with Served(path, {os.getuid()}):
        silent = [socket.socket(socket.AF_UNIX) for _ in range(module.MAX_CONNECTIONS)]
        for sock in silent:
            sock.connect(str(path))
        assert ask(path, ["status"]) == "['status']\n"
        for sock in silent:
            assert sock.recv(1) == b""
            sock.close()


def test_one_place_one_daemon(path: Path) -> None:
    """A second one is told; what a killed one left is taken over; what is no socket stays."""
    with Served(path, {os.getuid()}), pytest.raises(CaptureProblem, match="another daemon listens"):
        listen(path)
    listen(path).close()
    with pytest.raises(CaptureProblem, match="too long"):
        listen(path.parent / ("s" * 120))
    path.unlink()
    path.write_text("precious")
    with pytest.raises(CaptureProblem, match="no socket"):
        listen(path)
    assert path.read_text() == "precious"
    with pytest.raises(StallscopeError, match=r"cannot ask the daemon.*\n.*next: "):
        ask(path.parent / "none", ["status"])

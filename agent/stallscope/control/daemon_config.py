"""What `stallscope daemon --config FILE` may say. docs/daemon.md explains each key."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stallscope.control.toml import Key, Schema, Wrong, boolean, choice, integer, number, read, string, strings, text_of

__all__ = ["Config", "Places", "read_config"]

PORT = 9464


@dataclass(frozen=True)
class Places:
    """Where the daemon's sockets are; `folder` is /run but for tests."""

    folder: str = "/run"

    @property
    def capture(self) -> Path:
        """`ctl` talks to capture here."""
        return Path(self.folder, "stallscope-capture", "ctl.sock")

    @property
    def aggregate(self) -> Path:
        """`ctl` talks to the aggregator here."""
        return Path(self.folder, "stallscope-aggregate", "ctl.sock")

    @property
    def frames(self) -> Path:
        """Capture sends its stream here, where the aggregator is a unit of its own."""
        return Path(self.folder, "stallscope-aggregate", "frames.sock")

    @property
    def parser(self) -> Path:
        """Capture asks the parser here, where it is a unit of its own."""
        return Path(self.folder, "stallscope-parser", "parser.sock")


@dataclass(frozen=True)
class Config:
    """`capture`, `incidents`, `metrics`, `record`: as in the file; `allow`, `deny`: rules; `text`: the file."""

    path: str | None
    text: str
    capture: dict[str, Any]
    incidents: dict[str, Any]
    metrics: dict[str, Any]
    record: dict[str, Any]
    allow: tuple[dict[str, Any], ...]
    deny: tuple[dict[str, Any], ...]
    places: Places


def _rate(value: Any) -> float:
    text = value if isinstance(value, str) else ""
    above, slash, below = text.partition("/")
    if text.endswith("%"):
        above, slash, below = text[:-1], "/", "100"
    try:
        share = float(above) / float(below) if slash else float("nan")
    except (ValueError, ZeroDivisionError):
        share = float("nan")
    if not 0 < share <= 1 or 1 / share > 1 << 32:
        raise Wrong('a rate above 0 and at most 1, as in "1/100" or "1%"')
    return 1 / share


def _url(value: Any) -> str:
    text = string(value)
    try:
        parts = urlsplit(text)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no port, or brackets that hold no address
        is_one = False
    if not is_one:
        raise Wrong('an address that begins with http:// or https://, as in "http://localhost:9093/hook"')
    return text


def _argv(value: Any) -> tuple[str, ...]:
    words = strings(value)
    if words and not words[0].startswith("/"):
        raise Wrong(
            'a program by its whole path and its arguments, as in ["/usr/bin/logger", "-t", "gpu"]: no shell reads it'
        )
    return words


def _loopback(value: Any) -> str:
    try:
        if ipaddress.ip_address(value).is_loopback:
            return str(value)
    except ValueError:
        pass
    raise Wrong('a loopback address, as in "127.0.0.1": metrics are not for the network; put a proxy before them')


def _container(value: Any) -> str:
    text = string(value)
    if text != "none" and not re.fullmatch(r"[0-9a-f*]{1,64}", text):
        raise Wrong(
            '"none", "*", or the beginning of an id of 64 hexadecimal digits: names are known to the runtime only'
        )
    return text


def _folder(value: Any) -> str:
    if not string(value).startswith("/"):
        raise Wrong("a folder by its whole path")
    return str(value)


_NO = Key(None, string)
_RULE = {"user": _NO, "cgroup": _NO, "container": Key(None, _container), "command": _NO}
_SCHEMA = Schema(
    sections={
        "capture": {
            "sample": Key(100.0, _rate),
            "backend": Key("auto", choice("auto", "bcc", "object")),
            "returns": Key("auto", choice("auto", "always", "never")),
            "processes": Key(2048, integer(16, 3968)),
        },
        "incidents": {
            "journal": Key(True, boolean),
            "webhook": Key(None, _url),
            "webhook_timeout_s": Key(5.0, number(0.1, 60)),
            "command": Key((), _argv),
            "command_timeout_s": Key(10.0, number(0.1, 600)),
            "queue": Key(64, integer(1, 4096)),
        },
        "metrics": {"address": Key("127.0.0.1", _loopback), "port": Key(PORT, integer(0, 65535))},
        "record": {
            "folder": Key(None, _folder),
            "file_mb": Key(64, integer(1, 4096)),
            "files": Key(4, integer(2, 1000)),
        },
        "sockets": {"folder": Key("/run", _folder), "capture_user": Key("stallscope-capture", string)},
    },
    lists={"allow": _RULE, "deny": _RULE},
)


def read_config(path: str | None) -> Config:
    """The settings; None = all defaults. Raises ArgumentProblem."""
    text = text_of(path)
    found = read(path, _SCHEMA, text)
    sockets = found.pop("sockets")
    found["capture"]["user"] = sockets["capture_user"]
    return Config(path=path, text=text, places=Places(sockets["folder"]), **found)

"""What a sidecar is told: options, and a file in TOML whose [sidecar] table has the same words. Options win."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from stallscope.cli.arguments import DEFAULT_ONE_IN, rate, seconds
from stallscope.errors import ArgumentProblem

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["FOLDER", "MODES", "SidecarConfig", "settled"]

FOLDER = Path("/stallscope/segments")
MODES = ("keep", "full", "lite", "min")
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class SidecarConfig:
    """`uids`: whose segments are read besides our own; `mode` "keep": as the programs were told; `end_after` in s."""

    dir: Path = FOLDER
    uids: tuple[int, ...] = ()
    mode: str = "keep"
    sample: float = DEFAULT_ONE_IN
    output: str | None = None
    force: bool = False
    json: bool = False
    report: str | None = None
    end_after: float | None = None

    @property
    def readable(self) -> frozenset[int]:
        """Whose segments are read."""
        return frozenset((os.geteuid(), *self.uids))


def settled(args: argparse.Namespace) -> SidecarConfig:
    """File and options together. Raises ArgumentProblem."""
    found = _of_file(args.config) if args.config else SidecarConfig()
    given = {f.name: getattr(args, f.name) for f in fields(SidecarConfig) if getattr(args, f.name) is not None}
    return replace(found, **given)


def _of_file(path: str) -> SidecarConfig:
    try:
        with open(path, "rb") as file:
            table = tomllib.loads(file.read(MAX_BYTES).decode()).get("sidecar", {})
    except OSError as error:
        raise _wrong(path, os.strerror(error.errno or 0)) from error
    except ValueError as error:  # neither UTF-8 nor TOML
        raise _wrong(path, str(error)) from error
    if not isinstance(table, dict):
        raise _wrong(path, "sidecar is no table")
    return SidecarConfig(**{key: _value(path, key, value) for key, value in table.items()})


def _value(path: str, key: str, value: Any) -> Any:
    try:
        return _READ[key](value)
    except KeyError:
        raise _wrong(path, f"sidecar.{key} is no setting; there are {', '.join(_READ)}") from None
    except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
        raise _wrong(path, f"sidecar.{key}: {error}") from error


def _wrong(path: str, why: str) -> ArgumentProblem:
    return ArgumentProblem(f"cannot use the configuration {path}", why=why, hint="see docs/sidecar.md")


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is no text")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _uids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(uid) is int and uid >= 0 for uid in value):
        raise ValueError(f"{value!r} is no list of user ids")
    return tuple(value)


def _mode(value: Any) -> str:
    if value not in MODES:
        raise ValueError(f"{value!r} is none of {', '.join(MODES)}")
    return str(value)


_READ: dict[str, Callable[[Any], Any]] = {
    "dir": lambda value: Path(_text(value)), "uids": _uids, "mode": _mode, "sample": lambda value: rate(str(value)),
    "output": _text, "force": _flag, "json": _flag, "report": _text, "end_after": lambda value: seconds(str(value)),
}  # fmt: skip

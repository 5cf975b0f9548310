"""Configuration files: TOML with a schema, errors in four parts that name the line."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from stallscope.errors import ArgumentProblem

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Key", "Schema", "Wrong", "boolean", "choice", "integer", "number", "read", "string", "strings", "text_of"]

MAX_BYTES = 1 << 18
_LINE = re.compile(r"\(at line (\d+), column \d+\)")


class Wrong(ValueError):
    """A value that can't be taken; says what is expected."""


class Key(NamedTuple):
    """One setting: what it is when the file does not say, and what makes a value of what the file says."""

    default: Any
    check: Callable[[Any], Any]


class Schema(NamedTuple):
    """`sections`: [name] -> its keys; `lists`: [[name]] -> keys of each table, none of which is required."""

    sections: Mapping[str, Mapping[str, Key]]
    lists: Mapping[str, Mapping[str, Key]]


def string(value: Any) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise Wrong('a text in quotes, as in "text"')
    return value


def boolean(value: Any) -> bool:
    """A truth value."""
    if not isinstance(value, bool):
        raise Wrong("true or false")
    return value


def strings(value: Any) -> tuple[str, ...]:
    """Texts."""
    if not isinstance(value, list) or not all(isinstance(word, str) and "\0" not in word for word in value):
        raise Wrong('a list of texts, as in ["one", "two"]')
    return tuple(value)


def choice(*words: str) -> Callable[[Any], str]:
    """One of these."""

    def check(value: Any) -> str:
        if value not in words:
            raise Wrong(" or ".join(f'"{word}"' for word in words))
        return str(value)

    return check


def integer(least: int, most: int) -> Callable[[Any], int]:
    """A whole number in these bounds."""

    def check(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise Wrong(f"a whole number from {least} to {most}")
        return value

    return check


def number(least: float, most: float) -> Callable[[Any], float]:
    """A number in these bounds."""

    def check(value: Any) -> float:
        if type(value) not in (int, float) or not least <= value <= most:
            raise Wrong(f"a number from {least:g} to {most:g}")
        return float(value)

    return check


def read(path: str | None, schema: Schema, text: str | None = None) -> dict[str, Any]:
    """section -> {key: value}, list -> ({key: value}, ..); the defaults where `path` is None or says nothing.

    Args:
        text: what `text_of` said is in the file; None: it is read.

    Raises:
        ArgumentProblem: it can't be read, is no TOML, has a key that nobody knows, or a value that makes no sense.
    """
    return _Reader(path or "", text_of(path) if text is None else text, schema).settings()


def text_of(path: str | None) -> str:
    """What is in a configuration file; nothing for None. Raises ArgumentProblem."""
    if path is None:
        return ""
    what = f"cannot read the configuration {path}"
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        hint = "name a file that this user can read with --config FILE"
        raise ArgumentProblem(what, why=os.strerror(error.errno or 0), hint=hint) from error
    if len(data) > MAX_BYTES:
        raise ArgumentProblem(what, why=f"it has more than {MAX_BYTES} bytes", hint="docs/daemon.md has a whole one")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ArgumentProblem(what, why=f"line {line} is not UTF-8", hint="save it as UTF-8") from error


class _Reader:
    def __init__(self, path: str, text: str, schema: Schema) -> None:
        self._path, self._lines, self._schema = path, text.splitlines(), schema
        self._found = self._parsed(text)

    def _parsed(self, text: str) -> dict[str, Any]:
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            place = _LINE.search(str(error))
            line = int(place[1]) if place else max(1, len(self._lines))
            why = _LINE.sub("", str(error)).strip()
            raise self._wrong(line, f"no TOML: {why[:1].lower()}{why[1:]}", "see https://toml.io") from error
        except (RecursionError, ValueError) as error:  # brackets without end; a number of thousands of digits
            raise self._wrong(
                None, f"no TOML that can be read ({type(error).__name__})", "see https://toml.io"
            ) from error

    def _wrong(self, line: int | None, why: str, hint: str) -> ArgumentProblem:
        where = f"{self._path}, line {line}" if line else self._path
        return ArgumentProblem("cannot use the configuration", why=f"{where}: {why}", hint=hint)

    def settings(self) -> dict[str, Any]:
        """All of them."""
        known = {*self._schema.sections, *self._schema.lists}
        for name in self._found:
            if name not in known:
                raise self._wrong(self._line(name), f"there is no section [{name}]", _offer(name, known))
        found: dict[str, Any] = {}
        for name, keys in self._schema.sections.items():
            found[name] = self._table(f"[{name}]", name, 0, self._found.get(name, {}), keys)
        for name, keys in self._schema.lists.items():
            tables = self._found.get(name, [])
            if not isinstance(tables, list):
                raise self._wrong(self._line(name), f"[{name}] is one of several", f"write [[{name}]]")
            found[name] = tuple(self._table(f"[[{name}]]", name, i, table, keys) for i, table in enumerate(tables))
        return found

    def _table(self, title: str, name: str, index: int, table: Any, keys: Mapping[str, Key]) -> dict[str, Any]:
        if not isinstance(table, dict):
            raise self._wrong(self._line(name), f"{name} is no section", f"write {title} on a line of its own")
        for key in table:
            if key not in keys:
                line = self._line(name, index, key)
                raise self._wrong(line, f"{title} has no key {key!r}", _offer(key, set(keys)))
        values = {key: row.default for key, row in keys.items()}
        for key, value in table.items():
            try:
                values[key] = keys[key].check(value)
            except Wrong as error:
                line = self._line(name, index, key)
                raise self._wrong(line, f"{title} {key} is {value!r:.60}", f"give {error}") from error
        return values

    def _line(self, section: str, index: int = 0, key: str | None = None) -> int | None:
        """Where that stands. A file that writes its sections in other ways gets no line: the parser has none."""
        head = re.compile(rf"\s*\[\[?\s*[\"']?{re.escape(section)}[\"']?\s*\]")
        heads = [number for number, line in enumerate(self._lines, 1) if head.match(line)]
        if index >= len(heads):
            return next((n for n, line in enumerate(self._lines, 1) if line.lstrip().startswith(section)), None)
        if key is None:
            return heads[index]
        named = re.compile(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=")
        after = enumerate(self._lines[heads[index] :], heads[index] + 1)
        return next((number for number, line in after if named.match(line)), heads[index])


def _offer(word: str, known: set[str]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"did you mean {near[0]}?" if near else f"there is: {', '.join(sorted(known))}"

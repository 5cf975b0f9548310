"""Typed reading of frame bodies: a frame comes from a file or a socket and may hold anything."""

from __future__ import annotations

from typing import Any

from stallscope.wire.frames import Body

__all__ = ["BadField", "integer", "items", "mapping", "maybe_boolean", "maybe_integer", "maybe_text", "rate", "raw",
           "text", "texts"]  # fmt: skip

MAX_INT = 1 << 64
MAX_NS = 1 << 62  # instants and durations stand in int64 columns, and are added there
MAX_TEXT = 4096
MAX_ITEMS = 1 << 16


class BadField(ValueError):
    """A field that is missing or not what its frame promises."""


def integer(body: Body, key: str, low: int = 0, high: int = MAX_INT) -> int:
    """The integer `low <= body[key] < high`; below MAX_NS where the key ends in `_ns`. Raises BadField."""
    value = body.get(key)
    high = min(high, MAX_NS) if key.endswith("_ns") else high
    # bool is an int to Python, not to the format.
    if type(value) is not int or not low <= value < high:
        raise BadField(f"{key} is no integer in [{low}, {high})")
    return value


def maybe_integer(body: Body, key: str, low: int = -(1 << 63), high: int = MAX_INT) -> int | None:
    """The same, or None where the field is nil or missing. Raises BadField."""
    return None if body.get(key) is None else integer(body, key, low, high)


def maybe_boolean(body: Body, key: str) -> bool | None:
    """True or False, None where the field is nil or missing. Raises BadField."""
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadField(f"{key} is no boolean")
    return value


def rate(body: Body, key: str) -> int | float:
    """One in how many, at least 1; a whole number as int. Missing: 1. Raises BadField."""
    value = body.get(key, 1)
    if type(value) not in (int, float) or not 1 <= value < MAX_INT:
        raise BadField(f"{key} is no number from 1 on")
    return int(value) if value == int(value) else float(value)


def text(body: Body, key: str) -> str:
    """A string, cut to MAX_TEXT characters. Raises BadField."""
    value = body.get(key)
    if not isinstance(value, str):
        raise BadField(f"{key} is no string")
    return value[:MAX_TEXT]


def maybe_text(body: Body, key: str) -> str | None:
    """The same, or None where the field is nil or missing. Raises BadField."""
    return None if body.get(key) is None else text(body, key)


def items(body: Body, key: str, limit: int = MAX_ITEMS) -> list[Any]:
    """A list of at most `limit` items; a missing one is empty. Raises BadField."""
    value = body.get(key, [])
    if not isinstance(value, list) or len(value) > limit:
        raise BadField(f"{key} is no list of at most {limit} items")
    return value


def texts(body: Body, key: str, limit: int = 64) -> list[str]:
    """The first `limit` strings of a list, each cut to MAX_TEXT characters. Raises BadField."""
    value = items(body, key)[:limit]
    if not all(isinstance(item, str) for item in value):
        raise BadField(f"{key} holds something else than strings")
    return [item[:MAX_TEXT] for item in value]


def raw(body: Body, key: str, unit: int) -> bytes:
    """Bytes, a whole number of `unit`. Raises BadField."""
    value = body.get(key)
    if not isinstance(value, bytes) or len(value) % unit:
        raise BadField(f"{key} is no whole number of {unit}-byte rows")
    return value


def mapping(body: Body, key: str, limit: int = 64) -> dict[str, Any]:
    """A map with at most `limit` string keys; a missing one is empty. Raises BadField."""
    value = body.get(key, {})
    if not isinstance(value, dict) or len(value) > limit or not all(isinstance(name, str) for name in value):
        raise BadField(f"{key} is no map of at most {limit} names")
    return {name[:256]: item for name, item in value.items()}

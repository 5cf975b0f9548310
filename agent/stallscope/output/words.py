"""Numbers and foreign names as a person reads them."""

from __future__ import annotations

from collections.abc import Callable

from stallscope.output.rows import Row

__all__ = ["at_least", "clean", "count", "cut", "duration", "least", "share"]

UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"))


def clean(name: str) -> str:
    """A name that the traced process chose, without what could steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in name)


def cut(name: str, width: int) -> str:
    """At most `width` characters, the end shortened."""
    safe = clean(name)
    return safe if len(safe) <= width else safe[: width - 2] + ".."


def count(number: int) -> str:
    """With thousands separators, e.g. "1,204,551"."""
    return f"{number:,}"


def duration(ns: int | None) -> str:
    """Three digits and a unit, e.g. "45.6 ms"; "-" for unknown."""
    if ns is None:
        return "-"
    if abs(ns) >= 10_000_000_000:
        return f"{ns / 1e9:,.1f} s"
    for size, unit in UNITS:
        if abs(ns) >= size:
            value = ns / size
            return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {unit}"
    return f"{ns} ns"


def at_least(row: Row, key: str) -> str:
    """The mark before a lower bound."""
    return "≥" if row.get(f"{key}_is") == "lower_bound" else ""


def least(row: Row, key: str, words: Callable[[int], str]) -> str:
    """A number of the report with its mark."""
    return at_least(row, key) + words(row[key])


def share(part: int, whole: int) -> float | None:
    """Per cent; None where the whole is not known."""
    return 100 * part / whole if whole > 0 else None

"""Small things that every section of the report needs."""

from __future__ import annotations

from typing import Any, overload

from stallscope.aggregate.state import State

__all__ = ["Row", "bound", "since"]

Row = dict[str, Any]


@overload
def since(state: State, at_ns: int) -> int: ...
@overload
def since(state: State, at_ns: None) -> None: ...
@overload
def since(state: State, at_ns: int | None) -> int | None: ...
def since(state: State, at_ns: int | None) -> int | None:
    """An instant as offset from the start of the capture, ns; None stays None."""
    if at_ns is None:
        return None
    return at_ns - (state.capture.start_mono_ns if state.capture else 0)


def bound(row: Row, is_bound: bool, *keys: str) -> None:
    """Mark numbers as lower bounds where `is_bound`; what is null says nothing and gets no mark."""
    if is_bound:
        row.update({f"{key}_is": "lower_bound" for key in keys if row[key] is not None})

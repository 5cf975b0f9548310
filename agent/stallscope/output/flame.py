"""Waits for flame graphs: folded stacks (one line a stack), and speedscope's file format. Weights in ns."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from stallscope.diagnose.waitstacks import WaitStack

__all__ = ["folded", "speedscope"]

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def folded(stacks: list[WaitStack]) -> str:
    """ "process;outermost;..;innermost;function weight" a line."""
    return "".join(f"{';'.join(map(_word, _path(stack)))} {stack.total_ns}\n" for stack in stacks)


def _path(stack: WaitStack) -> list[str]:
    return [_whose(stack), *(_named(frame) for frame in stack.frames), *_unknown(stack), stack.api]


def _whose(stack: WaitStack) -> str:
    return f"{stack.process.name} (pid {stack.process.pid})"


def _named(frame: dict[str, Any]) -> str:
    function = frame["function"] or "?"
    if frame["kind"] == "native":
        return f"{function} ({frame['file']})" if frame["file"] else function
    return f"{function} ({frame['file']}:{frame['line'] or '?'})" if frame["file"] else f"{function} (unknown)"


def _unknown(stack: WaitStack) -> list[str]:
    return [] if stack.frames else [f"(line unknown: {stack.why or 'not looked up'})"]


def _word(text: str) -> str:
    """The two characters that the format is made of."""
    return text.replace(";", ",").replace("\n", " ")


def speedscope(stacks: list[WaitStack]) -> str:
    """A profile for each process."""
    frames: dict[tuple[Any, ...], int] = {}
    profiles = [_profile(list(group), frames) for _, group in groupby(stacks, key=lambda s: s.process.order)]
    shared = [{k: v for k, v in zip(("name", "file", "line"), key, strict=True) if v is not None} for key in frames]
    return json.dumps({"$schema": SCHEMA, "shared": {"frames": shared}, "profiles": profiles}) + "\n"


def _profile(stacks: list[WaitStack], frames: dict[tuple[Any, ...], int]) -> dict[str, Any]:
    weights = [stack.total_ns for stack in stacks]
    samples = [[frames.setdefault(key, len(frames)) for key in _keys(stack)] for stack in stacks]
    return {"type": "sampled", "name": _whose(stacks[0]), "unit": "nanoseconds", "startValue": 0,
            "endValue": sum(weights), "samples": samples, "weights": weights}  # fmt: skip


def _keys(stack: WaitStack) -> list[tuple[Any, ...]]:
    lines = [(frame["function"] or "?", frame["file"], frame["line"]) for frame in stack.frames]
    return [*lines, *((word, None, None) for word in _unknown(stack)), (stack.api, None, None)]

"""How a process is told of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stallscope.capture.procfs import rank_words
from stallscope.capture.target import Target
from stallscope.wire.frames import Kind

__all__ = ["tell_image", "tell_process"]

Send = Callable[[Kind, dict[str, Any]], None]


def tell_process(send: Send, target: Target, *, traced: bool = True) -> None:
    """A PROCESS frame; `traced`: whether anything but its ancestry is of interest."""
    facts = target.facts
    if target.rank_words is None:
        target.rank_words = rank_words(target.pid)
    body = {
        "proc": target.proc, "pid": target.shown_pid, "ns_pid": facts.ns_pid, "ppid": facts.ppid,
        "parent": target.parent, "name": facts.name, "cmdline": facts.cmdline, "container_id": facts.container_id,
        "start_ns": facts.start_ns, "at_ns": target.appeared_ns, "env": target.rank_words,
    }  # fmt: skip
    send(Kind.PROCESS, body if traced else {**body, "traced": False})


def tell_image(send: Send, target: Target, at_ns: int) -> None:
    """An IMAGE frame: `target.facts` are those of its new program."""
    facts, target.rank_words = target.facts, rank_words(target.pid)
    body = {"name": facts.name, "cmdline": facts.cmdline, "env": target.rank_words}
    send(Kind.IMAGE, {"proc": target.proc, "at_ns": at_ns, **body})

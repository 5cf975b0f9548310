"""Rounds of stacks: which are kept, what is turned away, and how a person reads them."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from stallscope.aggregate.checks import BadField
from stallscope.aggregate.limits import LIMITS, Overflow
from stallscope.aggregate.rounds import Rounds
from stallscope.capture.longwaits import LongWaits
from stallscope.capture.stacks import Everybody
from stallscope.output.rounds import threads_section
from stallscope.wire.hook_table import HOOKS

S = 1_000_000_000
WAIT = next(hook.id for hook in HOOKS if hook.name == "cudaStreamSynchronize")
LAUNCH = next(hook.id for hook in HOOKS if hook.name == "cudaLaunchKernel")


def frame(proc: int, tid: int, at: int, since: int = 0, **more: Any) -> dict[str, Any]:
    body = {"at_ns": at + tid, "proc": proc, "tid": tid, "by": "memory", "frames": [["a.py", tid, "f", "python"]],
            "why": None, "round_ns": at, "since_ns": since, "waits": tid == 1, "left_out": 0, "name": f"t{tid}"}  # fmt: skip
    return {**body, **more}


def test_the_newest_and_the_longest_are_kept() -> None:
    rounds = Rounds(Overflow())
    for at, since in ((2 * S, 0), (10 * S, 0), (22 * S, 20 * S), (32 * S, 30 * S)):
        for tid in (1, 2):
            rounds.add(frame(7, tid, at, since))
    assert [(one.at_ns, one.age_ns, len(one.threads)) for one in rounds.table[7]] == [
        (10 * S, 10 * S, 2), (32 * S, 2 * S, 2)
    ]  # fmt: skip


def test_what_is_too_much_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, "stacks of threads", 3)
    monkeypatch.setitem(LIMITS, "processes with stacks", 1)
    overflow = Overflow()
    rounds = Rounds(overflow)
    for tid in range(5):
        rounds.add(frame(7, tid, 2 * S))
    assert len(rounds.table[7][0].threads) == 3 and overflow.turned_away["stacks of threads"] == 2
    rounds.add(frame(8, 1, 2 * S))
    assert 8 not in rounds.table and overflow.turned_away["processes with stacks"] == 1
    rounds.add(frame(7, 1, 10 * S))  # takes the place of what is given up
    rounds.add(frame(7, 1, 20 * S))
    assert [one.at_ns for one in rounds.table[7]] == [10 * S, 20 * S]


@pytest.mark.parametrize("field", ["waits", "name", "round_ns", "since_ns", "left_out", "frames"])
def test_a_frame_that_makes_no_sense(field: str) -> None:
    rounds = Rounds(Overflow())
    with pytest.raises(BadField):
        rounds.add(frame(7, 1, 2 * S, **{field: None}))
    assert not rounds.table


class Target:
    def __init__(self, proc: int) -> None:
        self.proc, self.pid, self.inferred = proc, proc * 100, []


def test_when_is_looked() -> None:
    wanted: list[tuple[int, Everybody]] = []
    now = [0]
    waits = LongWaits(lambda one: wanted.append((now[0], one)))
    targets: Any = [Target(1), Target(2)]

    def judge(at: float, since: float | None, **more: Any) -> None:
        now[0] = int(at * S)
        frames = [[WAIT, int(since * S), 0, 0]] if since is not None else [[LAUNCH, 0, 0, 0]]
        waits.judge(now[0], [[1, 11, frames]], targets, more.get("idle", []), more.get("block"))

    for tick in range(0, 70):
        judge(tick / 2, 0 if tick < 40 else tick / 2)
    assert [(at / S, one.waits, one.since_ns) for at, one in wanted] == [(2, (11,), 0), (10, (11,), 0)]
    wanted.clear()
    for begin in (100, 103, 106, 112, 115):  # waits of 2.5 s one after the other: a look every ten seconds
        judge(begin + 2.5, begin)
    assert [at / S for at, _ in wanted] == [102.5, 114.5]
    wanted.clear()
    for tick in range(0, 30):
        judge(200 + tick, None, idle=[targets[1]], block=200 * S)
    assert [(at / S, one.proc, one.waits) for at, one in wanted] == [(202, 2, ()), (210, 2, ())]


def test_the_section() -> None:
    def row(tid: int, function: str, **more: Any) -> dict[str, Any]:
        stack = [{"file": "/usr/lib/python3.11/queue.py", "line": 5, "function": "get", "kind": "python"},
                 {"file": "/home/me/train.py", "line": tid // 10, "function": function, "kind": "python"}]  # fmt: skip
        return {"proc": 1, "pid": 5, "tid": tid, "name": f"t{tid}", "at_ns": 0, "age_ns": 10 * S, "waits": tid < 10,
                "stack": stack, "stack_unknown": None, "threads_left_out": 2, **more}  # fmt: skip

    rows = [row(5, "step"), row(20, "read"), row(21, "read"), row(90, "", stack=None, stack_unknown="no Python code")]
    page = Console(file=io.StringIO(), width=120, color_system=None)
    threads_section({"blocked_threads": [*rows, row(6, "old", age_ns=2 * S)]}, page)
    text = page.file.getvalue()  # type: ignore[attr-defined]
    assert text == (
        "\nPython threads of pid 5 after 10.0 s of waiting\n"
        "  t5 (tid 5, waits): python3.11/queue.py:5 get < me/train.py:? step\n"
        "  t20 (tid 20) and 1 like it: python3.11/queue.py:5 get < me/train.py:2 read\n"
        "  t90 (tid 90): no Python code\n"
        "  and 2 threads more\n"
    )

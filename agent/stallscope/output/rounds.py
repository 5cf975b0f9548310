"""What all Python threads of a process did while something in it waited: `blocked_threads[]` and its section."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from stallscope.aggregate.rounds import Round, ThreadStack
from stallscope.aggregate.state import State
from stallscope.output.rows import Row, since
from stallscope.output.waits import line_of, own_frame, python_frames
from stallscope.output.words import count, cut, duration

__all__ = ["round_rows", "rounds_section"]

PROCESSES, THREADS, FRAMES = 3, 6, 3


def round_rows(state: State) -> list[Row]:
    """By process and time; in a round those that wait come first."""
    table = state.processes.table
    rounds = [(proc, one) for proc, known in sorted(state.rounds.table.items()) if proc in table for one in known]
    return [
        _row(state, proc, table[proc].pid, one, stack)
        for proc, one in rounds
        for stack in sorted(one.threads, key=lambda stack: not stack.waits)
    ]


def _row(state: State, proc: int, pid: int, one: Round, stack: ThreadStack) -> Row:
    return {
        "proc": proc, "pid": pid, "tid": stack.tid, "name": stack.name, "at_ns": since(state, stack.at_ns),
        "age_ns": one.age_ns, "waits": stack.waits, "stack": stack.frames or None, "stack_unknown": stack.why,
        "threads_left_out": one.left_out,
    }  # fmt: skip


def rounds_section(report: Row, page: Console) -> None:
    """Of each process the look at the longest wait; nothing where nobody waited for 2 s."""
    rounds: dict[int, dict[int, list[Row]]] = {}
    for row in report["blocked_threads"]:
        rounds.setdefault(row["proc"], {}).setdefault(row["age_ns"], []).append(row)
    longest = sorted((max(ages.items()) for ages in rounds.values()), key=lambda pair: -pair[0])
    for age_ns, rows in longest[:PROCESSES]:
        page.print()
        page.print(Text(f"Python threads of pid {rows[0]['pid']} after {duration(age_ns)} of waiting", style="bold"))
        for line in _lines(rows):
            page.print(Text(f"  {line}"))
    if len(longest) > PROCESSES:
        page.print(Text(f"and of {len(longest) - PROCESSES} processes more: --json shows all", style="dim"))


def _lines(rows: list[Row]) -> list[str]:
    """One for each different stack, those that wait first."""
    alike: dict[tuple[bool, str], list[Row]] = {}
    for row in rows:
        alike.setdefault((row["waits"], _stack(row)), []).append(row)
    told = [_line(stack, waits, same) for (waits, stack), same in alike.items()]
    more = sum(len(same) for same in list(alike.values())[THREADS:]) + rows[0]["threads_left_out"]
    return [*told[:THREADS], *([f"and {count(more)} threads more"] if more else [])]


def _line(stack: str, waits: bool, same: list[Row]) -> str:
    who = f"{cut(same[0]['name'], 15)} (tid {same[0]['tid']}{', waits' if waits else ''})"
    more = f" and {count(len(same) - 1)} like it" if len(same) > 1 else ""
    return f"{who}{more}: {stack}"


def _stack(row: Row) -> str:
    """From the innermost frame of the user's own outwards."""
    frames = python_frames(row["stack"] or [])
    if not frames:
        return str(row["stack_unknown"])
    begin = frames.index(own_frame(frames))
    inside = [] if not begin else [line_of(frames[0])]
    return " < ".join([*inside, *map(line_of, frames[begin : begin + FRAMES])])

"""Steps in words."""

from __future__ import annotations

from collections import Counter

from stallscope.aggregate.state import State
from stallscope.aggregate.tape import CHANGING, Meaning
from stallscope.diagnose.stepledger import Slow
from stallscope.diagnose.summing import TYPES

__all__ = ["differences", "named", "slow_words"]

MOST_NAMED = 6


def named(state: State, meaning: Meaning) -> str:
    """A call, e.g. "ncclAllReduce of 65536 float32"."""
    facts = state.hooks.get(meaning.hook)
    if facts.library != "NCCL":
        return f"{facts.name} of {meaning.size} bytes" if facts.kind == "copy" and meaning.size > 0 else facts.name
    if meaning.size == CHANGING:
        return f"{facts.name} of changing size"
    name, _ = TYPES.get(meaning.dtype, (f"type {meaning.dtype}", 0))
    return f"{facts.name} of {meaning.size} {name}"


def differences(
    state: State, meanings: dict[int, Meaning], here: dict[int, int] | None, usual: dict[int, int]
) -> str:  # fmt: skip
    """What a step does otherwise than usual, e.g. "no ncclReduceScatter, 2 more ncclAllReduce of 1 float32"."""
    if here is None:
        return "other operations than usual"
    if here == usual:
        return "other calls between the usual operations" if here else "other waits than usual"
    apis = Counter(_api(state, meanings, key) for key in here)
    less: dict[str, int] = {}
    more: dict[str, int] = {}
    for key in [*usual, *(key for key in here if key not in usual)]:
        change = here.get(key, 0) - usual.get(key, 0)
        meaning = meanings.get(key)
        name = named(state, meaning) if meaning else "calls of another kind"
        if change < 0 and not here.get(key):
            api = _api(state, meanings, key)
            less[f"no {name if apis[api] else api}"] = 0
        elif change:
            table = less if change < 0 else more
            table[name] = table.get(name, 0) + abs(change)
    words = sorted(f"{count} fewer {name}" if count else name for name, count in less.items())
    words += sorted(f"{count} more {name}" for name, count in more.items())
    rest = len(words) - MOST_NAMED
    return ", ".join([*words[:MOST_NAMED], *([f"{rest} other differences"] if rest > 0 else [])])


def _api(state: State, meanings: dict[int, Meaning], key: int) -> str:
    meaning = meanings.get(key)
    return state.hooks.get(meaning.hook).name if meaning else "a call"


def slow_words(
    state: State, meanings: dict[int, Meaning], one: Slow, here: dict[int, int] | None, usual: dict[int, int]
) -> str:  # fmt: skip
    """What was different in a slow step."""
    words = []
    if one.key is not None:
        meaning = meanings.get(one.key)
        name = named(state, meaning) if meaning else "a call"
        instead = f" instead of {_ms(one.wait_usual_ns)}" if one.wait_usual_ns else ", which others do not wait in"
        words.append(f"{_ms(one.wait_ns)} in {name}{instead}")
    if here != usual:
        words.append(differences(state, meanings, here, usual))
    if one.key is None:
        words.append(f"{_ms(one.ns - one.usual_ns)} more outside of waits for the device")
    return "; ".join(words)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.1f} ms"

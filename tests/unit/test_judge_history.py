"""Steps, and departures from them; what fits together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stallscope.diagnose.agree import blocks, difference, differs, size_bytes
from stallscope.diagnose.history import Token, breaks, first_break, joined_at, learn_step
from stallscope.diagnose.view import Signature

STEP = "aaaardw"
"""Four calls on one communicator, two on a second one, one on a third one."""


def any_part(calls: Sequence[Token], tokens: Sequence[Token]) -> bool:
    return set(calls) >= set(tokens)


def same_lane(one: Token, other: Token) -> bool:
    return {one, other} <= set("rd") or {one, other} <= set("aA")


def test_a_step_is_the_shortest_period_with_everything() -> None:
    step = learn_step("xyz" + STEP * 3, any_part)
    assert step is not None and sorted(step.calls) == sorted(STEP)


@pytest.mark.parametrize("text", [STEP * 2, "aaaaaaaaw", "", "a", "abcdefgh"])
def test_less_than_three_steps_are_none(text: str) -> None:
    assert learn_step(text, any_part) is None


def test_a_step_with_something_else_now_and_then() -> None:
    step = learn_step((STEP * 4 + "ee") * 2 + STEP, any_part) or learn_step((STEP * 4 + "ww") * 2 + STEP, any_part)
    assert step is not None and len(step.calls) == 7


@pytest.mark.parametrize(
    ("tail", "kind", "calls", "expected", "got"),
    [
        ("aaardw", "SKIPPED", 1, "a", "r"),
        ("aaaadw" + STEP, "SKIPPED", 1, "r", "d"),
        ("aaaaw" + STEP, "SKIPPED", 2, "r", "w"),
        ("aaaaard", "EXTRA", 1, "r", "a"),
        ("aaaardww", "EXTRA", 1, "a", "w"),
        ("AaaardwaaaardwA"[:14], "CHANGED", 1, "a", "A"),
        ("waaaard" + STEP, "MOVED", 7, "a", "w"),
        ("aaaadrw" + STEP, "MOVED", 2, "r", "d"),
    ],
)
def test_departures(tail: str, kind: str, calls: int, expected: str, got: str) -> None:
    step = learn_step(STEP * 4, any_part)
    assert step is not None
    (found,) = breaks(STEP * 4 + tail, step, len(STEP * 4 + tail), same_lane)
    assert (found.kind, found.distance, found.expected, found.got) == (kind, calls, expected, got)


@pytest.mark.parametrize("tail", ["", "aaa", STEP, STEP + "aaaar"])
def test_no_departure(tail: str) -> None:
    step = learn_step(STEP * 4, any_part)
    assert step is not None and breaks(STEP * 4 + tail, step, 99, same_lane) == []


def test_a_step_learnt_only_after_the_departure() -> None:
    text = STEP + "aaardw" + STEP * 4
    step = learn_step(text, any_part)
    assert step is not None and step.at > 10
    begun = joined_at(text, step, 10)
    assert begun is not None
    assert [(found.kind, found.at) for found in breaks(text, begun, 17, same_lane)] == [("SKIPPED", 10)]


@pytest.mark.parametrize(
    ("tail", "rivals"),
    [("waaa", (("MOVED", 7),)), ("rdaaa", (("MOVED", 6),)), ("rdaaaar", ()), ("eeaaa", ()), ("aaaaardwaaaa", ())],
)
def test_calls_before_their_time_while_the_rest_of_the_step_is_not_seen(tail: str, rivals: tuple[object, ...]) -> None:
    """They look like calls too many, until those that are due come as well."""
    found = first_break(tail, STEP * 2, same_lane)
    assert found is not None and (found.kind, found.rivals) == ("EXTRA", rivals)


def test_one_sequence_that_begins_the_other_is_no_departure() -> None:
    assert first_break("abc", "abcd", same_lane) is None
    assert first_break("", "abcd", same_lane) is None


ALL = Signature("ncclAllReduce", 1000, 7, 0, -1)


@pytest.mark.parametrize(
    ("other", "stands", "words"),
    [
        (ALL._replace(api="ncclReduce", root=0), True, ("ncclReduce", "ncclAllReduce")),
        (ALL._replace(root=1), True, ("root 1", "root -1")),
        (ALL._replace(elements=1000 + (16 << 10)), False, ("17384 elements", "1000 elements")),
        (ALL._replace(elements=1001 + (16 << 10)), True, ("17385 elements", "1000 elements")),
        (ALL._replace(dtype=2), False, ("data type 2", "data type 7")),
        (ALL._replace(redop=2), False, ("reduction 2", "reduction 0")),
    ],
)
def test_what_stands_and_what_only_differs(other: Signature, stands: bool, words: tuple[str, str]) -> None:
    assert differs([ALL, other]) and blocks([ALL, other]) is stands
    assert difference(other, ALL) == words


def test_sends_and_receives_agree_in_size_alone() -> None:
    send = Signature("p2p", 100, 7, -1, -1)
    assert not differs([send, send._replace(elements=400, dtype=0)]) and not blocks([send, send._replace(elements=1)])
    assert differs([send, send._replace(elements=101)])
    assert size_bytes(send) == 400 and size_bytes(send._replace(dtype=99)) == 100

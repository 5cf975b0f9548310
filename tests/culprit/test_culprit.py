"""Each fault on real processes: the right class, exactly the right ranks, the right communicator, in time."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet
from culprit_cases import SHORT, THROUGH_THE_SHIM, Case
from culprit_run import play
from culprit_score import score


def parameters(cases: list[Case]) -> list[ParameterSet]:
    """A slow rank is to be told within 200 operations, which other jobs on the machine make more of."""
    return [pytest.param(c, id=c.name, marks=[pytest.mark.quiet] * (c.kind == "slow")) for c in cases]


@pytest.mark.parametrize("case", parameters(SHORT))
def test_the_culprit_is_named(needs_bpf: None, case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", parameters(THROUGH_THE_SHIM))
def test_the_culprit_is_named_without_privileges(case: Case) -> None:
    """By `stallscope run`; what the GPUs began is known."""
    check(case)


def check(case: Case) -> None:
    run = play(case)
    result = score(case, run)
    assert not result.problems, f"said: {result.said} after {result.seconds} s; {run.stderr}"

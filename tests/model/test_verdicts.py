"""Whom the diagnosis names in the model: every fault, in every layout that has a place for it."""

from __future__ import annotations

import os

import pytest

from stallscope.diagnose.judge import judge

from .faults import FAULTS
from .program import LAYOUTS, Layout
from .score import make_trial, score

SEEDS = int(os.environ.get("STALLSCOPE_MODEL_SEEDS", "3"))
FEW = 24
"""Up to so many seeds, jobs of 32 ranks, which cost most of the time, get half of them."""

FLOOR: dict[str, float] = {}
"""Part of the decidable runs that must be right, where it is not all of them."""

CASES = [(layout, fault) for fault in FAULTS for layout in LAYOUTS if make_trial(layout, fault, 0) is not None]


@pytest.mark.parametrize(("layout", "fault"), CASES, ids=lambda case: case if isinstance(case, str) else case.name)
def test_the_culprit_is_named(layout: Layout, fault: str) -> None:
    """The rank and nobody else, and the right class, wherever the view allows it; elsewhere no other rank alone."""
    seeds = SEEDS // 2 if SEEDS <= FEW and layout.tp * layout.pp * layout.dp > 16 else SEEDS
    found = score(judge, layout, fault, range(seeds))
    wanted = FLOOR.get(fault, 1.0) * found.runs
    assert found.exact >= wanted, f"{found.exact} of {found.runs} exact: {found.misses[:3]}"
    assert found.classed >= wanted, f"{found.classed} of {found.runs} of the right class: {found.misses[:3]}"
    assert found.accused == 0
    assert found.runs + found.undecidable + found.no_hang == seeds

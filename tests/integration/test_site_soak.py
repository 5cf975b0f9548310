"""A minute of code that is made, waits once and is gone: what is told of it is the truth, or "unknown, because"."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from typing import Any

import pytest
from harness import Program, Tracer
from pythons import EVERY, KNOWN, TARGET, command
from run_kit import Running, environment
from test_shim_sites import GONE, SHORT, told, unknown, wait_until_walked
from test_sites import sites

SECONDS = 60 if EVERY else 3
CHURN = TARGET.with_name("churnsites.py")
FULL = "it waited before its Python was known, or the table of call sites was full"


# The own interpreter, and for `make test-pythons` one that numbers its code objects, too.
NUMBERED = [p for p in KNOWN if re.match(r"3\.1[2-9]-", str(p.id))]
CHOSEN = [KNOWN[0], *(NUMBERED[:1] if NUMBERED[:1] != KNOWN[:1] else [])]


def check(truth: dict[str, Any], report: dict[str, Any], reasons: set[str]) -> tuple[int, int]:
    """(fresh functions whose line was told, all of them)."""
    found, rest, made = sites(report), unknown(report), Counter(truth["sites"])
    assert found <= made, {place: count for place, count in found.items() if count > made[place]}
    assert sum(found.values()) + sum(rest.values()) == sum(made.values())
    assert all(any(why.startswith(reason) for reason in reasons) for why in rest), rest
    return tuple(sum("fresh_" in place for place in places) for places in (found, made))  # type: ignore[return-value]


@pytest.mark.parametrize("python", CHOSEN)
def test_by_probes(python: str, needs_bpf: None) -> None:
    """A wait of 20 ms is read while it lasts: most of those are known."""
    with Program([*command(python), CHURN, SECONDS]) as program:
        program.wait_for("ready")
        with Tracer([program.pid]).attached() as tracer:
            program.say()
            program.wait_for("{", SECONDS + 60)
            truth, report = json.loads(program.lines.seen[-1]), tracer.report()
    known, made = check(truth, report, {GONE, FULL})
    print(f"soak {SECONDS} s, probes, {python}: {known} of {made} fresh functions told, none wrongly")
    assert known > 0.1 * made


@pytest.mark.parametrize("python", CHOSEN)
def test_by_the_shim(python: str) -> None:
    with Running(
        [*command(python), str(CHURN), str(SECONDS)], "--json", env=environment(STALLSCOPE_LINGER="1")
    ) as running:
        running.lines.wait_for("ready")
        wait_until_walked(running)
        running.say()
        running.lines.wait_for("ready", SECONDS + 60)
        time.sleep(1.0)
        running.say()
        truth, report = told(running)
    known, made = check(truth, report, {GONE, SHORT})
    print(f"soak {SECONDS} s, shim, {python}: {known} of {made} fresh functions told, none wrongly")

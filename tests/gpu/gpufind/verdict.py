"""From hits and calls to all, some, none or unknown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from gpufind.hooks import is_variant

STATES = ("all", "some", "none", "unknown")


class Line(NamedTuple):
    """One expectation of one window; counts are None where nothing is expected or nothing was counted."""

    step: str
    origin: str
    what: str
    calls: int
    family: str
    runtime: int | None
    nccl: int | None
    driver: int | None
    looked_up: int | None
    state: str
    why: str


def _sum(hits: dict[str, int], library: str, pattern: str, counted: set[str]) -> int | None:
    """Hits of the names that were counted; None where not one was: that is not "none"."""
    labels = (label for label in counted if label.startswith(f"{library}:"))
    meant = [label for label in labels if pattern and is_variant(label.partition(":")[2], pattern)]
    return sum(hits.get(label, 0) for label in meant) if meant else None


def judge(hits: int | None, calls: int, codes: list[int]) -> tuple[str, str]:
    """The state of one expectation, and why it is unknown.

    >>> judge(1000, 1000, [])
    ('all', '')
    >>> judge(0, 1000, [35])
    ('unknown', 'the calls failed (code 35)')
    """
    if hits is None:
        return "unknown", "nothing could be counted"
    if hits >= calls:
        return "all", ""
    if codes and 0 not in codes:
        return "unknown", f"the calls failed (code {', '.join(map(str, codes))})"
    return ("some", "") if hits else ("none", "")


def lines(results: list[dict[str, Any]], counted: set[str]) -> Iterator[Line]:
    """All expectations of all windows; `counted` holds the labels that had a counter."""
    for result in results:
        for row in result["rows"]:
            for e in row["expects"]:
                yield _line(result, row, e, counted)


def _line(result: dict[str, Any], row: dict[str, Any], e: dict[str, str], counted: set[str]) -> Line:
    levels = (("CUDART", e["runtime"]), ("NCCL", e["nccl"]), ("CUDA", e["driver"]), ("CUDA@", e["driver"]))
    runtime, nccl, driver, looked_up = (_sum(row["hits"], library, pattern, counted) for library, pattern in levels)
    state, why = judge(driver if e["driver"] else nccl, row["calls"], row["codes"])
    origin, what, calls = result["origin"], row["what"], row["calls"]
    return Line(result["step"], origin, what, calls, e["family"], runtime, nccl, driver, looked_up, state, why)


def _named(line: Line) -> str:
    hits = f"{line.family} ({line.what}) {line.driver} hits in {line.calls} calls" if line.driver is not None else ""
    texts = [hits or f"{line.family} ({line.what})", line.why]
    texts += [f"but {line.looked_up} at the looked-up address" if line.looked_up else ""]
    return ", ".join(text for text in texts if text)


def _by_state(found: list[Line]) -> dict[str, list[str]]:
    groups: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for line in found:
        groups[line.state][line.origin].append(_named(line))
    return {state: [f"**{who}**: {'; '.join(what)}" for who, what in by.items()] for state, by in groups.items()}


def conclusion(found: list[Line], not_run: dict[str, str], refused: str) -> list[str]:
    """Sentences, computed."""
    driver = [line for line in found if line.family != "collective"]
    control = [line for line in driver if line.step == "raw_driver"]
    rest = _by_state([line for line in driver if line.step != "raw_driver"])
    texts = [f"No uprobe could be counted here: {refused}."] if refused else [_control(control)]
    heads = {
        "all": "Exported symbols of libcuda fire for",
        "some": "They fire for some calls only of",
        "none": "They do not fire for",
        "unknown": "Unknown",
    }
    for state in STATES:
        items = rest.get(state, [])
        items += [f"**{name}** ({why})" for name, why in not_run.items()] if state == "unknown" else []
        texts.append("\n  - ".join([f"{heads[state]}:", *items]) if items else f"{heads[state]}: nothing.")
    return texts


def _control(control: list[Line]) -> str:
    control = [line for line in control if line.driver is not None]
    if not control:
        return "The control (calls of libcuda by name) did not run: take the counts with care."
    wrong = [line for line in control if line.driver != line.calls]
    if not wrong:
        return f"The control is exact: {len(control)} functions called by name, each counted as often as it was called."
    listed = "; ".join(f"{line.what}: {line.driver} of {line.calls}" for line in wrong)
    return f"The control is NOT exact ({listed}): the counts below can't be trusted."

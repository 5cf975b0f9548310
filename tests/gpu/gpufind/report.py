"""docs/gpu-findings.md, written from the raw results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from gpufind.verdict import Line, conclusion, lines

_HEAD = """# What a uprobe on libcuda sees of the real CUDA stack

Written by `make test-gpu` ({when}); the raw data is in `gpu-findings.json`. Counting uprobes (perf_event_open) stood
on {places} places on one CPU, to which each step's process was pinned; calls by others on that CPU count too.
"All" means at least one hit a call. CUDA: is an export of libcuda, CUDA@: an address that only cuGetProcAddress tells.
"""


def markdown(data: dict[str, Any]) -> str:
    """The whole page."""
    results = data["results"]
    found = list(lines(results, set(data["counted"])))
    failed = {r["step"]: f"{r['state']}: {r['reason']}" for r in results if r["state"] != "ran"}
    not_run = {r["origin"]: failed[r["step"]] for r in results if r["step"] in failed and r["origin"]}
    texts = [*conclusion(found, not_run, data["refused"]), *_address_texts(data)]
    parts = [
        _HEAD.format(when=data["when"], places=data["places"]),
        _section("Conclusion", "\n".join(f"- {text}" for text in texts)),
        _section("Machine", _table(("what", "value"), data["machine"].items())),
        _section("Calls and hits", _calls(found)),
        _section("Hits by symbol", _symbols(results)),
        _section("Steps", _steps(results)),
        _section("Places without a counter", _refusals(data)),
        _section("Addresses from cuGetProcAddress", _addresses(data)),
        _section("First instructions of the hooks", _instructions(data)),
        _section("Cost of one uprobe", _cost(results)),
        _section("BPF", _bpf(results)),
    ]
    return "\n".join(parts)


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text or 'Nothing.'}\n"


def _cell(value: object) -> str:
    return "–" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    body = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join([f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}", *body]) if body else ""


def _calls(found: list[Line]) -> str:
    heads = ("step", "call", "calls", "expected", "libcudart hits", "libnccl hits", "libcuda export hits",
             "looked-up address hits", "verdict")  # fmt: skip
    rows = [
        (x.step, x.what, x.calls, x.family, x.runtime, x.nccl, x.driver, x.looked_up, f"{x.state} {x.why}".strip())
        for x in found
    ]
    return _table(heads, rows)


def _listed(hits: dict[str, int]) -> str:
    return ", ".join(f"{label} {count}" for label, count in Counter(hits).most_common()) or "none"


def _symbols(results: list[dict[str, Any]]) -> str:
    rows = [(r["step"], row["what"], row["calls"], _listed(row["hits"])) for r in results for row in r["rows"]]
    whole = [(r["step"], "whole process, with start-up", None, _listed(r["hits"])) for r in results if r.get("hits")]
    return _table(("step", "call", "calls", "all hits"), rows + whole)


def _steps(results: list[dict[str, Any]]) -> str:
    rows = []
    for r in results:
        notes = [r["reason"]] if r["reason"] else []
        notes += [f"{r['strays']} threads left the counted CPU"] if r.get("strays") else []
        notes += [f"not counted: {path}" for path in r.get("uncounted", [])] if r["rows"] else []
        notes += [f"{key} {value}" for key, value in r["facts"].items() if isinstance(value, str)]
        rows.append((r["step"], r["state"], r.get("seconds"), "; ".join(notes)))
    return _table(("step", "state", "seconds", "notes"), rows)


def _refusals(data: dict[str, Any]) -> str:
    rows = [*data["errors"].items(), *(("library", problem) for problem in data["problems"])]
    return _table(("place", "why"), rows)


def fact(results: list[dict[str, Any]], name: str) -> Any:
    """A fact that some step recorded, or None."""
    return next((r["facts"][name] for r in results if name in r["facts"]), None)


def _split(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    known = [r for r in rows if r["file"] != "not found"]
    same = [r for r in known if r["exports"]]
    return same, [r for r in known if not r["exports"]], [r for r in rows if r["file"] == "not found"]


def _address_texts(data: dict[str, Any]) -> list[str]:
    rows, dlsym = fact(data["results"], "addresses"), fact(data["results"], "dlsym")
    if not rows or not dlsym:
        return ["Addresses of cuGetProcAddress: unknown (the step did not run)."]
    same, other, _ = _split(rows)
    launch = [r for r in rows if r["name"] == "cuLaunchKernel"]
    said = ", ".join(f"{r['flags']}/{r['version']} {_target(r)}" for r in launch)
    agree = dlsym["asked"] - len(dlsym["elsewhere"])
    return [
        f"cuGetProcAddress gives the address of an export in {len(same)} of {len(same) + len(other)} look-ups; "
        f"for cuLaunchKernel: {said}.",
        f"dlsym gives what the symbol table says for {agree} of {dlsym['asked']} hooks.",
    ]


def _target(row: dict[str, Any]) -> str:
    return "/".join(row["exports"]) or (f"{row['file']}+{row['offset']:#x}" if row["offset"] else "not found")


def _addresses(data: dict[str, Any]) -> str:
    rows = fact(data["results"], "addresses") or []
    merged: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        merged.setdefault((row["name"], _target(row)), []).append(f"{row['flags']}/{row['version']}")
    return _table(("name", "flags/version", "leads to"), [(n, ", ".join(how), t) for (n, t), how in merged.items()])


def _instructions(data: dict[str, Any]) -> str:
    rows = []
    for path, classes in data["instructions"].items():
        for kind, names in classes.items():
            some = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
            rows.append((path, kind, len(names), some))
    missing = [(path, "(not exported)", len(n), ", ".join(n)) for path, n in data["missing"].items() if n]
    return _table(("library", "starts with", "hooks", "which"), rows + missing)


def _cost(results: list[dict[str, Any]]) -> str:
    rows = [
        (r["name"], r["bare_ns"], r["counted_ns"], round(r["counted_ns"] - r["bare_ns"], 1))
        for r in fact(results, "cost") or []
    ]
    refused = next((r.get("refused") for r in results if r["step"] == "cost"), None)
    note = f"\n\nNo counter for {refused}: the second column is not a cost." if refused else ""
    table = _table(("call, through ctypes", "bare, ns (median)", "counted, ns (median)", "one uprobe, ns"), rows)
    return table + note


def _bpf(results: list[dict[str, Any]]) -> str:
    rows = [(name, fact(results, name)) for name in ("uprobe_multi", "ring buffer", "object")]
    said = fact(results, "preflight") or []
    if isinstance(said, str):
        said = [("preflight", "unknown", said)]
    checks = [(name, f"{state}: {detail}") for name, state, detail in said]
    return _table(("what", "result"), [*rows, *checks])

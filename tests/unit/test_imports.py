"""The direction of imports (docs/architecture.md), and what aggregate and diagnose must not touch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "agent" / "stallscope"
ALLOWED = {
    "errors": set(),
    "paths": set(),
    "wire": {"wire", "errors"},
    "parser": {"parser", "wire", "errors"},
    "poller": {"poller", "wire", "errors"},
    "capture": {"capture", "wire", "errors", "paths"},
    "aggregate": {"aggregate", "wire", "errors"},
    "diagnose": {"diagnose", "aggregate", "wire", "errors"},
    "output": {"output", "diagnose", "aggregate", "wire", "errors"},
    "sim": {"sim"},
    "control": {"control", "errors"},
    "cli": {"cli", "control", "capture", "output", "diagnose", "aggregate", "wire", "errors", "paths"},
}
CLOCKS = {"time", "datetime", "os", "socket", "subprocess", "random", "secrets"}
DANGEROUS = {"pickle", "marshal", "shelve"}
FILES = sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Full names of imported modules."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def area(path: Path) -> str:
    """Top-level part of the package that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_flow_one_way(path: Path) -> None:
    """Only the parts that design allows."""
    if area(path) == "__init__":
        return
    parts = {name.split(".")[1] for name in imported(path) if name.startswith("stallscope.")}
    parts &= set(ALLOWED)
    assert parts <= ALLOWED[area(path)], f"{path} imports {sorted(parts - ALLOWED[area(path)])}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_that_runs_data(path: Path) -> None:
    """No pickle, no eval, no shell."""
    assert not imported(path) & DANGEROUS
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            assert name not in ("eval", "exec", "compile"), f"{path}:{node.lineno}"
            for word in node.keywords:
                shell = word.arg == "shell" and getattr(word.value, "value", None) is True
                assert not shell, f"{path}:{node.lineno}: shell=True"


@pytest.mark.parametrize(
    "path", [p for p in FILES if area(p) in ("aggregate", "diagnose")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_state_reads_no_clock(path: Path) -> None:
    """Replay is exact only when nothing but frames goes in."""
    assert not {name.split(".")[0] for name in imported(path)} & CLOCKS


@pytest.mark.parametrize("path", [p for p in FILES if area(p) != "poller"], ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_poller_loads_nvml(path: Path) -> None:
    """It may hang, and is a driver's code in the process."""
    assert "pynvml" not in {name.split(".")[0] for name in imported(path)}


def test_files_stay_small() -> None:
    """A file of more than 400 lines has two subjects. The generated table is data."""
    long = {p.name: n for p in FILES if (n := len(p.read_text().splitlines())) > 400 and p.name != "hook_table.py"}
    assert not long

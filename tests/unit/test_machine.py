"""Probes on aarch64 are opt-in."""

from __future__ import annotations

import os
import platform

import pytest

from stallscope.cli.machine import require_trusted_machine
from stallscope.cli.main import main
from stallscope.errors import MachineProblem


@pytest.mark.parametrize("method", ["auto", "inject"])
def test_probes_are_not_the_default_on_aarch64(method: str) -> None:
    with pytest.raises(MachineProblem, match="cannot attach by probes on aarch64 without being told to"):
        require_trusted_machine(method, "aarch64")


def test_they_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    require_trusted_machine("bpf", "aarch64")
    assert "warning: probes on aarch64: there are public reports" in capsys.readouterr().err


def test_x86_is_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    for method in ("auto", "bpf"):
        require_trusted_machine(method, "x86_64")
    assert capsys.readouterr().err == ""


def test_attach_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 3, before anything is set."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert main(["attach", str(os.getpid())]) == 3
    assert (
        "next: start the program with `stallscope run -- CMD`, or take the risk: --method bpf"
        in capsys.readouterr().err
    )

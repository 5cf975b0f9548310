"""The man page names every command and every exit code, and nothing that is not there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from stallscope.cli.main import COMMANDS
from stallscope.errors import ExitCode

PAGE = Path(__file__).resolve().parents[2] / "docs" / "stallscope.1"


def test_commands_and_codes() -> None:
    text = PAGE.read_text()
    assert set(re.findall(r"^\.It Ic (\w+)", text, re.MULTILINE)) == set(COMMANDS)
    assert set(map(int, re.findall(r"^\.It (\d)$", text, re.MULTILINE))) == {int(code) for code in ExitCode}


@pytest.mark.skipif(not shutil.which("mandoc"), reason="mandoc is not installed")
def test_it_is_well_formed() -> None:
    done = subprocess.run(["mandoc", "-T", "lint", "-W", "warning", PAGE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

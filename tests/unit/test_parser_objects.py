"""Where a file's variables lie, of real and of damaged files; and what capture takes of such an answer."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stallscope.capture.parser_answers import ParserFailed, check_objects
from stallscope.parser.errors import ParseError
from stallscope.parser.objects import find_objects
from stallscope.parser.server import EXPECTED
from stallscope.parser.source import Source

NAMES = ["environ", "__environ", "answer"]
PROGRAM = "extern char **environ; int answer = 42; int main(void) { return environ ? answer : 0; }"


def compiled(out: Path, *flags: str) -> Path:
    source = out.with_suffix(".c")
    source.write_text(PROGRAM)
    subprocess.run(["gcc", "-o", out, source, *flags], check=True)
    return out


def objects(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return find_objects(Source(file.fileno(), path.name), NAMES)


def nm(path: Path, *flags: str) -> dict[str, int]:
    output = subprocess.run(["nm", "--defined-only", *flags, path], check=True, capture_output=True, text=True)
    rows = (line.split() for line in output.stdout.splitlines())
    return {row[2].split("@")[0]: int(row[0], 16) for row in rows if len(row) == 3}


def test_a_copy_in_the_program(tmp_path: Path) -> None:
    """What libc uses then is the program's."""
    path = compiled(tmp_path / "copy", "-fno-pie", "-no-pie")
    assert objects(path)["objects"]["environ"] == [nm(path, "-D")["environ"], 8]


def test_a_program_that_leaves_it_to_libc(tmp_path: Path) -> None:
    path = compiled(tmp_path / "uses", "-fPIC", "-pie", "-mno-direct-extern-access")
    assert objects(path)["objects"] == {}


@pytest.mark.parametrize("flag", ["-static", "-static-pie"])
def test_a_static_program(tmp_path: Path, flag: str) -> None:
    path = compiled(tmp_path / "static", flag)
    found = objects(path)["objects"]
    assert {name: row[0] for name, row in found.items()} == {name: nm(path)[name] for name in NAMES}
    subprocess.run(["strip", path], check=True)
    assert objects(path)["objects"] == {}


def test_damaged_files(tmp_path: Path) -> None:
    """A refusal, or an answer within bounds."""
    data = bytearray(compiled(tmp_path / "whole", "-static-pie").read_bytes()[:60_000])
    rng = random.Random(7)
    for _ in range(150):
        bad = bytearray(data)
        for _ in range(rng.randrange(1, 12)):
            bad[rng.randrange(0, 2000)] = rng.randrange(256)
        path = tmp_path / "bad"
        path.write_bytes(bad[: rng.randrange(1, len(bad))])
        try:
            answer = objects(path)
        except (ParseError, *EXPECTED):
            continue
        check_objects(answer, frozenset(NAMES), os.stat(path).st_size)


@pytest.mark.parametrize("answer", [
    {}, {"objects": []}, {"objects": {"other": [1, 8]}}, {"objects": {"environ": [0, 8]}},
    {"objects": {"environ": [1 << 60, 8]}}, {"objects": {"environ": [1, -1]}}, {"objects": {"environ": ["1", 8]}},
    {"objects": {"environ": [1, 8]}, "exec_segments": [[1, 2]]}, {"objects": {"environ": [1, 8, 2]}},
    {"objects": {"environ": [1]}},
])  # fmt: skip
def test_answers_that_are_refused(answer: dict[str, Any]) -> None:
    with pytest.raises((ParserFailed, ValueError, TypeError)):
        check_objects({"exec_segments": [], **answer}, frozenset(NAMES), 4096)

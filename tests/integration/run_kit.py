"""`stallscope run` and programs with the shim preloaded, as a person would start them."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import ROOT, SIM_LIB, STALLSCOPE, Lines, Program
from test_attach_counts import hooked

SHIM = ROOT / "build" / "shim" / "libstallscope.so"
DEADLINE_S = 120.0


def environment(**more: str) -> dict[str, str]:
    """For programs that use the simulated stack."""
    return {**os.environ, "LD_LIBRARY_PATH": str(SIM_LIB), "STALLSCOPE_SIM_LIB": str(SIM_LIB), **more}


class Ran:
    """What one `stallscope run` gave.

    Attributes:
        out: what the command wrote to stdout; report: None where none was printed.
    """

    def __init__(self, code: int, out: str, err: str) -> None:
        said, brace, rest = out.partition('{\n "schema"')
        self.code, self.out, self.err = code, said, err
        self.report: Any = json.loads(brace + rest) if brace else None

    def truth(self) -> dict[str, Any]:
        """The line of JSON that test programs end with."""
        found: dict[str, Any] = json.loads(next(x for x in self.out.splitlines() if x.startswith("{")))
        return found


def run(words: Sequence[str | Path], *options: str | Path, said: str = "go\n", env: dict[str, str] | None = None,
        as_json: bool = True) -> Ran:  # fmt: skip
    """`stallscope run OPTIONS -- WORDS`, with that on the command's stdin."""
    command = [*STALLSCOPE, "run", *map(str, options), *(["--json"] if as_json else []), "--", *map(str, words)]
    done = subprocess.run(
        command, input=said, capture_output=True, text=True, env=env or environment(), timeout=DEADLINE_S
    )
    return Ran(done.returncode, done.stdout, done.stderr)


class Running:
    """`stallscope run` in the background; its command's stdout is a pipe of lines."""

    def __init__(self, words: Sequence[str | Path], *options: str | Path, env: dict[str, str] | None = None) -> None:
        command = [*STALLSCOPE, "run", *map(str, options), "--", *map(str, words)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=env or environment(),
        )  # fmt: skip
        self.lines, self.errors = Lines(self.process.stdout), Lines(self.process.stderr)

    def say(self, line: str = "go") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


class Preloaded(Program):
    """A program with the shim in it, and nobody who listens."""

    def __init__(self, words: Sequence[str | Path], **more: str) -> None:
        super().__init__(words, env={"LD_PRELOAD": str(SHIM), **more})


def everything(truth: dict[str, Any]) -> Counter[str]:
    """What a shim counts: the calls from before somebody looked, too."""
    return hooked(Counter(truth["calls"]) + Counter(truth.get("before_calls", {})))

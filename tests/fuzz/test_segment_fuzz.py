"""Segments that no library of ours would write, under the C reader with sanitizers (native/drain/fuzz/segment_fuzz.c)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from test_ring_fuzz import ROOT, SANITIZERS, SECONDS, STRICT


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory, needs_tool: Callable[[str], str]) -> Path:
    cc, folder = needs_tool("cc"), tmp_path_factory.mktemp("fuzz")
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    probe = subprocess.run([cc, *SANITIZERS, "empty.c", "-o", "empty"], cwd=folder, capture_output=True)
    sources = [
        ROOT / "native/drain" / name
        for name in ("fuzz/segment_fuzz.c", "segment.c", "segcounts.c", "segbase.c", "segsites.c")
    ]
    folders = [f"-I{ROOT}/native", f"-I{ROOT}/native/drain"]
    extra = [] if probe.returncode else SANITIZERS
    subprocess.run([cc, *STRICT, *extra, *folders, *sources, "-o", folder / "fuzz"], check=True)
    return folder / "fuzz"


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_read_or_written_out_of_bounds(fuzzer: Path, seed: int) -> None:
    command = [fuzzer, str(SECONDS / 2), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS + 30)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {name: int(value) for name, value in re.findall(r"(\w+) (\d+)", done.stdout)}
    assert min(found[name] for name in ("rounds", "taken", "refused", "corrupt", "sites")) > 10

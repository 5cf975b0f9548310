"""The walk of Python frames inside a process: stacks that are built by hand, whole and broken; nothing may fault."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from shim_kit import Agent, Read, environment
from test_shim_variants import LONG, SANITIZERS
from variants import program, variant

from stallscope.capture.pycode import signature
from stallscope.capture.segment import Mode
from stallscope.capture.sitetable import NO_THREAD, UNREADABLE, Site, Times, site_of, times_of
from stallscope.wire.hook_table import BY_NAME

DEEP = 8
WAIT = BY_NAME["cudaDeviceSynchronize"].id
NO_CFRAME = 65535
FRAMES = 5


class Walker:
    """walks.c with a library, and what its segment says."""

    def __init__(self, words: list[str], env: dict[str, str], agent: Agent) -> None:
        self.process = subprocess.Popen(
            words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.said: dict[str, Any] = json.loads(self.process.stdout.readline())
        (self.read,) = agent.wait_for(1)

    def walk(self, *, has_table: bool = True, least_ns: int = 0) -> None:
        """Have it look up every wait, and let it go to its end."""
        segment = self.read.segment
        code_bytes = 88 if has_table else 56
        python = (segment.header.pid, 0, self.said["tss_at"], 0, 8, NO_CFRAME, 72, 8, 0, 56, 70, 3, 0, 1, 56,
                  code_bytes, int(has_table), 0, 16, 127, 0, 0, 0, 0)  # fmt: skip
        self.read.drain()  # whoever does not read gets no sites
        segment.set_mode(Mode.FULL, long_ns=0)
        segment.walk(struct.pack("<24I", *python), [WAIT], least_ns)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n", self.end()

    def sites(self) -> list[tuple[Site, Times]]:
        segment = self.read.segment
        rows = [(row, segment.site(self.read.clock, row)) for row in segment.site_rows()]
        return [(site, times_of(data)) for row, data in rows if data and (site := site_of(data, row))]

    def end(self) -> str:
        """What it wrote to stderr."""
        _, err = self.process.communicate("\n", timeout=60)
        assert self.process.returncode == 0, (self.process.returncode, err)
        return err


@pytest.fixture(scope="module")
def walks(stubs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program(tmp_path_factory.mktemp("walks"), stubs, "walks.c")


def start(walks: Path, agent: Agent, stubs: Path, *words: object) -> Walker:
    return Walker([str(walks), *map(str, words)], environment(stubs, STALLSCOPE_SHIM=f"socket:{agent.path}"), agent)


def expected(said: dict[str, Any], has_table: bool) -> list[tuple[int, int, int]]:
    """(code, instruction, signature) by the rule that reads them back."""
    found = []
    for i, (code, table) in enumerate(zip(said["codes"], said["tables"], strict=True)):
        block = struct.pack("<11Q", *range(100 * i, 100 * i + 10), table)
        text = struct.pack("<2Q", 17 * i, 0) + bytes([ord("a") + i]) * 72
        found.append((code, 1000 + i, signature(code, *((block, text) if has_table else (block[:56], b"")))))
    return found


@pytest.mark.parametrize("has_table", [True, False])
def test_every_wait_is_at_its_stack(agent: Agent, stubs: Path, walks: Path, has_table: bool) -> None:
    """Of many threads at once; signatures are those that names are looked up by."""
    walker = start(walks, agent, stubs, "whole", 8, 500)
    walker.walk(has_table=has_table)
    (found,) = walker.sites()
    site, times = found
    facts = walker.read.segment.sites()
    assert (site.hook, site.flags, site.is_cut) == (WAIT, 1, False)
    assert [tuple(frame) for frame in site.frames] == expected(walker.said, has_table)
    assert times.calls + facts.turned_away == 8 * 500 and facts.turned_away == 0
    assert sum(times.buckets[1::2]) == times.calls and 0 < times.max_ns <= times.total_ns
    assert walker.read.conserved()["cudaDeviceSynchronize"] == 8 * 500
    walker.end()


def test_broken_stacks_are_counted_and_nothing_faults(agent: Agent, stubs: Path, walks: Path) -> None:
    """Pointers to nowhere, to the edge of a page, to themselves."""
    walker = start(walks, agent, stubs, "spoilt", 8, 500)
    walker.walk()
    found, facts = walker.sites(), walker.read.segment.sites()
    assert sum(times.calls for _, times in found) + facts.turned_away == 8 * 500
    seen = {flag for site, _ in found for flag in (NO_THREAD, UNREADABLE, DEEP) if site.flags & flag}
    assert seen == {NO_THREAD, UNREADABLE, DEEP}
    assert all(len(site.frames) <= 32 for site, _ in found)
    walker.end()


def test_where_nothing_can_be_read(agent: Agent, stubs: Path, walks: Path) -> None:
    """As in a sandbox without that system call."""
    walker = start(walks, agent, stubs, "whole", 2, 50)
    walker.said["tss_at"] = 0xFFFFFFF8
    walker.walk()
    ((site, times),) = walker.sites()
    assert (site.flags & ~1, site.frames, times.calls) == (UNREADABLE, [], 100)
    walker.end()


def test_a_full_table_turns_away_and_counts(agent: Agent, stubs: Path, walks: Path) -> None:
    """Random pointers make thousands of stacks."""
    walker = start(walks, agent, stubs, "spoilt", 32, 1000)
    walker.walk()
    found, facts = walker.sites(), walker.read.segment.sites()
    assert facts.turned_away > 0 and facts.taken == len(walker.read.segment.site_rows()) <= 1024
    assert sum(times.calls for _, times in found) + facts.turned_away == 32 * 1000
    walker.end()


def test_short_waits_cost_no_walk(agent: Agent, stubs: Path, walks: Path) -> None:
    walker = start(walks, agent, stubs, "whole", 2, 100)
    walker.walk(least_ns=1 << 40)
    assert walker.sites() == [] and walker.read.segment.sites().turned_away == 0
    walker.end()


def test_nobody_reads_any_more(agent: Agent, stubs: Path, walks: Path) -> None:
    """A reader that has let go is not worked for."""
    walker = start(walks, agent, stubs, "whole", 2, 100)
    walker.read.drain()
    fd = os.dup(agent.fds[0])
    walker.read.segment.close()
    walker.read = Read(type(walker.read.segment)(fd), walker.read.clock)
    walker.read.drain = lambda *_: walker.read  # type: ignore[method-assign, assignment]
    walker.walk()
    assert walker.sites() == []
    walker.end()
    os.close(fd)


@pytest.mark.parametrize("san", SANITIZERS)
@pytest.mark.parametrize("mode", ["whole", "spoilt"])
def test_sanitizers_find_nothing(
    agent: Agent, stubs: Path, tmp_path: Path, san: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not LONG:
        pytest.skip("STALLSCOPE_LONG_TESTS is not 1")
    name, _, options = SANITIZERS[san].partition("=")
    monkeypatch.setenv(name, options)
    library = variant(tmp_path, san=san)
    built = program(tmp_path, stubs, "walks.c", f"-fsanitize={san}", library=library)
    env = dict(os.environ, STALLSCOPE_SHIM=f"socket:{agent.path}", LD_LIBRARY_PATH=str(stubs))
    walker = Walker([str(built), mode, "8", "300"], env, agent)
    walker.walk()
    err = walker.end()
    assert "ERROR" not in err and "WARNING" not in err and "runtime error" not in err

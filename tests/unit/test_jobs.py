"""Which processes belong to one job: by who started them, by memory and connections that they share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stallscope.capture import jobs as module
from stallscope.capture.ancestors import chain_of, parents_first
from stallscope.capture.jobs import job_of, launcher_of
from stallscope.capture.peers import Ties, peers_of, ties_of

WAITS = "print('ready', flush=True); input()"
# Starts programs, tells their pids, waits.
STARTS = """
import json, os, subprocess, sys
words = json.loads(sys.argv[1])
children = [subprocess.Popen([sys.executable, '-c', text], env={**os.environ, **env}, stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True) for text, env in words]
for child in children: child.stdout.readline()
print(json.dumps([child.pid for child in children]), flush=True)
input()
"""
# Uses NCCL, as far as its mappings tell, and shares memory with who is given the same descriptor.
MEMBER = """
import mmap, os
library = open({library!r}, 'r+b')
code = mmap.mmap(library.fileno(), 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)
shared = mmap.mmap({fd}, 4096) if {fd} >= 0 else None
"""


class World:
    """Programs that end with the test."""

    def __init__(self, folder: Path) -> None:
        self.programs: list[subprocess.Popen[str]] = []
        self.library = folder / "libnccl.so.2"
        self.library.write_bytes(bytes(4096))

    def start(
        self, text: str, *words: str, fds: tuple[int, ...] = (), env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        program = subprocess.Popen(
            [sys.executable, "-c", text, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            pass_fds=fds, env={**os.environ, **(env or {})},
        )  # fmt: skip
        self.programs.append(program)
        return program

    def launcher(self, *children: tuple[str, dict[str, str]]) -> tuple[int, list[int]]:
        program = self.start(STARTS, json.dumps(children))
        assert program.stdout
        return program.pid, json.loads(program.stdout.readline())

    def member(self, fd: int = -1, then: str = "") -> int:
        program = self.start(
            MEMBER.format(library=str(self.library), fd=fd) + then + "\n" + WAITS, fds=(fd,) if fd >= 0 else ()
        )
        assert program.stdout
        program.stdout.readline()
        return program.pid

    def close(self) -> None:
        for program in self.programs:
            program.kill()
            program.communicate()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path)
    # All of them are children of ours, and the tracer's own are nobody's job.
    monkeypatch.setattr(module.os, "getpid", lambda: 1 << 30)
    yield made
    made.close()


def test_chain_of_ancestors() -> None:
    assert chain_of(os.getpid())[0] == os.getppid() and chain_of(1) == [] and chain_of(1 << 30) == []


def test_parents_before_children(world: World) -> None:
    top, (first, second) = world.launcher((WAITS, {}), (WAITS, {}))
    assert parents_first([second, top, first]) == [top, second, first]


def test_ranks_of_one_launcher(world: World) -> None:
    """Known by the different places of its children."""
    top, (first, second) = world.launcher((WAITS, {"RANK": "0"}), (WAITS, {"RANK": "1"}))
    assert launcher_of(second) == top
    assert job_of([second]) == [top, first]


def test_children_in_one_place_are_no_ranks(world: World) -> None:
    top, (first, _) = world.launcher((WAITS, {"RANK": "0"}), (WAITS, {"RANK": "0"}))
    found = launcher_of(first)
    # Who started these tests may have started users of NCCL, too: other tests beside them.
    assert found != top and (found is not None or job_of([first]) == [])


def test_users_of_nccl_under_one_launcher(world: World) -> None:
    member = MEMBER.format(library=str(world.library), fd=-1) + WAITS
    top, (first, second, _) = world.launcher((member, {}), (member, {}), (WAITS, {}))
    assert launcher_of(first) == top and second in job_of([first])


def test_a_known_launcher_above(world: World, tmp_path: Path) -> None:
    """A worker of a rank: its trainer has only one child, who started that is the launcher."""
    script = tmp_path / "torchrun"
    script.write_text(STARTS)
    child = STARTS.replace("sys.argv[1]", repr(json.dumps([[WAITS, {}]])))
    words = [sys.executable, str(script), json.dumps([[child, {}], [WAITS, {}]])]
    program = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    world.programs.append(program)
    assert program.stdout
    trainer, other = json.loads(program.stdout.readline())
    (worker,) = map(int, Path(f"/proc/{trainer}/task/{trainer}/children").read_text().split())
    assert launcher_of(worker) == program.pid
    assert job_of([worker]) == [program.pid, trainer, other]


def test_who_shares_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """And uses NCCL; transitively; not who only shares, nor who only uses."""
    one, two = os.memfd_create("nccl-one"), os.memfd_create("nccl-two")
    for fd in (one, two):
        os.ftruncate(fd, 4096)
    both = f"import mmap; more = mmap.mmap({two}, 4096)"
    first = world.member(one)
    program = world.start(MEMBER.format(library=str(world.library), fd=one) + both + "\n" + WAITS, fds=(one, two))
    assert program.stdout
    program.stdout.readline()
    third, _alone = world.member(two), world.member()
    assert peers_of({first}) == {program.pid, third}
    monkeypatch.setattr(module, "launcher_of", lambda pid: None)  # it would be pytest
    assert sorted(job_of([first])) == sorted([program.pid, third])
    os.close(one)
    os.close(two)


def test_who_is_connected(world: World) -> None:
    listen = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); c, _ = s.accept()"
    program = world.start(MEMBER.format(library=str(world.library), fd=-1) + listen + "\n" + WAITS)
    assert program.stdout
    port = int(program.stdout.readline())
    other = world.member(then=f"import socket; c = socket.create_connection(('127.0.0.1', {port}))")
    program.stdout.readline()
    stranger = world.start(WAITS)
    assert peers_of({program.pid}) == {other} and peers_of({other}) == {program.pid}
    assert peers_of({stranger.pid}) == set() and ties_of(1 << 30) is None


def test_ties() -> None:
    here, there = (
        Ties(frozenset(), frozenset({("net:[1]", (b"A", b"B"))})),
        Ties(frozenset(), frozenset({("net:[1]", (b"B", b"A"))})),
    )
    assert here.binds(there) and not here.binds(here)
    assert not here.binds(Ties(frozenset(), frozenset({("net:[2]", (b"B", b"A"))})))
    assert not Ties(frozenset(), frozenset()).binds(Ties(frozenset(), frozenset()))
